"""The lease: the time for which the workers of a host may make ticks without an answer from the driver.

The term counts from the agent's request, on the agent's own clock. The driver counts from when it has declared this
host unreachable. So however late the answer arrives, the driver waits longer than the lease lasts (C. Gray and D.
Cheriton, "Leases", SOSP 1989).
"""

from __future__ import annotations

import time
from collections import deque


class Lease:
    """Lease of one host. ``until_ns`` is a time of CLOCK_BOOTTIME; 0: no limit."""

    def __init__(self) -> None:
        self.until_ns = 0
        self._asked: deque[tuple[int, int]] = deque(maxlen=1024)  # number and time of each request
        self._number = 0

    def ask(self) -> int:
        """Return the number of a request that is sent now."""
        self._number += 1
        self._asked.append((self._number, time.clock_gettime_ns(time.CLOCK_BOOTTIME)))
        return self._number

    def granted(self, number: int, term_s: float) -> None:
        """Extend the lease: the driver has received this request."""
        while self._asked and self._asked[0][0] <= number:
            asked, at_ns = self._asked.popleft()
            if asked == number:
                self.until_ns = max(self.until_ns, at_ns + int(term_s * 1e9))
