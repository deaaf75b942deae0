"""``@elastic.run``, and ``join`` and ``leave`` for scripts that need a world before or without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar, cast, overload

import torch.distributed as dist

from elasticstate import present_world
from elasticstate.errors import UsageError
from elasticstate.net.link import report_use_of_run
from elasticstate.options import forget_plain_variables, launched_place, worker_environment
from elasticstate.state.base import State
from elasticstate.worker.fixed import FixedLoop, SoloLoop
from elasticstate.worker.gloo_rest import models_unwatched
from elasticstate.worker.loop import WorkerLoop
from elasticstate.worker.record import ErrorHandler

P = ParamSpec("P")
R = TypeVar("R")

_used = False  # this process has called a function decorated with ``run``
_loop: SoloLoop | WorkerLoop | None = None
_has_joined = False  # ``join`` has brought the loop into a world
_is_past_gate = False  # training is over, and the last world exists until ``end_last_world``
_keeps_last_world = False

_GROUP_EXISTS = (
    "a process group exists already, but elasticstate creates one for each world. Remove init_process_group() from the "
    "script."
)


@overload
def run(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def run(
    *, warmup: Callable[[], object] | None = None, error_handler: ErrorHandler | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def run(
    function: Callable[P, R] | None = None,
    /,
    *,
    warmup: Callable[[], object] | None = None,
    error_handler: ErrorHandler | None = None,
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Make ``function(state, ...)`` elastic: ``run`` calls it again, in this process, with each new world.

    One argument is a :class:`State`, the first one unless ``function`` is a method. After a failure of the world, the
    state is restored from its last commit. After a planned change, the state stays as it is. In both cases ``run``
    calls ``function`` again, which continues from the state. Create objects that belong to one world (the DDP wrapper,
    a sub-group) inside ``function``.

    Under plain ``python train.py`` the function runs in a world of one. Processes that another launcher has started,
    such as mpirun, srun or torchrun, are one world that never changes: the loss of a process ends it.

    Args:
        warmup: called once, before the worker sends READY (compile, allocate, import), so that a new worker is warm
            when the others stop for it.
        error_handler: writes the exception that ends the worker for the agent; default: an ``ErrorHandler``.

    Raises:
        UsageError: a second decorated call in one process; no argument that is a State; or a process group
            that exists before the call.
        Exception: the worker's own exceptions, from ``function``.
    """
    handler = error_handler or ErrorHandler()
    if function is None:
        return functools.partial(_decorate, warmup=warmup, handler=handler)
    return _decorate(function, warmup, handler)


def _report_use() -> None:
    """Tell the agent that this script uses ``run``, and forget the environment variables of plain workers."""
    environment = worker_environment() if forget_plain_variables() else None
    if environment is not None:
        with suppress(OSError):  # without an agent, this process ends
            report_use_of_run(environment.socket, environment.worker)


def _decorate(function: Callable[P, R], warmup: Callable[[], object] | None, handler: ErrorHandler) -> Callable[P, R]:
    _report_use()

    @functools.wraps(function)
    def elastic(*args: P.args, **kwargs: P.kwargs) -> R:
        state = next((each for each in (*args, *kwargs.values()) if isinstance(each, State)), None)
        if state is None:
            raise UsageError(
                f"{function.__name__}() is decorated with @elasticstate.run, so one of its arguments must be a State. "
                f"Pass one, for example elasticstate.TorchState(model=model, optimizer=optimizer)."
            )
        call = functools.partial(function, *args, **kwargs)
        if _is_past_gate and _loop is not None:
            return cast(R, _loop.run_in_last_world(state, call, handler))
        _use_once(function.__name__)
        loop = _make_loop()
        with models_unwatched():
            result = loop.run(state, call, warmup, handler)
        _pass_gate(loop)
        return cast(R, result)

    return elastic


def _use_once(name: str) -> None:
    global _used
    if _used:
        raise UsageError(
            f"{name}(): this process has called a function decorated with @elasticstate.run before. Decorate only one "
            f"function, call it once, and keep the phase of the training in the state."
        )
    _used = True
    if not _has_joined and dist.is_initialized():
        raise UsageError(f"{name}(): {_GROUP_EXISTS}")


def _make_loop() -> SoloLoop | WorkerLoop:
    global _loop
    if _loop is None:
        environment, place = worker_environment(), launched_place()
        if environment is not None:
            _loop = WorkerLoop(environment)
        else:
            _loop = SoloLoop() if place is None else FixedLoop(place)
    return _loop


def _pass_gate(loop: SoloLoop | WorkerLoop) -> None:
    global _is_past_gate
    _is_past_gate = _keeps_last_world
    if not _keeps_last_world:
        loop.end()


def join(collectives: bool = False) -> None:
    """Enter a world before a state exists. ``run`` then continues in this world.

    For scripts that read rank and size at their top, as Horovod's do. All other workers wait for a new worker between
    ``join`` and ``run``, so do long work before ``join``. A second call, and a call after the start of ``run``, has no
    effect.

    Args:
        collectives: the caller is about to run collectives before ``run``. That works only if all members are new
            processes.

    Raises:
        UsageError: a process group exists already; or ``collectives`` is True in a world with running members, whose
            training collectives would meet those of this worker.
        CollectiveError: the world failed. Also torch's errors. This process then ends, and the agent starts another
            one.
    """
    global _has_joined
    _report_use()
    if not _has_joined and not _used:
        if dist.is_initialized():
            raise UsageError(_GROUP_EXISTS)
        _make_loop().join()
        _has_joined = True
    if collectives and not _used and not present_world.world().fresh:
        raise UsageError(
            "A new worker called a collective before the function decorated with run, while the other workers train: "
            "the collective would match one of theirs. Remove it (run sends the state to new workers), or call it "
            "inside the decorated function."
        )


def join_fixed_world() -> bool:
    """Enter the world of another launcher, such as mpirun. Return False if none has started this process with others.

    Raises UsageError if the processes cannot form a world, and what ``join`` raises.
    """
    if launched_place() is None:
        return False
    join()
    return True


def leave() -> None:
    """Leave a world that ``join`` entered, for a script without ``run``. Wait for all other members first.

    Raises CollectiveError if the world fails before all members arrive.
    """
    global _used
    if _loop is not None and _has_joined and not _used:
        _used = True
        _loop.finish()
        _pass_gate(_loop)


def keep_last_world() -> None:
    """Keep the process groups of the last world after the end of ``run`` or ``leave``, until ``end_last_world``.

    All members have passed the exit gate then, and no other world follows. A failure of one is an error for the others.
    """
    global _keeps_last_world
    _keeps_last_world = True


def end_last_world() -> None:
    """Destroy the process groups of the last world, if ``keep_last_world`` has kept them."""
    global _is_past_gate
    if _is_past_gate and _loop is not None:
        _is_past_gate = False
        _loop.end()


def failure_text(error: BaseException) -> str:
    """Return a message if ``error``, raised by a collective, comes from the failure of a member; otherwise ""."""
    return "" if _loop is None else _loop.failure_text(error)
