"""TraceFile: a file in Chrome's trace format that several processes of one job write, one after another.

The file is a JSON array with one event per line. The comma comes before an event, so a process that is killed leaves an
array without its closing bracket, which Chrome and Perfetto accept. If the kill has cut the last line, the next writer
removes this line.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from typing import Any

logger = logging.getLogger("elasticstate.horovod")

_OPEN, _COMMA, _CLOSE = b"[\n", b",\n", b"\n]\n"
Event = dict[str, Any]


class TraceFile:
    """A trace that this process appends to. A thread writes, so that the caller never waits for the disk.

    Args:
        path: a file of the same job is continued, another one is replaced.
        job: unique id of the job.

    Raises OSError if the file cannot be opened.
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
