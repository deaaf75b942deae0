"""``@elastic.run``: the loop that takes a training function from world to world.

::

            ┌─────────────────────────────────────────────────────────────────┐
            ▼                                                                 │
    READY → WORLD → process group → callbacks → sync → train(state) ── interrupt: save ──► leave
                                                         │   └──────── failure: leave ──► restore
                                                         ▼
                                                     exit gate → the code after train(state)

READY means: the worker's live state equals its commit. The worker's own exception leaves the loop.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NoReturn, ParamSpec, TypeVar, cast, overload

import torch.distributed as dist

from elasticstate import present_world
from elasticstate.commits import owner_of
from elasticstate.config import WorkerEnvironment, worker_environment
from elasticstate.core.types import CommitId
from elasticstate.errors import CollectiveError, HostsUpdatedInterrupt, StateError, UsageError
from elasticstate.net import messages
from elasticstate.net.link import StorageLink, WorkerLink
from elasticstate.state.base import State
from elasticstate.state.snapshot import Snapshot
from elasticstate.worker import contexts
from elasticstate.worker.alone import SoloRun
from elasticstate.worker.contexts.context import Fault
from elasticstate.worker.own_groups import OwnProcessGroups
from elasticstate.worker.record import ErrorHandler, handle
from elasticstate.worker.regroup import Regrouper, chain, let_go
from elasticstate.worker.replacement import be_replaced
from elasticstate.worker.sentinel import Sentinel
from elasticstate.worker.session import WorkerSession
from elasticstate.worker.storage import AgentStorage

P = ParamSpec("P")
R = TypeVar("R")

_used = False
_ahead: SoloRun | _Loop | None = None  # the run that ``join`` has brought into a world
_sentinel: Sentinel | None = None  # until the process ends: a worker whose run is over still sends heartbeats


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

    The first argument is a :class:`State`. After a failure of the world, the state is restored from its last commit.
    After a planned change, the state stays as it is. In both cases ``run`` calls ``function`` again, which continues
    from the state. Create objects that belong to one world (the DDP wrapper, a sub-group) inside ``function``.

    Under plain ``python train.py`` the function runs in a world of one.

    Args:
        warmup: called once, before the worker sends READY (compile, allocate, import), so that a new worker is warm
            when the others stop for it.
        error_handler: writes the exception that ends the worker for the agent; default: an ``ErrorHandler``.

    Raises:
        UsageError: a second decorated call in one process; a first argument that is not a State; or a process group
            that exists before the call.
        Exception: the worker's own exceptions, from ``function``.
    """
    handler = error_handler or ErrorHandler()
    if function is None:
        return functools.partial(_decorate, warmup=warmup, handler=handler)
    return _decorate(function, warmup, handler)


def _decorate(function: Callable[P, R], warmup: Callable[[], object] | None, handler: ErrorHandler) -> Callable[P, R]:
    @functools.wraps(function)
    def elastic(*args: P.args, **kwargs: P.kwargs) -> R:
        if not args or not isinstance(args[0], State):
            raise UsageError(
                f"{function.__name__}() is decorated with @elasticstate.run: its first argument has to be a State, "
                f"for example elasticstate.TorchState(model=model, optimizer=optimizer)"
            )
        _use_once(function.__name__)
        process = _ahead or _new_process()
        return cast(R, process.run(args[0], functools.partial(function, *args, **kwargs), warmup, handler))

    return elastic


def _use_once(name: str) -> None:
    global _used
    if _used:
        raise UsageError(
            f"{name}(): a process runs one function decorated with @elasticstate.run, once; put both phases into one "
            f"function and keep the phase in the state"
        )
    _used = True
    if _ahead is None and dist.is_initialized():
        raise UsageError(
            f"{name}(): a process group exists already; elasticstate makes and remakes it: remove your own "
            f"init_process_group()"
        )


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
    global _ahead
    if _ahead is None and not _used:
        if dist.is_initialized():
            raise UsageError("a process group exists already: elasticstate makes and remakes it; remove your own")
        ahead = _new_process()
        ahead.join()
        _ahead = ahead
    if collectives and not _used and not present_world.world().fresh:
        raise UsageError(
            "a collective before the function decorated with run: the others are in theirs, and this newcomer would "
            "take part in their training; leave it out (run brings the state of the others), or call it in there"
        )


def leave() -> None:
    """Leave a world that ``join`` entered, for a script without ``run``. Wait for all other members first.

    Raises CollectiveError if the world fails before all members arrive.
    """
    global _used
    if _ahead is not None and not _used:
        _used = True
        _ahead.leave()


def _new_process() -> SoloRun | _Loop:
    environment = worker_environment()
    return SoloRun() if environment is None else _Loop(environment)


class _Outcome(Enum):
    """Result of a generation."""

    FINISHED = auto()
    INTERRUPTED = auto()  # at a tick that all members completed: nothing is lost
    FAILED = auto()  # the worker goes back to its last commit


class _Loop:
    """The elastic loop of one worker."""

    _state: State
    _call: Callable[[], Any]
    _handler: ErrorHandler

    def __init__(self, environment: WorkerEnvironment) -> None:
        global _sentinel
        link = WorkerLink(environment.socket)
        link.connect()
        self._environment = environment
        worker = environment.worker
        storage = StorageLink(environment.socket, worker)
        owner = owner_of(environment.job_id, worker.host, worker.slot)
        self._storage = AgentStorage(storage.ask, owner, lambda *question: self._sentinel.ask(*question))
        page = self._page = self._storage.page  # the stamps stay on this page if the commits move
        self._sentinel = _sentinel = Sentinel(link, worker, page)
        self._session = WorkerSession(self._sentinel, page, str(environment.worker))
        self._backend = contexts.choose(environment.backend)
        self._regrouper = Regrouper(environment, self._sentinel, self._backend)
        self._reported: tuple[CommitId | None, CommitId | None] | None = None  # by ``join``, in READY
        self._is_behind = False  # this worker ended the ticks of the last generation without training
        self._result: Any = None
        self._raised_ns = 0  # time when the last exception left the user's function
        self._is_recorded = False

    def join(self) -> None:
        self._start()
        _settle_memory()
        held = Snapshot(self._storage)  # READY reports these commits before they are read
        self._reported = held.newest, held.previous
        self._sentinel.sealed(*self._reported)
        self._enter()

    def leave(self) -> None:
        self._sentinel.gate()
        self._finish()

    def run(
        self, state: State, call: Callable[[], Any], warmup: Callable[[], object] | None, handler: ErrorHandler
    ) -> Any:
        """Return the result of the user's function in the last world. Raises the worker's own exception, recorded."""
        self._state = self._session.state = state
        self._call = call
        self._handler = handler
        try:
            return self._run(warmup)
        except Exception as error:
            if not self._is_recorded:
                self._raised_ns = time.time_ns()
                self._record(error)
            raise

    def _record(self, error: BaseException) -> None:
        handle(self._handler, error, self._raised_ns, self._sentinel.ticks)
        self._is_recorded = True

    def _start(self) -> None:
        # The agent sends this signal when the worker does not respond. faulthandler works without the GIL.
        faulthandler.register(messages.STACKS_SIGNAL, file=2, all_threads=True)
        self._sentinel.start(self._environment.notice_signals)
        _import_ahead()
        self._backend.prepare(self._environment, self._sentinel.say)

    def _run(self, warmup: Callable[[], object] | None) -> Any:
        if self._reported is None:
            self._start()
        self._state._attach(self._storage)
        self._state._bind(self._session)
        self._state._reserve(self._environment.reserve_bytes)
        if warmup is not None:
            warmup()
        if self._reported is None:
            _settle_memory()
        self._state._resume()  # the commit that an earlier worker left in this slot
        self._sentinel.sealed(*self._state.commits)
        while (outcome := self._generation()) is not _Outcome.FINISHED:
            self._recover(outcome)
        self._finish()
        return self._result

    def _finish(self) -> None:
        self._regrouper.leave()
        self._sentinel.finish()

    def _enter(self) -> None:
        self._session.enter(self._regrouper.enter(self._is_behind), self._regrouper.context)
        self._is_behind = False

    def _go_on(self) -> None:
        """Continue in the world that ``join`` entered with the commits that READY reported."""
        reported, self._reported = self._reported, None
        self._sentinel.check()
        if self._state.commits != reported:
            raise CollectiveError("the commits with which this worker has joined cannot be resumed from")

    def _generation(self) -> _Outcome:
        """Run one generation. Raises the worker's own exception, recorded, after leaving the generation."""
        try:
            if self._reported is None:
                self._enter()
            else:
                self._go_on()
            if self._state.commits[0] is not None:  # else: the job's first world, or sync brings the state
                self._state.on_reset()
            self._state.sync()
            self._sentinel.train()
            with OwnProcessGroups():
                self._result = self._call()
            self._state._settle()
            self._sentinel.gate()
            return _Outcome.FINISHED
        except HostsUpdatedInterrupt as interrupt:
            let_go(interrupt)
            return _Outcome.INTERRUPTED
        except (SystemExit, KeyboardInterrupt):
            self._regrouper.leave()
            raise
        except BaseException as error:
            self._raised_ns = time.time_ns()
            self._page.progress()  # a worker that gets this far does not hang
            outcome = self._judge(error)
            if outcome is None:
                self._record(error)
                self._regrouper.leave()
                raise
            if outcome is _Outcome.FAILED and self._device_is_lost(error):
                self._hand_over(error)
            let_go(error)
            return outcome

    def _judge(self, error: BaseException) -> _Outcome | None:
        """Return the outcome by facts, as collectives mostly raise plain RuntimeErrors; None for an own error."""
        if not self._sentinel.in_generation:
            return None
        causes = chain(error)
        if any(isinstance(cause, HostsUpdatedInterrupt) for cause in causes):
            return _Outcome.INTERRUPTED  # user code has wrapped the interrupt
        text = _text(error)
        if (
            self._sentinel.ended(self._sentinel.generation)
            or self._regrouper.context.broken()
            or any(self._proves_failure(cause) for cause in causes)
        ):
            self._sentinel.failed(text)
            return _Outcome.FAILED
        return None if self._sentinel.is_own_error(text) else _Outcome.FAILED

    def _proves_failure(self, cause: BaseException) -> bool:
        return isinstance(cause, CollectiveError) or self._regrouper.context.classify(cause) is not Fault.UNKNOWN

    def _device_is_lost(self, error: BaseException) -> bool:
        context = self._regrouper.context
        return any(context.classify(cause) is Fault.DEVICE for cause in chain(error)) or not context.usable()

    def _hand_over(self, error: BaseException) -> NoReturn:
        """End this process: another one in this slot can use the device, and resumes from this worker's commit."""
        self._sentinel.failed(_text(error))
        self._record(error)
        be_replaced("this process cannot use its device any more")

    def _recover(self, outcome: _Outcome) -> None:
        """Leave the generation with the live state equal to the newest commit."""
        self._page.set_place(messages.Place.REGROUP)  # a worker in this place never counts as hung
        self._is_behind = self._state._is_shadow
        if outcome is _Outcome.INTERRUPTED and not self._state._is_shadow and self._save():
            self._state._drop_gradients()
            self._regrouper.leave()
        else:
            self._regrouper.leave()
            self._restore()

    def _save(self) -> bool:
        """Save at the tick where all members leave. Return False if the generation ended before the device copy."""
        here = CommitId(self._sentinel.generation, self._sentinel.ticks)
        self._state._settle()
        try:
            if self._state.commits[0] != here:
                self._state._seal(here)
        except CollectiveError:
            return False
        return True

    def _restore(self) -> None:
        """Restore the newest commit. If no commit is intact, discard the live state and use another worker's."""
        self._state._settle()
        if self._state.commits[0] is None:
            return
        try:
            self._state.restore()
        except StateError as error:
            if self._state.commits[0] is not None:
                raise  # the commit does not fit the live objects
            sys.stderr.write(f"elasticstate: {error}; this worker needs the state of another one\n")


def _settle_memory() -> None:
    """Exclude all present objects from later garbage collections.

    Objects that survive the start stay until the end. Each regroup runs a collection (100 ms with torch imported).
    """
    gc.collect()
    gc.freeze()


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _import_ahead() -> None:
    """Import modules that torch would otherwise import within the first generation.

    The first DDP imports ``torch.distributed.nn.functional``. Its default arguments bind the present ``group.WORLD``
    and would keep generation 1's group forever. The first optimizer step imports ``torch._dynamo``.
    """
    import torch._dynamo
    import torch.distributed.nn.functional  # noqa: F401
