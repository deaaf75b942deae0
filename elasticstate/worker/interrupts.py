"""SIGINT to a worker that ends already: it has no effect. Otherwise it would print a traceback, wherever it arrives.

Until then the script has Python's own handler, which raises KeyboardInterrupt.
"""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def ignore() -> None:
    """Ignore SIGINT from now on, unless the script handles it. Processes that the script starts get it."""
    if _replace(signal.default_int_handler, _nothing):
        atexit.register(ignore_at_exit)


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore SIGINT, unless the script handles it."""
    is_ours = _replace(signal.default_int_handler, _nothing)
    try:
        yield
    finally:
        if is_ours:
            _replace(_nothing, signal.default_int_handler)


def ignore_at_exit() -> None:
    """Ignore SIGINT for good: the end of the interpreter would give it its usual effect back."""
    for handler in (_nothing, signal.default_int_handler):
        _replace(handler, signal.SIG_IGN)


def _replace(old: object, new: Any) -> bool:
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not old:
        return False
    signal.signal(signal.SIGINT, new)
    return True


def _nothing(signum: int, frame: object) -> None:
    pass
