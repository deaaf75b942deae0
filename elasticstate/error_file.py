"""The error file: a worker writes the exception that ends it, for its agent and for tools that read torch's files.

The format is that of ``torch.distributed.elastic`` (``message.message``, ``message.extraInfo.py_callstack`` and
``.timestamp``), with one more key, ``worker``::

    {"message": {"message": "ValueError: no",
                 "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1790000000"}},
     "worker": {"chain": ["ValueError: no", "KeyError: 'x'"], "time_ns": 1790000000123456789, "host": "a", "slot": 0,
                "incarnation": 1, "pid": 4711, "rank": 0, "generation": 3, "tick": 40}}

The environment variable TORCHELASTIC_ERROR_FILE has its path, so torch's own ``record`` works in a script.
"""

from __future__ import annotations

import json
import os
import stat
import traceback
from contextlib import suppress
from typing import Any, NamedTuple

from elasticstate import tracebacks
from elasticstate.tracebacks import error_chain

_MOST_BYTES = 4 * 1024 * 1024
_LONGEST_TEXT = 32 * 1024  # characters of a call stack that the agent sends to the driver
_CUT = "\n... (cut: too long) ...\n"


class WorkerError(NamedTuple):
    """Error by which a worker ended, from its error file."""

    text: str  # the call stack, with its last line: type and message
    time_ns: int  # when the exception ended the worker, by the clock of its host


def describe(error: BaseException, time_ns: int, **worker: Any) -> dict[str, Any]:
    """Return the content of the error file. ``worker``: further facts, stored under that key."""
    return {
        "message": {
            "message": _line(error),
            "extraInfo": {
                "py_callstack": tracebacks.text_of(error),
                "timestamp": str(time_ns // 1_000_000_000),
            },
        },
        "worker": {
            "chain": [_line(cause) for cause in error_chain(error, shown_only=True)],
            "time_ns": time_ns,
            **worker,
        },
    }


def write(path: str, content: dict[str, Any]) -> bool:
    """Write the file atomically unless it exists: the first exception counts. Return False if the file existed.

    Raises OSError, or TypeError if the content cannot be written as JSON.
    """
    text = json.dumps(content)
    fresh = f"{path}.{os.getpid()}"
    try:
        # Never open an existing file or follow a link: another user may have taken the directory's name.
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.link(fresh, path)  # unlike a rename, a link fails if the file exists
    except FileExistsError:
        return False
    finally:
        with suppress(FileNotFoundError):
            os.unlink(fresh)
    return True


def read(path: str, directory: int | None = None) -> WorkerError | None:
    """Return the error in the file, ours or torch's; None if this user has no usable file there. Never raises.

    ``directory``: descriptor of the directory that the path is relative to.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags, dir_fd=directory), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                return None
            content = json.loads(file.read(_MOST_BYTES))
            written_ns = os.fstat(file.fileno()).st_mtime_ns
        message = content["message"]
        more = {} if isinstance(message, str) else message.get("extraInfo", {})
        text = message if isinstance(message, str) else more.get("py_callstack") or message["message"]
        worker = content.get("worker", {})
        return WorkerError(shortened(str(text)), int(worker.get("time_ns", written_ns)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def forget(path: str, directory: int | None = None) -> None:
    """Remove the file, before another process may write it. Raises OSError if it cannot be removed."""
    with suppress(FileNotFoundError):
        os.unlink(path, dir_fd=directory)


def shortened(text: str) -> str:
    """Return the text; only its beginning and its end if it is too long."""
    half = (_LONGEST_TEXT - len(_CUT)) // 2
    return text if len(text) <= _LONGEST_TEXT else text[:half] + _CUT + text[-half:]


def _line(error: BaseException) -> str:
    """Return type and message of an exception; only its type if its ``__str__`` fails."""
    return "".join(traceback.format_exception_only(error)).strip()
