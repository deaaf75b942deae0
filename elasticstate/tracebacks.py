"""Errors as a user sees them: their tracebacks, their chains, and the file that a worker leaves for its agent.

Tracebacks of errors that a script has caused have the lines of the script alone: the frames of this package only hide
the message of a wrong use, and in an error of the script's own function only show that ``run`` has called it.
"""

from __future__ import annotations

import functools
import json
import os
import stat
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from traceback import StackSummary, TracebackException
from types import TracebackType
from typing import Any, NamedTuple

from elasticstate.errors import NotInWorldError, OptionError, StateError, UnreachableError, UsageError

_CAUSED_BY_THE_SCRIPT = (NotInWorldError, OptionError, StateError, UnreachableError, UsageError)
_PACKAGE = os.path.dirname(__file__) + os.sep
_OPTIMIZERS = os.path.join(os.sep, "torch", "optim", "")


def text_of(error: BaseException) -> str:
    """Return the traceback as text, without frames of this package if the script has caused the error."""
    found = TracebackException.from_exception(error)
    if not isinstance(error, _CAUSED_BY_THE_SCRIPT):
        calls = _calls_of_the_script([frame.filename for frame in found.stack])
        found.stack[:] = [frame for index, frame in enumerate(found.stack) if index not in calls]
        return "".join(found.format())
    frames = [frame for frame in found.stack if not frame.filename.startswith(_PACKAGE)]
    while frames and _OPTIMIZERS in frames[-1].filename:  # which call the hook that raises the error
        del frames[-1]
    found.stack[:] = frames
    return "".join(found.format() if found.stack else found.format_exception_only())


def _calls_of_the_script(files: Sequence[str]) -> set[int]:
    """Return the indices of the frames of this package that have only called the script's function."""
    of_others = [index for index, file in enumerate(files) if not file.startswith(_PACKAGE)]
    return set(range(of_others[-1])) - set(of_others) if of_others else set()


_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = "-packages" + os.sep
_LONGEST_LINE = 200  # characters


def line_of(stack: StackSummary) -> str:
    """Return the innermost line of a stack that is most likely the script's own: ``train.py:14 in train: barrier()``.

    Libraries are left out as far as other frames remain.
    """
    own = [frame for frame in stack if not _is_machinery(frame.filename)]
    scripts = [frame for frame in own if _INSTALLED not in frame.filename]
    if not stack:
        return ""
    frame = (scripts or own or stack)[-1]
    line = f": {frame.line.strip()}" if frame.line else ""
    return f"{frame.filename}:{frame.lineno} in {frame.name}{line}"[:_LONGEST_LINE]


def is_of_the_script(path: str) -> bool:
    """Return True for a file that is neither of this package, nor of torch or the standard library, nor installed."""
    return not _is_machinery(path) and _INSTALLED not in path


def _is_machinery(path: str) -> bool:
    """Return True for a file of this package, of torch, or of the standard library."""
    if _INSTALLED in path:
        return f"{_INSTALLED}torch{os.sep}" in path or path.startswith(_PACKAGE)
    return path.startswith((_PACKAGE, _STANDARD_LIBRARY, "<frozen "))


@functools.cache
def install() -> None:
    """Print uncaught wrong uses by :func:`text_of`. Leave other errors to the previous hook."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, _CAUSED_BY_THE_SCRIPT):
            sys.stderr.write(text_of(error))
        else:
            error.__traceback__ = _without_calls_of_the_script(trace)
            previous(kind, error, error.__traceback__)

    sys.excepthook = hook


def _without_calls_of_the_script(trace: TracebackType | None) -> TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    calls = _calls_of_the_script([entry.tb_frame.f_code.co_filename for entry in entries])
    rest = None
    for index, entry in reversed(list(enumerate(entries))):
        if index not in calls:
            rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


def error_chain(error: BaseException, shown_only: bool = False) -> list[BaseException]:
    """Return an exception, its causes and contexts, and the members of groups: each once, the exception first.

    ``shown_only``: leave out contexts that a traceback does not show, because of ``raise ... from``.
    """
    found: list[BaseException] = []
    pending = [error]
    while pending:
        link = pending.pop()
        if any(link is known for known in found):
            continue
        found.append(link)
        members = getattr(link, "exceptions", ())  # of an ExceptionGroup, which Python 3.10 does not have
        context = None if shown_only and link.__suppress_context__ else link.__context__
        causes = [link.__cause__, context, *(members if type(members) is tuple else ())]
        pending += [cause for cause in reversed(causes) if isinstance(cause, BaseException)]
    return found


# ----------------------------------------------------------------------------------------------------------- error file
# The error file: a worker writes the exception that ends it, for its agent and for tools that read torch's files.
#
# The format is that of ``torch.distributed.elastic`` (``message.message``, ``message.extraInfo.py_callstack`` and
# ``.timestamp``), with one more key, ``worker``::
#
#     {"message": {"message": "ValueError: no",
#                  "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1790000000"}},
#      "worker": {"chain": ["ValueError: no", "KeyError: 'x'"], "time_ns": 1790000000123456789, "host": "a", "slot": 0,
#                 "incarnation": 1, "pid": 4711, "rank": 0, "generation": 3, "tick": 40}}
#
# The environment variable TORCHELASTIC_ERROR_FILE has its path, so torch's own ``record`` works in a script.


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
                "py_callstack": text_of(error),
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
