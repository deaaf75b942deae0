"""How long the workers of a host may make ticks without a word of the driver.

The term counts from when the agent has asked, on its own clock: however late the answer comes, the driver, which counts
from when it has missed this host, waits longer (C. Gray and D. Cheriton, "Leases", SOSP 1989).
"""

from __future__ import annotations

import time
from collections import deque


class Lease:
    """Of one host. ``until_ns`` is an instant of CLOCK_BOOTTIME; 0: there is no limit."""

    def __init__(self) -> None:
        self.until_ns = 0
        self._asked: deque[tuple[int, int]] = deque(maxlen=1024)  # number, and when
        self._number = 0

    def ask(self) -> int:
        """The number of a question that is sent now."""
        self._number += 1
        self._asked.append((self._number, time.clock_gettime_ns(time.CLOCK_BOOTTIME)))
        return self._number

    def granted(self, number: int, term_s: float) -> None:
        """The driver has heard this question."""
        while self._asked and self._asked[0][0] <= number:
            asked, at_ns = self._asked.popleft()
            if asked == number:
                self.until_ns = max(self.until_ns, at_ns + int(term_s * 1e9))
