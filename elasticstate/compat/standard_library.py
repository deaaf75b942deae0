"""Private names of Python's standard library. Checked with Python 3.11.

- ``_thread.start_new_thread`` is documented, in spite of its name.
- ``runpy._run_module_as_main`` is what ``python -m`` calls. ``run_module``, which is public, removes ``__main__`` again
  when the module has ended.
- ``asyncio.sslproto.SSLProtocol.max_size``: asyncio fills a buffer of this size for each TLS connection (from Python
  3.11 on). Without this name, connections only take more memory.
- ``sys._current_frames`` and ``_current_exceptions`` are documented, in spite of their names.
"""

from __future__ import annotations

import _thread
import runpy
import sys
import threading
import traceback
from asyncio import sslproto
from collections.abc import Callable

from elasticstate.compat import warn_absent

_MAX_SIZE = "max_size"


def stack_of(thread: threading.Thread) -> traceback.StackSummary:
    """Return the present Python stack of a thread, the innermost frame last; empty if the thread has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)


def handles_exception(thread: threading.Thread) -> bool:
    """Return True if a thread is in an except or finally clause, or in a function called there, because of an error."""
    found: object = sys._current_exceptions().get(thread.ident or 0)
    return found not in (None, (None, None, None))  # Python 3.11 has tuples


def start_thread(function: Callable[..., object], *arguments: object) -> None:
    """Start a daemon thread. Unlike ``threading.Thread.start``, it does not wait until the thread runs on a core."""
    _thread.start_new_thread(function, arguments)


def set_tls_buffer_bytes(size: int) -> None:
    """Set the size of the buffer of each new TLS connection. No effect if asyncio has none."""
    if hasattr(sslproto.SSLProtocol, _MAX_SIZE):
        setattr(sslproto.SSLProtocol, _MAX_SIZE, size)


def main_module_runner() -> Callable[[str], object]:
    """Return the function that runs a module as ``__main__``, as ``python -m`` does."""
    run: Callable[[str], object] | None = getattr(runpy, "_run_module_as_main", None)
    if run is None:
        warn_absent("Python", "runpy._run_module_as_main", "exit functions of python -m commands lack __main__")
        return lambda name: runpy.run_module(name, run_name="__main__", alter_sys=True)
    return run
