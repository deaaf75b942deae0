"""Formulas for the backoff of a slot that has failed and the cooldown of a host that fails repeatedly.

A row of failures ends, and the counters return to zero, with a commit of a world that the failed worker was in, or
after a time without failures as long as the longest cooldown.
"""

from __future__ import annotations

from zlib import crc32

MAX_BACKOFF_S = 60.0
JITTER = 0.1  # so that slots and hosts that were lost together do not all return in the same second
FAILURES_IN_A_ROW = 3  # deaths on one host: cooldown; failures of one slot: the job does not count on it any more
SAME_DEATH_S = 1.0  # deaths on one host within this time count as one
_ATTEMPTS = 10  # the least number of attempts within a time-out that would end the job


def backoff_s(failures: int, name: str = "") -> float:
    """Return the seconds before a restart after ``failures`` in a row: 0, 1, 2, 4 ... at most 60, with a jitter by
    name."""
    if failures <= 1:
        return 0.0
    return _spread(2.0 ** min(failures - 2, 10), 0.0, MAX_BACKOFF_S, name, failures)


def cooldown_s(host: str, count: int, min_s: float, max_s: float) -> float:
    """Return the seconds of a host's cooldown number ``count`` (from 0): doubling, with a jitter within the limits."""
    return _spread(min_s * 2.0 ** min(count, 30), min_s, max_s, host, count)


def patience_s(failures: int, limit_s: float) -> float:
    """Return the seconds of backoff or cooldown for a slot or host that the job needs to reach min_np. The job ends
    after ``limit_s``, so this time is short enough for several attempts."""
    return min(backoff_s(failures), patience_limit_s(limit_s))


def patience_limit_s(limit_s: float) -> float:
    """Return the longest time for one of several attempts in a job that ends after ``limit_s``."""
    return limit_s / _ATTEMPTS


def together_s(limit_s: float) -> float:
    """Return the seconds after the first failure of a job in which the other workers may fail in the same way, before
    one is restarted. The job ends after ``limit_s``."""
    return min(SAME_DEATH_S, limit_s / _ATTEMPTS)


def _spread(seconds: float, min_s: float, max_s: float, name: str, count: int) -> float:
    """Return ``seconds``, up to a tenth longer, but not more than ``max_s``: at this limit, up to a tenth shorter, but
    not less than ``min_s``. A checksum decides, so the same events give the same transcript."""
    if not name:
        return min(seconds, max_s)
    share = JITTER * (crc32(f"{name}/{count}".encode()) % 1000) / 1000.0
    return seconds * (1.0 + share) if seconds * (1.0 + JITTER) <= max_s else max(min_s, max_s / (1.0 + share))
