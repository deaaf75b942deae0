"""Whether a worker is alive and gets on, by what stands on its page. The worker writes there without any message."""

from __future__ import annotations

from elasticstate._native import ControlPage
from elasticstate.core.types import CommitId
from elasticstate.net.messages import Place, Stamp

_STAMPS_INTERVAL_S = 1.0
_STAMPS_PER_TIMEOUT = 10
_FEWEST_STAMPS_PER_TIMEOUT = 4
_STAMPS_PER_S = 4000  # that a driver gets


class Pulse:
    """One worker's page, and when it last changed. Instants are of the agent's own monotonic clock, and given.

    A worker is judged from ``begin`` (its hello) to ``end``; its page may be looked at, and tells news, at any time.
    """

    def __init__(self, page: str, owner: bytes) -> None:
        """Before the process is started: what the last one has left on the page, but for the seals, is forgotten.

        Raises OSError when the page cannot be mapped.
        """
        self._page = ControlPage(page)
        self._page.reset()
        self._owner = owner
        self._judged = False
        self._heard_at = self._moved_at = 0.0
        self._seen = self._page.stamp()
        self._is_news = False
        self._told: Stamp | None = None

    def begin(self, now: float) -> None:
        """The worker has said hello."""
        self._judged = True
        self._heard_at = self._moved_at = now

    def end(self) -> None:
        """It is judged no more."""
        self._judged = False

    def look(self, now: float) -> None:
        """Read the page."""
        last, self._seen = self._seen, self._page.stamp()
        if self._seen[0] != last[0]:  # alive
            self._heard_at, self._is_news = now, True
        if self._seen[1:] != last[1:]:
            self._moved_at = now

    def move(self, now: float) -> None:
        """It waits for this agent: that is no hang."""
        self._moved_at = now

    def set_lease(self, until_ns: int) -> None:
        """See agent/lease.py."""
        self._page.set_lease(until_ns)

    def forgive(self, seconds: float) -> None:
        """So much time does not count."""
        self._heard_at += seconds
        self._moved_at += seconds

    def verdict(self, now: float, heartbeat_timeout_s: float) -> str:
        """Why the worker must be given up; "" while it lives. Behind the gate nobody is judged."""
        if not self._judged or self._place == Place.DONE or now - self._heard_at <= heartbeat_timeout_s:
            return ""
        return f"no sign of life for --heartbeat-timeout of {heartbeat_timeout_s:g} s"

    def doubt(self, now: float, hang_timeout_s: float | None) -> str:
        """Why the worker seems to hang; "" while it gets on. It may just as well wait for another that does."""
        if hang_timeout_s is None or not self._judged or self._place != Place.TRAIN:
            return ""
        return f"no tick for --hang-timeout of {hang_timeout_s:g} s" if now - self._moved_at > hang_timeout_s else ""

    @property
    def generation(self) -> int:
        return self._seen[3]

    @property
    def _place(self) -> Place:
        return _place(self._seen[2])

    @property
    def latest(self) -> Stamp:
        """What the page says."""
        _, _, place, generation, ticks = self._seen
        return Stamp(_place(place), generation, ticks, newest_commit(self._page, self._owner))

    def news(self) -> Stamp | None:
        """What the driver has not been told: a sign of life since the last call, or another commit."""
        stamp = self.latest
        if not self._is_news and stamp == self._told:
            return None
        self._is_news, self._told = False, stamp
        return stamp


def stamps_interval_s(heartbeat_timeout_s: float, workers: int) -> float:
    """Between an agent's messages with stamps, which are its own sign of life: longer in a world of many workers."""
    interval_s = min(_STAMPS_INTERVAL_S, heartbeat_timeout_s / _STAMPS_PER_TIMEOUT)
    return min(interval_s * max(1.0, workers / _STAMPS_PER_S), heartbeat_timeout_s / _FEWEST_STAMPS_PER_TIMEOUT)


def newest_commit(page: ControlPage, owner: bytes) -> CommitId | None:
    """The newest commit that a page has the seal of."""
    seals = (page.sealed(index, owner) for index in (0, 1))
    return max((CommitId(*seal[:2]) for seal in seals if seal is not None), default=None)


def _place(number: int) -> Place:
    """A worker that writes over its own memory may write rubbish here, too."""
    try:
        return Place(number)
    except ValueError:
        return Place.BOOT
