"""Waits for a condition with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait until the condition is true."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not after 30 s: {what}"
        time.sleep(0.002)
