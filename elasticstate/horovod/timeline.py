"""Timeline: a trace of this job's collectives for chrome://tracing and Perfetto. Rank 0 of each world writes it.

Each call has two bars: NEGOTIATE_<OPERATION> while the rank waits for the others' calls, and <OPERATION> while data are
exchanged. A process of the trace is a generation; its rows are the names of tensors, and of buckets of gradients.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from elasticstate import extension
from elasticstate.horovod.calls import Call, CallKind, name as name_of

# ----------------------------------------------------------------------------------------------------------- trace file
# TraceFile: a file in Chrome's trace format that several processes of one job write, one after another.
#
# The file is a JSON array with one event per line. The comma comes before an event, so a process that is killed
# leaves an array without its closing bracket, which Chrome and Perfetto accept. If the kill has cut the last line,
# the next writer removes this line.


logger = logging.getLogger("elasticstate.horovod")

_OPEN, _COMMA, _CLOSE = b"[\n", b",\n", b"\n]\n"
Event = dict[str, Any]


class TraceFile:
    """A trace that this process appends to. A thread writes, so that the caller never waits for the disk.

    A file of the same ``job`` is continued, another one is replaced. Raises OSError if it cannot be opened.
    """

    def __init__(self, path: str, job: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        try:
            self._begin(job)
        except OSError:
            os.close(self._fd)
            raise
        self._thread = threading.Thread(target=self._write_all, name="timeline", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Append an event, soon."""
        self._events.put(event)

    def close(self) -> None:
        """Write all events and the closing bracket."""
        self._events.put(None)
        self._thread.join()
        os.close(self._fd)

    def _begin(self, job: str) -> None:
        """Go to the end of a trace of this job, or begin one."""
        head = _OPEN + json.dumps({"name": "job", "ph": "M", "pid": 0, "args": {"job": job}}).encode()
        content = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        kept = _whole_events(content) if content.startswith(head) else b""
        os.ftruncate(self._fd, len(kept))
        os.lseek(self._fd, 0, os.SEEK_END)
        if not kept:
            self._write(head)

    def _write_all(self) -> None:
        try:
            is_over = False
            while not is_over:
                events = [self._events.get()]
                while not self._events.empty():
                    events.append(self._events.get())
                is_over = events[-1] is None
                self._write(b"".join(_COMMA + json.dumps(event).encode() for event in events if event is not None))
            self._write(_CLOSE)
        except OSError as error:
            logger.warning("the timeline %s ends here: it cannot be written (%s)", self._path, error.strerror)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


def _whole_events(content: bytes) -> bytes:
    """Return the content without its closing bracket and without an event that was cut off at its end."""
    content = content.rstrip(_CLOSE)  # an event ends with "}"
    rest, comma, last = content.rpartition(_COMMA)
    try:
        json.loads(last if comma else content.removeprefix(_OPEN))
    except ValueError:
        return rest
    return content


_clock_offset_ns = time.time_ns() - time.monotonic_ns()  # processes of several hosts write one file


Span = Callable[[], None]
"""Ends a bar of the timeline that has begun, and records it."""


class Recorder:
    """The timeline of this process, from ``start_timeline`` to ``stop_timeline``."""

    def __init__(self, path: str, mark_ticks: bool) -> None:
        self.path = path
        self.started_in = extension.world_generation()
        self._mark_ticks = mark_ticks
        self._ticks = 0
        self._file: TraceFile | None = None
        self._generation = 0
        self._rows: dict[tuple[str, int], int] = {}  # name, number of the bar in progress there -> id of the row
        self._busy: set[int] = set()

    def begin(self, name: str, row: str, args: dict[str, Any]) -> Span | None:
        """Begin a bar. Return None if this rank does not write."""
        self.enter_world()
        if self._file is None:
            return None
        at = 0
        while self._rows.get((row, at)) in self._busy:
            at += 1  # bars of one row must not overlap
        return functools.partial(self._ended, self._generation, self._row(row, at), name, time.monotonic_ns(), args)

    def _row(self, name: str, at: int) -> int:
        """Return the id of a row, which is taken until its bar ends."""
        if (name, at) not in self._rows:
            self._rows[name, at] = len(self._rows) + 1
            self._put("thread_name", "M", self._rows[name, at], args={"name": f"{name} ({at + 1})" if at else name})
        self._busy.add(self._rows[name, at])
        return self._rows[name, at]

    def _ended(self, generation: int, row: int, name: str, begun_ns: int, args: dict[str, Any]) -> None:
        """Record a bar, unless its world is over."""
        if generation == self._generation:
            self._busy.discard(row)
            duration_us = (time.monotonic_ns() - begun_ns) / 1000
            self._put(name, "X", row, ts=_microseconds(begun_ns), dur=duration_us, args=args)

    def ticked(self, ticks: int) -> None:
        """Mark the ticks that have ended since the last call, if ticks are to be marked."""
        if self._mark_ticks and ticks != self._ticks:
            self._ticks = ticks
            self._put(f"tick {ticks}", "i", 0, ts=_microseconds(time.monotonic_ns()), s="p")

    def enter_world(self) -> None:
        """Open the file if this worker is rank 0 of a new world; close it if it is not rank 0 any more."""
        generation = extension.world_generation()
        if generation == self._generation:
            return
        self._generation, self._ticks = generation, 0
        self._rows.clear()
        self._busy.clear()
        if extension.world_rank() != 0:
            self.close()
            return
        if self._file is None:
            try:
                self._file = TraceFile(self.path, extension.job_id())
            except OSError as error:
                logger.warning("no timeline: %s cannot be written (%s)", self.path, error.strerror)
                return
        title = f"generation {generation}: rank 0 of {extension.world_size()} on {extension.host()}"
        self._put("process_name", "M", 0, args={"name": title})
        self._put("process_sort_index", "M", 0, args={"sort_index": generation})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put(self, name: str, kind: str, row: int, **fields: Any) -> None:
        if self._file is not None:
            self._file.put({"name": name, "ph": kind, "pid": self._generation, "tid": row, **fields})


_recorder: Recorder | None = None


def use(recorder: Recorder | None) -> None:
    """Record with this recorder from now on; None: not at all."""
    global _recorder
    _recorder = recorder


def present() -> Recorder | None:
    """Return the recorder in use."""
    return _recorder


def negotiate(call: Call, ticks: Callable[[], int]) -> Span | None:
    """Begin the bar of a rank that waits until all ranks make ``call``."""
    if _recorder is None:
        return None
    span = _recorder.begin(f"NEGOTIATE_{_operation(call)}", _row(call), {"call": call.lines[0]})
    _recorder.ticked(ticks())
    return span


def exchange(call: Call, *tensors: torch.Tensor, sent_bytes: int = 0) -> Span | None:
    """Begin the bar of the data of ``call``: of ``tensors``, or ``sent_bytes`` of an object."""
    if _recorder is None:
        return None
    args: dict[str, Any] = {"bytes": sent_bytes + sum(tensor.nbytes for tensor in tensors)}
    if tensors:
        args["dtype"] = name_of(tensors[0].dtype)
    return _recorder.begin(_operation(call), _row(call), args)


def end(span: Span | None) -> None:
    if span is not None:
        span()


def _operation(call: Call) -> str:
    return "STEP" if call.kind is CallKind.STEP else call.function.upper()


def _row(call: Call) -> str:
    return call.name if call.name is not None else "gradients" if call.kind is CallKind.STEP else call.function


def _microseconds(monotonic_ns: int) -> float:
    return (monotonic_ns + _clock_offset_ns) / 1000
