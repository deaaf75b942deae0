"""Tracebacks of errors that a script has caused: they have the lines of the script.

The message of a wrong use names the problem and the remedy. The frames of this package only hide the message. In an
error of the script's own function they only show that ``run`` has called it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from traceback import StackSummary, TracebackException
from types import TracebackType

from elasticstate.errors import NotInWorldError, OptionError, StateError, UnreachableError, UsageError

# ----------------------------------------------------------------------------------------------------------- tracebacks


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


# ---------------------------------------------------------------------------------------------------------- error chain
# The chain of an exception: the exceptions that it was raised from.


def error_chain(error: BaseException, shown_only: bool = False) -> list[BaseException]:
    """Return an exception, its causes and contexts, and the members of groups: each once, the exception first.

    ``shown_only``: leave out contexts that a traceback does not show, because of ``raise ... from``.
    """
    found: list[BaseException] = []
    pending = [error]
    while pending:
        link = pending.pop()
        if not any(link is known for known in found):
            found.append(link)
            pending += reversed(_raised_from(link, shown_only))
    return found


def _raised_from(error: BaseException, shown_only: bool) -> list[BaseException]:
    is_hidden = shown_only and error.__suppress_context__
    members = getattr(error, "exceptions", ())  # of an ExceptionGroup, which Python 3.10 does not have
    causes = [error.__cause__, None if is_hidden else error.__context__, *(members if type(members) is tuple else ())]
    return [cause for cause in causes if isinstance(cause, BaseException)]
