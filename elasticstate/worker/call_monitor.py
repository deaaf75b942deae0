"""Monitor of this worker's collective calls: it reports long waits, and pauses between calls, to the agent.

A call costs two assignments. A thread looks at them regularly, because the main thread is inside the collective.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from elasticstate.net.messages import CallReport

_LOOK_INTERVAL_S = 0.25
_LASTING_S = 0.5  # a state that has lasted for so long is reported
_LONGEST_TEXT = 300  # characters


@dataclass(slots=True)
class _Call:
    """One call of this worker. Times are of the monotonic clock."""

    report: CallReport
    begun_at: float
    left_at: float | None = None  # None: the worker waits in it


_send: Callable[[CallReport], None] | None = None  # None: this process is no worker of elasticrun
_newest: _Call | None = None
_thread: threading.Thread | None = None  # since the first call
_is_over = threading.Event()


def start(send: Callable[[CallReport], None]) -> None:
    """Report the calls of this process with ``send``, on another thread, from now on."""
    global _send
    _send = send
    _is_over.clear()


def stop() -> None:
    """Stop reporting the calls of this process."""
    global _send, _newest, _thread
    _is_over.set()
    if _thread is not None:
        _thread.join()
    _send = _newest = _thread = None


def begin_call(generation: int, process_set: int, ranks: tuple[int, ...], number: int, call: str) -> None:
    """Report that this worker waits in a collective call from now on, for the stall check.

    ``process_set`` (0: all ranks of the world) and ``number`` must identify the call among those of ``generation``,
    equally on all ranks that make it. ``ranks``: of the process set; (): all. ``call``: text for messages.
    """
    global _newest, _thread
    if _send is None:
        return
    report = CallReport(generation, process_set, ranks, number, call[:_LONGEST_TEXT], None)
    _newest = _Call(report, time.monotonic())
    if _thread is None:
        _thread = threading.Thread(target=_watch, args=(_send,), name="call monitor", daemon=True)
        _thread.start()


def end_call() -> None:
    """Report that this worker has left the call that ``begin_call`` reported."""
    if _newest is not None:
        _newest.left_at = time.monotonic()


def _watch(send: Callable[[CallReport], None]) -> None:
    seen: tuple[_Call | None, float | None] = None, None
    is_reported = False
    while not _is_over.wait(_LOOK_INTERVAL_S):
        call = _newest
        if call is None:
            continue
        state = call, call.left_at
        lasts = state[0] is seen[0] and state[1] == seen[1]
        seen = state
        since = call.begun_at if call.left_at is None else call.left_at
        if lasts != is_reported and (is_reported or time.monotonic() - since >= _LASTING_S):
            is_reported = lasts
            waiting_s = time.monotonic() - call.begun_at if call.left_at is None else None
            send(msgspec.structs.replace(call.report, waiting_s=waiting_s))


def _in_child() -> None:
    global _send, _newest, _thread, _is_over
    _send = _newest = _thread = None
    _is_over = threading.Event()  # the thread may have held the lock of the other one


os.register_at_fork(after_in_child=_in_child)
