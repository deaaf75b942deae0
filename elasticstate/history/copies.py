"""Copies of a job's commits, made from its events: replication from host to host, and durable copies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from elasticstate.history.event_files import Event, number

_NEXT_ATTEMPT = re.compile(r"; next attempt in [\d.e+]+ s$")
_COMMIT = re.compile(r"\(\d+, \d+\)")


class Replications(NamedTuple):
    """Replications that one event sums up."""

    time: float
    age_s: float | None  # the greatest age of the newest replicated commit; None: no commit was replicated
    replicated: int
    failed: int
    seconds: float  # in which one was in progress
    bytes: float  # from host to host
    memory_bytes: float  # of all copies, at the time of the event

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


class DurableCopy(NamedTuple):
    """Durable copy that was saved."""

    time: float
    seconds: float
    bytes: float


class CopyFailure(NamedTuple):
    """Failures with one reason."""

    what: str  # replication or durable copy
    kind: str  # of a failure of the storage; else empty
    reason: str  # of the last one
    times: int
    first: float
    last: float


@dataclass(slots=True)
class CopiesHistory:
    """Copies of one job."""

    replications: list[Replications] = field(default_factory=list)
    saved: list[DurableCopy] = field(default_factory=list)
    not_saved: list[float] = field(default_factory=list)  # times of failed attempts
    _failures: dict[tuple[str, str, str], CopyFailure] = field(default_factory=dict)

    @property
    def replicated(self) -> int:
        return sum(found.replicated for found in self.replications)

    @property
    def failed(self) -> int:
        """Return the number of replications that failed."""
        return sum(found.failed for found in self.replications)

    @property
    def sent_bytes(self) -> float:
        return sum(found.bytes for found in self.replications)

    @property
    def failures(self) -> list[CopyFailure]:
        """Return the failures by reason, the most frequent first."""
        return sorted(self._failures.values(), key=lambda failure: -failure.times)

    def replication(self, e: Event) -> None:
        """Add the event ``replication``."""
        figures = e["seconds"], e["bytes"], number(e, "memory_bytes") or 0.0
        self.replications.append(Replications(e["time"], number(e, "age_s"), e["replicated"], e["failed"], *figures))
        if e["failed"]:
            reason = str(e.get("reason", ""))
            self._failed(("replication", "", _COMMIT.sub("", reason)), reason, e["failed"], e["time"])

    def durable_copy(self, e: Event) -> None:
        """Add the event ``durable_copy``."""
        if e["state"] == "saved":
            self.saved.append(DurableCopy(e["time"], number(e, "seconds") or 0.0, number(e, "bytes") or 0.0))
        else:
            self.not_saved.append(e["time"])
            reason = _NEXT_ATTEMPT.sub("", str(e.get("reason", "")))
            alike = reason.replace(str(e.get("folder")), "")
            self._failed(("durable copy", str(e.get("kind", "")), alike), reason, 1, e["time"])

    def _failed(self, key: tuple[str, str, str], reason: str, count: int, time: float) -> None:
        """Count failures. ``key``: what failed, the kind, and the reason without what differs each time."""
        before = self._failures.get(key)
        first, times = (time, count) if before is None else (before.first, before.times + count)
        self._failures[key] = CopyFailure(*key[:2], reason, times, first, time)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the text of each kind of copies that the job has."""
        if self.replications:
            yield "replications", f"{self.replicated}, {self.failed} failed"
        if self.saved or self.not_saved:
            yield "durable copies", f"{len(self.saved)} saved, {len(self.not_saved)} failed"
