"""The budget of failures: how long a slot that has failed, and a host that fails again and again, are left alone.

Pure formulas. A row of failures ends, and what was counted is forgiven, by a commit of a world that the failed worker
was in, or when all went well for as long as the longest cooldown.
"""

from __future__ import annotations

from zlib import crc32

MAX_BACKOFF_S = 60.0
JITTER = 0.1  # so that those that were lost together do not all come back in the same second
FAILURES_IN_A_ROW = 3  # deaths on one host: cooldown; of one slot: it is not counted on any more
SAME_DEATH_S = 1.0  # deaths on one host within this time have one reason and count once
_ATTEMPTS = 10  # at least, within a time-out that would end the job


def backoff_s(failures: int, name: str = "") -> float:
    """Seconds before the restart after ``failures`` failures in a row: 0, 1, 2, 4 ... 60, with a jitter by name."""
    if failures <= 1:
        return 0.0
    return _spread(min(MAX_BACKOFF_S, 2.0 ** min(failures - 2, 10)), name, failures)


def cooldown_s(host: str, count: int, min_s: float, max_s: float) -> float:
    """Seconds for which a host is refused at its cooldown number ``count`` (from 0): doubling, with a jitter."""
    return _spread(min(max_s, min_s * 2.0 ** min(count, 30)), host, count)


def patience_s(failures: int, limit_s: float) -> float:
    """Seconds for which what has failed is left alone when the job cannot go on without it, and will be given up after
    ``limit_s``: short enough for several attempts."""
    return min(backoff_s(failures), limit_s / _ATTEMPTS)


def _spread(seconds: float, name: str, count: int) -> float:
    """Up to a tenth longer. A checksum decides: the same events give the same transcript."""
    return seconds * (1.0 + JITTER * (crc32(f"{name}/{count}".encode()) % 1000) / 1000.0) if name else seconds
