"""Liveness and progress of one worker, read from its control page. The worker writes its stamps there."""

from __future__ import annotations

from msgspec.structs import replace

from elasticstate._native import ControlPage
from elasticstate.core.types import CommitId
from elasticstate.net.messages import Place, Stamp

_STAMPS_INTERVAL_S = 1.0
_STAMPS_PER_TIMEOUT = 10
_FEWEST_STAMPS_PER_TIMEOUT = 4
_STAMPS_PER_S = 4000  # limit of stamps that the driver receives


class Liveness:
    """One worker's control page, and when it last changed. Times are passed in, from the agent's monotonic clock.

    A worker is judged from ``begin`` (its Hello) to ``end``. The page may be read, at any time.
    """

    def __init__(self, page: ControlPage, owner: bytes) -> None:
        """Reset the page before the process starts. Only the seals of the previous worker's commits stay."""
        self._page = self._seals = page
        self._page.reset()
        self._owner = owner
        self._judged = False
        self._heartbeat_at = self._moved_at = self._looked_at = 0.0
        self._seen = self._page.stamp()
        self._trains_since = 0
        self._has_changed = False
        self._reported: Stamp | None = None
        self._next_point = 0  # number of the first point on the page that was not reported

    def begin(self, now: float) -> None:
        """Start to judge the worker: its Hello has arrived."""
        self._judged = True
        self._heartbeat_at = self._moved_at = self._looked_at = now

    def storage_is(self, page: ControlPage) -> None:
        """Read seals from the page of the worker's new storage; stamps only if its Hello has not arrived yet."""
        self._seals = page
        if not self._judged:
            self._page = page

    def end(self) -> None:
        """Stop judging the worker."""
        self._judged = False

    def look(self, now: float) -> None:
        """Read the page."""
        last, self._seen, self._looked_at = self._seen, self._page.stamp(), now
        self._trains_since = self._page.trains_since
        if self._seen[0] != last[0]:  # heartbeat
            self._heartbeat_at, self._has_changed = now, True
        if self._seen[1:] != last[1:]:
            self._moved_at = now

    def move(self, now: float) -> None:
        """Count the worker as making progress: it waits for this agent."""
        self._moved_at = now

    def set_lease(self, until_ns: int) -> None:
        """Write the end of the lease to the page (see agent/lease.py)."""
        self._page.set_lease(until_ns)

    def forgive(self, seconds: float) -> None:
        """Do not count this time."""
        self._heartbeat_at += seconds
        self._moved_at += seconds

    def verdict(self, now: float, heartbeat_timeout_s: float) -> str:
        """Return why the worker must be given up, or "". A worker that is past the exit gate is not judged."""
        if not self._judged or self._place == Place.DONE or now - self._heartbeat_at <= heartbeat_timeout_s:
            return ""
        return f"no heartbeat for --heartbeat-timeout of {heartbeat_timeout_s:g} s"

    def doubt(self, now: float, hang_timeout_s: float | None) -> str:
        """Return why the worker may hang, or "". It may just as well wait for another worker that hangs."""
        if hang_timeout_s is None or not self._judged or self._place != Place.TRAIN:
            return ""
        return f"no tick for --hang-timeout of {hang_timeout_s:g} s" if now - self._moved_at > hang_timeout_s else ""

    def holds_commit(self, index: int) -> bool:
        """Return True if buffer 0 or 1 carries a seal."""
        return self._seals.sealed(index, self._owner) is not None

    @property
    def generation(self) -> int:
        return self._seen[3]

    @property
    def _place(self) -> Place:
        return _place(self._seen[2])

    @property
    def commits(self) -> tuple[CommitId, ...]:
        """The commits in the buffers, the newest first."""
        return tuple(commit for commit in sealed_commits(self._seals, self._owner) if commit is not None)

    @property
    def latest(self) -> Stamp:
        """The stamp as last read from the page."""
        _, _, place, generation, ticks = self._seen
        newest, previous = sealed_commits(self._seals, self._owner)
        return Stamp(_place(place), generation, ticks, newest, self._page.commit_s, previous=previous)

    def changed_stamp(self) -> Stamp | None:
        """Return the stamp if there was a heartbeat, or any change of the stamp, since the last call; else None."""
        stamp = self.latest
        if not self._has_changed and stamp == self._reported:
            return None
        self._has_changed, self._reported = False, stamp
        still_s = self._looked_at - self._moved_at
        trained_s = self._looked_at - self._trains_since / 1e9 if self._trains_since else 0.0
        points, self._next_point = self._page.points(self._next_point)
        pace = tuple((tick, own_us) for generation, tick, own_us in points if generation == stamp.generation)
        seconds = {"still_s": round(max(0.0, still_s), 3), "trained_s": round(max(0.0, trained_s), 3)}
        return replace(stamp, pace=pace, **seconds)


def stamps_interval_s(heartbeat_timeout_s: float, workers: int) -> float:
    """Return the interval between an agent's Stamps messages, which are the agent's own heartbeats.

    The interval grows with the number of workers, so that the driver keeps up.
    """
    interval_s = min(_STAMPS_INTERVAL_S, heartbeat_timeout_s / _STAMPS_PER_TIMEOUT)
    return min(interval_s * max(1.0, workers / _STAMPS_PER_S), heartbeat_timeout_s / _FEWEST_STAMPS_PER_TIMEOUT)


def sealed_commits(page: ControlPage, owner: bytes) -> tuple[CommitId | None, CommitId | None]:
    """Return the newest commit and the previous commit whose seals are on the page."""
    seals = (page.sealed(index, owner) for index in (0, 1))
    commits = sorted((CommitId(*seal[:2]) for seal in seals if seal is not None), reverse=True)
    return commits[0] if commits else None, commits[1] if len(commits) > 1 else None


def _place(number: int) -> Place:
    """Convert the number on the page. A worker that corrupts its own memory may have written an invalid one."""
    try:
        return Place(number)
    except ValueError:
        return Place.BOOT
