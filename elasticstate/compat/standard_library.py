"""Private names of Python's standard library. Checked with Python 3.11.

- ``_thread.start_new_thread`` is documented, in spite of its name.
- ``asyncio.Handle._run`` and ``_callback``: no public hook surrounds the callbacks of an event loop. For tests only.
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
from asyncio import Handle, sslproto
from collections.abc import Callable

from elasticstate.compat.absent_names import warn_absent

_RUN = "_run"
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


def thread_starter() -> tuple[object, str]:
    """Return the module and the name of the function with which ``start_thread`` starts threads."""
    return _thread, "start_new_thread"


def set_tls_buffer_bytes(size: int) -> None:
    """Set the size of the buffer of each new TLS connection. No effect if asyncio has none."""
    if hasattr(sslproto.SSLProtocol, _MAX_SIZE):
        setattr(sslproto.SSLProtocol, _MAX_SIZE, size)


def callback_runner() -> Callable[[Handle], None] | None:
    """Return the method by which event loops run a callback; None, with one warning, if Python has no such method."""
    run: Callable[[Handle], None] | None = getattr(Handle, _RUN, None)
    if run is None:
        warn_absent("Python", f"asyncio.Handle.{_RUN}", "slow callbacks are not reported")
    return run


def set_callback_runner(run: Callable[[Handle], None]) -> None:
    """Replace the method by which all event loops of this process run a callback."""
    setattr(Handle, _RUN, run)


def callback_of(handle: Handle) -> object:
    """Return the callback of a handle; None if it has none, or this Python hides it."""
    return getattr(handle, "_callback", None)


def main_module_runner() -> Callable[[str], object]:
    """Return the function that runs a module as ``__main__``, as ``python -m`` does."""
    run: Callable[[str], object] | None = getattr(runpy, "_run_module_as_main", None)
    if run is None:
        warn_absent("Python", "runpy._run_module_as_main", "exit functions of python -m commands lack __main__")
        return lambda name: runpy.run_module(name, run_name="__main__", alter_sys=True)
    return run
