"""An agent's record of one of its workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from elasticstate.agent.liveness import Liveness
from elasticstate.agent.output import Audience
from elasticstate.agent.worker_process import WorkerProcess
from elasticstate.core.types import CallReport
from elasticstate.net import messages


@dataclass(slots=True)
class WorkerHandle:
    """A slot with its living worker."""

    process: WorkerProcess
    liveness: Liveness
    audience: Audience
    error_file: str  # name of the file to which the worker writes its last exception
    oom_kills: int  # counter of its memory cgroup when the worker started
    joined: int = 0  # generation of the newest world sent to the worker
    lasting: list[tuple[float, messages.FromWorkerBody]] = field(default_factory=list)
    """Messages since then that a new driver needs, each with its time."""
    notice: messages.WorkerPreemptionNotice | None = None  # preemption notice, if any
    waits: int = 0  # number of requests that wait for this agent
    doubted_at: float | None = None  # since when the worker may hang
    call: CallReport | None = None  # its newest collective call, as last reported
    call_at: float = 0.0  # when that report arrived
    call_is_known: bool = False  # the driver knows that the worker waits in this call
    watcher: asyncio.Task[None] | None = None
    stopping: list[asyncio.TimerHandle] = field(default_factory=list)

    def lasting_messages(self, now: float) -> list[messages.FromWorkerBody]:
        """Return the messages that a new driver needs. READY names the present length of the pause."""
        return [_aged(body, now - at) for at, body in self.lasting]

    def waited_s(self, now: float) -> float | None:
        """Return the seconds for which the worker has waited in a collective call; None: it does not wait."""
        if self.call is None or self.call.waiting_s is None:
            return None
        return self.call.waiting_s + now - self.call_at

    def call_report(self, now: float) -> CallReport | None:
        """Return the report of its newest collective call, with the present length of the wait."""
        return None if self.call is None else msgspec.structs.replace(self.call, waiting_s=self.waited_s(now))


def _aged(body: messages.FromWorkerBody, seconds: float) -> messages.FromWorkerBody:
    if not isinstance(body, messages.Ready):
        return body
    return msgspec.structs.replace(body, paused_s=body.paused_s + seconds)
