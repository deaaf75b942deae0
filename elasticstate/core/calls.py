"""Collective calls of workers: the report of a worker, the event for the core, and the effect that requests reports."""

from __future__ import annotations

from dataclasses import dataclass

from elasticstate.core.ids import WorkerId
from elasticstate.core.message import Message


class CallReport(Message, frozen=True):
    """The newest collective call of a worker in ``generation``.

    Process set and number identify the call: they are equal on all ranks.
    """

    generation: int
    process_set: int  # 0: all ranks of the world
    ranks: tuple[int, ...]  # of the process set; (): all ranks of the world
    number: int
    call: str
    waiting_s: float | None  # seconds for which the worker has waited in the call; None: the worker has left the call


@dataclass(frozen=True, slots=True)
class CallReported:
    """A worker has reported its newest collective call."""

    worker: WorkerId
    report: CallReport


class WatchCalls(Message, frozen=True):
    """Order to all agents: forward the reports of all calls in ``generation``, from the newest ones on.

    ``on`` False: forward only reports of workers that have waited for --stall-check-time.
    """

    generation: int
    on: bool
