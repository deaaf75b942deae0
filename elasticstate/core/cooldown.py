"""How long a failed slot, and a host that fails again and again, are left alone. Pure formulas."""

from __future__ import annotations

from zlib import crc32

MAX_BACKOFF_S = 60.0
JITTER = 0.1  # of the cooldown, so that hosts that were lost together do not all come back in the same second
DEATHS_IN_A_ROW = 3  # on one host: cooldown
SAME_DEATH_S = 1.0  # deaths on one host within this time have one reason and count once


def backoff_s(failures: int) -> float:
    """Seconds before the restart after ``failures`` failures in a row: 0, 1, 2, 4 ... 60."""
    if failures <= 1:
        return 0.0
    return float(min(MAX_BACKOFF_S, 2.0 ** min(failures - 2, 10)))


def cooldown_s(host: str, count: int, min_s: float, max_s: float) -> float:
    """Seconds for which a host is refused at its cooldown number ``count`` (from 0): doubling, with a fixed jitter.

    The jitter is a checksum of host and count: the same events give the same transcript.
    """
    base = min(max_s, min_s * 2.0 ** min(count, 30))
    return base * (1.0 + JITTER * (crc32(f"{host}/{count}".encode()) % 1000) / 1000.0)
