"""Limit of the bytes that an agent sends per second, so that training keeps the network."""

from __future__ import annotations

import time
from collections.abc import Callable

_BURST_S = 0.05  # bytes of this time may be sent at once


class Rate:
    """A token bucket. One thread uses it; any thread may read ``passed_bytes``."""

    def __init__(self, bytes_per_s: float | None, largest_bytes: int) -> None:
        """``bytes_per_s``: None for no limit. ``largest_bytes``: the largest piece to send at once."""
        self._bytes_per_s = bytes_per_s
        burst = largest_bytes if bytes_per_s is None else bytes_per_s * _BURST_S
        self.piece_bytes = max(1, min(largest_bytes, int(burst)))
        self.passed_bytes = 0  # so far
        self._free_at = 0.0  # when the bytes so far are paid for

    def wait(self, size_bytes: int, pause: Callable[[float], bool]) -> bool:
        """Wait until this many bytes may be sent. Return False if ``pause(seconds)`` has returned True, to cancel."""
        if self._bytes_per_s is not None:
            now = time.monotonic()
            begin = max(self._free_at, now)
            self._free_at = begin + size_bytes / self._bytes_per_s
            if begin > now and pause(begin - now):
                return False
        self.passed_bytes += size_bytes
        return True
