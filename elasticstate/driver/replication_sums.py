"""Replication in the event file: at most one event in _INTERVAL_S, which sums up the replications since the last one.

A job may replicate several times a second. An event is written _INTERVAL_S after the end of the first replication that
it counts. By then the agents have reported the bytes that they have sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from elasticstate.core.layouts import Shards
from elasticstate.core.types import CommitId
from elasticstate.driver.copy_totals import CopyTotals

_INTERVAL_S = 10.0


@dataclass(slots=True)
class _Sums:
    """Replications since the last event."""

    first_end: float | None = None  # None: none has ended
    replicated: int = 0
    failed: int = 0
    reason: str = ""  # of the last that failed
    seconds: float = 0.0  # in which one was in progress
    age_s: float = 0.0  # the greatest


class ReplicationSums:
    """Sums of the replications of a job. ``shards``: before the first step of this driver."""

    def __init__(self, shards: Shards, totals: CopyTotals) -> None:
        self._last = shards
        self._totals = totals
        self._sent_bytes = totals.sent_bytes
        self._newest_since: float | None = None  # begin of the replication of the newest replicated commit
        self._counted_until = -inf  # the time in which a replication was in progress
        self._sums = _Sums()

    def look(self, shards: Shards, now: float) -> dict[str, object] | None:
        """Follow a step of the core. Return the fields of an event if one is due."""
        last, self._last = self._last, shards
        if shards is not last:
            self._follow(last, shards, now)
        first = self._sums.first_end
        return self.rest(now) if first is not None and now >= first + _INTERVAL_S else None

    def rest(self, now: float) -> dict[str, object] | None:
        """Return the fields of an event now; None: no replication has ended since the last one."""
        sums, shards, sent = self._sums, self._last, self._totals.sent_bytes
        if sums.first_end is None:
            return None
        if shards.replication is not None:  # some of its bytes are sent
            self._count(shards.replication.since, now)
        self._sums, before, self._sent_bytes = _Sums(), self._sent_bytes, sent
        fields: dict[str, object] = {
            "commit": _listed(shards.replicated),
            "age_s": None if self._newest_since is None else round(max(sums.age_s, now - self._newest_since), 6),
            "replicated": sums.replicated,
            "failed": sums.failed,
            "seconds": round(sums.seconds, 6),
            "bytes": sent - before,
            "memory_bytes": sum(self._totals.memory().values()),
        }
        return {**fields, "reason": sums.reason} if sums.failed else fields

    def _follow(self, last: Shards, shards: Shards, now: float) -> None:
        is_done = shards.replicated != last.replicated and shards.replicated is not None
        failed = max(0, shards.failures - (0 if is_done else last.failures))
        if not is_done and not failed:
            return
        sums, since = self._sums, now if last.replication is None else last.replication.since
        sums.first_end = now if sums.first_end is None else sums.first_end
        self._count(since, now)
        if is_done:
            if self._newest_since is not None:
                sums.age_s = max(sums.age_s, now - self._newest_since)
            sums.replicated, self._newest_since = sums.replicated + 1, since
        if failed:
            sums.failed, sums.reason = sums.failed + failed, shards.trouble

    def _count(self, since: float, now: float) -> None:
        self._sums.seconds += now - max(since, self._counted_until)
        self._counted_until = now


def _listed(commit: CommitId | None) -> list[int] | None:
    return None if commit is None else list(commit)
