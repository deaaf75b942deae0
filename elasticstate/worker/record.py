"""By which exception a worker ends: ``record`` for scripts without ``run``, and who writes it down."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, overload

from elasticstate import error_file
from elasticstate.config import error_file_path, worker_environment
from elasticstate.errors import NotInWorldError
from elasticstate.worker import world

P = ParamSpec("P")
R = TypeVar("R")


class ErrorHandler:
    """Writes the exception by which a worker ends into its error file (see ``elasticstate/error_file.py``).

    ``run`` and ``record`` have one each. For more, say a report to a service of your own, or more in the file, give
    them an instance of a subclass::

        class Ours(elastic.ErrorHandler):
            def describe(self, error, time_ns, tick=None):
                return {**super().describe(error, time_ns, tick), "build": BUILD}
    """

    def describe(self, error: BaseException, time_ns: int, tick: int | None = None) -> dict[str, Any]:
        """What the file says: JSON. ``time_ns``: when ``error`` came out; ``tick``: ticks completed, inside ``run``."""
        started = worker_environment()
        who = started.worker if started is not None else None
        place: dict[str, int | None] = {"rank": None, "generation": None}
        with suppress(NotInWorldError):
            place = {"rank": world.rank(), "generation": world.generation()}
        return error_file.describe(
            error,
            time_ns,
            host=who.host if who is not None else None,
            slot=who.slot if who is not None else None,
            incarnation=who.incarnation if who is not None else None,
            pid=os.getpid(),
            tick=tick,
            **place,
        )

    def record_exception(self, error: BaseException, time_ns: int, tick: int | None = None) -> None:
        """Called once, with the exception that leaves the script. Nothing is written where nobody has asked for it."""
        path = error_file_path()
        if path:
            error_file.write(path, self.describe(error, time_ns, tick))


def handle(handler: ErrorHandler, error: BaseException, time_ns: int, tick: int | None = None) -> None:
    """Whatever goes wrong in the handler must not hide the error itself."""
    try:
        handler.record_exception(error, time_ns, tick)
    except Exception as problem:
        sys.stderr.write(f"elasticstate: the error could not be recorded: {type(problem).__name__}: {problem}\n")


@overload
def record(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def record(*, error_handler: ErrorHandler) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def record(
    function: Callable[P, R] | None = None, /, *, error_handler: ErrorHandler | None = None
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """For the main function of a script that does not use ``run``: the exception that it ends by is told to the agent,
    with its time, and can be the root cause of the job. (Without, the agent has the end of stderr.)

    The same idea as ``torch.distributed.elastic.multiprocessing.errors.record``, which works as well.
    """
    if function is None:
        return functools.partial(_recorded, handler=error_handler or ErrorHandler())
    return _recorded(function, ErrorHandler())


def _recorded(function: Callable[P, R], handler: ErrorHandler) -> Callable[P, R]:
    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            handle(handler, error, time.time_ns())
            raise

    return recorded
