"""State of a job that the parts of its driver share: membership, outcome, and readings of workers and hosts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from elasticstate.core.ids import WorkerId
from elasticstate.core.policy import Policy
from elasticstate.core.sharded import is_sharded
from elasticstate.core.state import Membership
from elasticstate.core.step import new_membership
from elasticstate.core.types import RootCause
from elasticstate.driver.record import RecordOverview
from elasticstate.driver.status import CopyTotals, DurableFigures
from elasticstate.net.messages import MOST_METRICS, HostUse, Stamps

FAILED = 1  # exit status: another attempt may succeed
OWN_ERROR = 3  # exit status: the script's own error, which would come again


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of the job."""

    status: int
    word: str  # succeeded, failed, or what stopped the job
    root_cause: RootCause | None = None


class JobState:
    """The core's state, why the core acts or waits, and the outcome of the job. Times: the event loop's clock."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.membership = new_membership(policy, now)
        self.reason = ""
        self.outcome: Outcome | None = None  # None: the job is not over
        self.stopped: Outcome | None = None  # the outcome of a job that is being stopped
        self.commit_bytes = 0  # size of a commit of the largest worker; of shards, in the last world that reported it
        self._sized_in = 0  # the generation that reported it
        self.stores: dict[str, str] = {}  # by host: address of the store for the next world of plain workers
        self.copy_servers: dict[str, str] = {}  # by host: address of the copy server
        self.stepped_at = now
        self.committed_at: float | None = None  # when this driver received the newest commit
        self.durable = DurableFigures()
        self.copies = CopyTotals()
        self.readings = Readings()
        self.record: RecordOverview | None = None  # None: no --standbys

    def record_commit_size(self, size_bytes: int) -> None:
        """Record the size of a worker's commit. Each world has shards of another size."""
        if is_sharded(self.membership) and self._sized_in != self.membership.generation:
            self.commit_bytes = 0
        self._sized_in = self.membership.generation
        self.commit_bytes = max(self.commit_bytes, size_bytes)

    def size_for_newcomers(self) -> int:
        """Return the size of a commit in a world of all living workers, as far as it is known. Shards are taken to be
        distributed evenly."""
        m = self.membership
        if m.world is None or not is_sharded(m):
            return self.commit_bytes
        return -(-self.commit_bytes * m.world.size // max(m.world.size, sum(m.living.values())))


# ------------------------------------------------------------------------------------------------------------- readings
# The newest values that scripts have reported with ``report_metric``, and the use of the hosts.


_MANY_VALUES = 10_000
_VALUES_PER_S = 100_000  # limit of the values that are looked at, if there are many


class Metric(NamedTuple):
    """A name's newest value, as the lowest rank among the living workers has reported it, and those of all of them."""

    value: float
    rank: int | None  # None: the worker has no rank yet
    values: tuple[float, ...]


class Readings:
    """Readings of a job. Only the event loop changes them, so any thread may read them."""

    def __init__(self) -> None:
        self.use: dict[str, HostUse] = {}  # by host
        self.arrived: dict[str, float] = {}  # by name: when the newest value arrived, in Unix time
        self._values: dict[str, dict[WorkerId, float]] = {}
        self._last: dict[str, Metric] = {}
        self._has_refused = False
        self._changes = 0  # of the values
        self._made_of: tuple[int, object] = (0, None)  # changes and workers of which ``_last`` was made
        self._made_at = -inf  # monotonic time

    def update(self, host: str, message: Stamps, m: Membership, at: float) -> str:
        """Enter what an agent has sent. Return the first name of all for which there is no place, once, or ""."""
        if message.use is not None:
            self.use[host] = message.use
        refused = ""
        for worker, values in message.metrics:
            for name, value in values:
                if name not in self._values and len(self._values) >= MOST_METRICS:
                    refused = refused or ("" if self._has_refused else name)
                    self._has_refused = True
                    continue
                known = self._values.setdefault(name, {})
                if worker not in known and len(known) > len(m.workers):
                    known = self._values[name] = {w: v for w, v in known.items() if w in m.workers}
                known[worker] = value
                self.arrived[name] = at
                self._changes += 1
        return refused

    def host_lost(self, host: str) -> None:
        self.use.pop(host, None)

    def metrics(self, m: Membership) -> dict[str, Metric]:
        """Return the newest values by name. A name without a living worker keeps its last one.

        With very many values the answer may be a few seconds old.
        """
        number, now = sum(map(len, list(self._values.values()))), time.monotonic()
        changes, workers = self._made_of
        is_same = changes == self._changes and workers is m.workers
        if is_same or (number > _MANY_VALUES and now < self._made_at + number / _VALUES_PER_S):
            return dict(self._last)
        self._made_of, self._made_at = (self._changes, m.workers), now
        for name, values in list(self._values.items()):
            found = [(_rank(m, worker), worker, value) for worker, value in dict(values).items() if worker in m.workers]
            if found:
                _, worker, value = min(found)
                self._last[name] = Metric(value, m.workers[worker].rank, tuple(value for _, _, value in found))
        return dict(self._last)


def _rank(m: Membership, worker: WorkerId) -> float:
    rank = m.workers[worker].rank
    return inf if rank is None else rank


def shown(value: float) -> float | str:
    """Return a value for JSON, which has no NaN and no infinity."""
    return value if isfinite(value) else "NaN" if value != value else "infinity" if value > 0 else "-infinity"
