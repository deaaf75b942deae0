"""The file in which a worker says by which exception it ends, for its agent and for whoever reads torch's files.

The format is that of ``torch.distributed.elastic`` (``message.message``, ``message.extraInfo.py_callstack`` and
``.timestamp``), with one key more, ``worker``::

    {"message": {"message": "ValueError: no",
                 "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1790000000"}},
     "worker": {"chain": ["ValueError: no", "KeyError: 'x'"], "time_ns": 1790000000123456789, "host": "a", "slot": 0,
                "incarnation": 1, "pid": 4711, "rank": 0, "generation": 3, "tick": 40}}

Its path stands in the environment variable TORCHELASTIC_ERROR_FILE, so torch's own ``record`` works in a script.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

_MOST_BYTES = 4 * 1024 * 1024
_LONGEST_TEXT = 32 * 1024  # characters of a call stack that go on to the driver
_CUT = "\n... (cut: it is too long) ...\n"


class WorkerError(NamedTuple):
    """What a worker has said of its end."""

    text: str  # the call stack, with its last line: type and message
    time_ns: int  # when the exception reached its end, by the clock of the worker's host


def describe(error: BaseException, time_ns: int, **worker: Any) -> dict[str, Any]:
    """The content of the file. ``worker``: what else is known, to be found under that key."""
    return {
        "message": {
            "message": _line(error),
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(time_ns // 1_000_000_000),
            },
        },
        "worker": {"chain": [_line(cause) for cause in _chain(error)], "time_ns": time_ns, **worker},
    }


def write(path: str, content: dict[str, Any]) -> bool:
    """Whole or not at all, and only once: the first exception is the one that counts. False: there was one before.

    Raises OSError, or TypeError for a content that is no JSON.
    """
    text = json.dumps(content)
    fresh = f"{path}.{os.getpid()}"
    try:
        with open(fresh, "w", encoding="utf-8") as file:
            file.write(text)
        os.link(fresh, path)  # unlike a rename it fails when there is one
    except FileExistsError:
        return False
    finally:
        with suppress(FileNotFoundError):
            os.unlink(fresh)
    return True


def read(path: str) -> WorkerError | None:
    """What is there, ours or torch's; None if there is nothing of use. Never raises."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_MOST_BYTES))
            written_ns = os.fstat(file.fileno()).st_mtime_ns
        message = content["message"]
        more = {} if isinstance(message, str) else message.get("extraInfo", {})
        text = message if isinstance(message, str) else more.get("py_callstack") or message["message"]
        worker = content.get("worker", {})
        return WorkerError(shortened(str(text)), int(worker.get("time_ns", written_ns)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def forget(path: str) -> None:
    """Before another process gets the file. Raises OSError if it cannot be removed."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def shortened(text: str) -> str:
    """Beginning and end of a text that is too long."""
    half = (_LONGEST_TEXT - len(_CUT)) // 2
    return text if len(text) <= _LONGEST_TEXT else text[:half] + _CUT + text[-half:]


def _line(error: BaseException) -> str:
    """Type and message. An exception that cannot say what it is has its type."""
    return "".join(traceback.format_exception_only(error)).strip()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, what it was raised from or in the handling of, and so on."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
