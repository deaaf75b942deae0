"""Records of the exception that ends a worker: ``record`` for scripts without ``run``, and the error handler."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, overload

from elasticstate import present_world, tracebacks
from elasticstate.errors import NotInWorldError
from elasticstate.log import logger
from elasticstate.options import error_file_path, worker_environment

P = ParamSpec("P")
R = TypeVar("R")


class ErrorHandler:
    """Writer of the exception that ends a worker, into the worker's error file (see ``elasticstate/tracebacks.py``).

    ``run`` and ``record`` each use one. To extend it, for example with a report to a service of your own or with more
    fields in the file, pass an instance of a subclass::

        class Ours(elastic.ErrorHandler):
            def describe(self, error, time_ns, tick=None):
                return {**super().describe(error, time_ns, tick), "build": BUILD}
    """

    def describe(self, error: BaseException, time_ns: int, tick: int | None = None) -> dict[str, Any]:
        """Return the content of the error file, as a dict for JSON.

        Args:
            error: the exception that leaves the script.
            time_ns: time when ``error`` left the user's function, in nanoseconds as ``time.time_ns()``.
            tick: number of completed ticks, inside ``run``; None elsewhere.
        """
        started = worker_environment()
        worker = started.worker if started is not None else None
        which = {name: getattr(worker, name, None) for name in ("host", "slot", "incarnation")}
        place: dict[str, int | None] = {"rank": None, "generation": None}
        with suppress(NotInWorldError):
            place = {"rank": present_world.rank(), "generation": present_world.generation()}
        return tracebacks.describe(error, time_ns, **which, pid=os.getpid(), tick=tick, **place)

    def record_exception(self, error: BaseException, time_ns: int, tick: int | None = None) -> None:
        """Write the error file, if the agent has set one. Called once, with the exception that leaves the script."""
        path = error_file_path()
        if path:
            tracebacks.write(path, self.describe(error, time_ns, tick))


def handle(handler: ErrorHandler, error: BaseException, time_ns: int, tick: int | None = None) -> None:
    """Call the handler. An error inside the handler must not hide ``error``, so it is only logged."""
    try:
        handler.record_exception(error, time_ns, tick)
    except Exception as problem:
        logger.error("the error handler failed, so the error is not recorded: %s: %s", type(problem).__name__, problem)


@overload
def record(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def record(*, error_handler: ErrorHandler) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def record(
    function: Callable[P, R] | None = None, /, *, error_handler: ErrorHandler | None = None
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the main function of a script that does not use ``run``: report its exception to the agent.

    The report contains the time of the exception, and can be the root cause of the job. (Without ``record``, the agent
    has only the end of stderr.) The exception is raised again. The idea is that of
    ``torch.distributed.elastic.multiprocessing.errors.record``, which works as well.

    Args:
        error_handler: writes the report; default: an ``ErrorHandler``.
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
