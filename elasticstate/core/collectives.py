"""Collectives that workers have entered: their reports when a generation has ended because it hangs, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct

from elasticstate.core.ids import WorkerId
from elasticstate.core.message import Message
from elasticstate.core.texts import ranks_text


class Collective(Message, frozen=True):
    """One collective. Group and number are equal on all ranks that enter it."""

    group: str  # name of the process group
    number: int  # in the group, from 1
    text: str  # operation and sizes


class CollectivesReport(Message, frozen=True):
    """The last collectives that a worker has entered in ``generation``, and the stack of its main thread.

    Sent when the generation has ended because it hangs, and as the answer to AskWhere.
    """

    generation: int
    collectives: tuple[Collective, ...]
    stack: str
    line: str = ""  # the innermost line of it that is the script's own: ``train.py:14 in train: dist.barrier()``


class AskWhere(Message, frozen=True):
    """Order to all members of ``generation``: report where you are. The generation goes on."""

    generation: int


@dataclass(frozen=True, slots=True)
class CollectivesReported:
    """A worker has reported its last collectives."""

    worker: WorkerId
    report: CollectivesReport


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a comparison: the collective, and the ranks that have entered it, that have not, and without report."""

    collective: Collective | None  # None: no rank has entered one that another rank has not
    entered: tuple[int, ...]
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    mixture: str = ""  # the first collective that is another one on some ranks

    def text(self) -> str:
        """Return the finding as a clause."""
        silent = f"no report from {ranks_text(self.silent)}" if self.silent else ""
        if self.mixture:
            return ", ".join(filter(None, (self.mixture, silent)))
        if self.collective is None:
            return silent or "all ranks have entered the same collectives"
        where = f"{self.collective.text} (number {self.collective.number} of {self.collective.group})"
        parts = [f"{where} was entered by {ranks_text(self.entered)}"]
        if self.missing:
            parts.append(f"and not by {ranks_text(self.missing)}")
        return ", ".join(filter(None, (" ".join(parts), silent)))


class Hang(Struct, frozen=True, gc=False):
    """A hang of ``generation``. ``ranks``: its members."""

    generation: int
    ranks: Mapping[str, int]  # by the names of the workers
    reports: Mapping[int, CollectivesReport]  # by rank
    found: Finding | None = None  # after the report is complete
