"""``@elastic.run``: the loop that takes a training function from world to world.

::

            ┌─────────────────────────────────────────────────────────────────┐
            ▼                                                                 │
    READY → WORLD → process group → callbacks → sync → train(state) ── interrupt: save ──► leave
                                                         │   └──────── failure: leave ──► restore
                                                         ▼
                                                     exit gate → the code after train(state)

READY means: my live state equals my commit. An exception that is nobody's but the worker's own leaves the loop.
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

from elasticstate._native import ControlPage
from elasticstate.commits import control_file, owner_of
from elasticstate.config import WorkerEnvironment, worker_environment
from elasticstate.core.types import CommitId
from elasticstate.errors import CollectiveError, HostsUpdatedInterrupt, StateError, UsageError
from elasticstate.net import messages
from elasticstate.net.link import WorkerLink
from elasticstate.state.base import State
from elasticstate.state.snapshot import Snapshot
from elasticstate.worker import contexts, world
from elasticstate.worker.alone import Alone
from elasticstate.worker.contexts.context import Fault
from elasticstate.worker.own_groups import OwnProcessGroups
from elasticstate.worker.record import ErrorHandler, handle
from elasticstate.worker.regroup import Regrouper, chain, let_go
from elasticstate.worker.replacement import be_replaced
from elasticstate.worker.sentinel import Sentinel
from elasticstate.worker.session import WorkerSession
from elasticstate.worker.space import AgentSpace

P = ParamSpec("P")
R = TypeVar("R")

_used = False
_ahead: Alone | _Loop | None = None  # what ``join`` has brought into a world
_sentinel: Sentinel | None = None  # of this process, to its end: a worker whose run is over still beats


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
    """Make ``function(state, ...)`` elastic: it is called again, in this process, with each new world.

    The first argument is a :class:`State`. On a failure of the world the state is brought back to its last commit, on
    a planned change it goes on as it is; either way ``function`` is called anew and picks up from the state. What
    belongs to a world (the DDP wrapper, a sub-group) is made inside ``function``.

    ``warmup`` is called once, before the worker says that it is ready (compile, allocate, import), so that a newcomer
    is warm when the others stop for it.

    An exception that ends the worker is written down for its agent: by ``error_handler``, if one is given.

    Under plain ``python train.py`` the function runs in a world of one.

    Raises:
        UsageError: a second decorated call in one process, or a process group that was made outside.
        Whatever ``function`` raises on its own account.
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
    """Be in a world from now on, before there is a state: what ``run`` does else, which then goes on in this world.

    For scripts that ask for rank and size at their top, as Horovod's do. A newcomer that has joined is waited for by
    all others until it is in ``run``: what takes long is better done before. Without effect the second time, and after
    the start of ``run``.

    ``collectives``: the caller is about to call some, for which the others have to be before ``run``, too: they are if
    all are new. A newcomer's would meet those of the training: UsageError.

    Raises what ``run`` raises when the world fails, which ends this process: another one is started in its place.
    """
    global _ahead
    if _ahead is None and not _used:
        if dist.is_initialized():
            raise UsageError("a process group exists already: elasticstate makes and remakes it; remove your own")
        ahead = _new_process()
        ahead.join()
        _ahead = ahead
    if collectives and not _used and not world.world().fresh:
        raise UsageError(
            "a collective before the function decorated with run: the others are in theirs, and this newcomer would "
            "take part in their training; leave it out (run brings the state of the others), or call it in there"
        )


def leave() -> None:
    """For a script that has joined a world and does not use ``run``: wait for the others, and be done.

    Raises CollectiveError if the world fails before all are there.
    """
    global _used
    if _ahead is not None and not _used:
        _used = True
        _ahead.leave()


def _new_process() -> Alone | _Loop:
    environment = worker_environment()
    return Alone() if environment is None else _Loop(environment)


class _Outcome(Enum):
    """How a generation ended."""

    FINISHED = auto()
    INTERRUPTED = auto()  # at a tick that all completed: nothing is lost
    FAILED = auto()  # back to the last commit


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
        page = ControlPage(control_file(environment.commits))
        self._sentinel = _sentinel = Sentinel(link, environment.worker, page)
        self._page = page
        owner = owner_of(environment.job_id, environment.worker.host, environment.worker.slot)
        self._space = AgentSpace(environment.commits, page, owner, self._sentinel.ask)
        self._session = WorkerSession(self._sentinel, page, str(environment.worker))
        self._backend = contexts.choose(environment.backend)
        self._regrouper = Regrouper(environment, self._sentinel, self._backend)
        self._told: tuple[CommitId | None, CommitId | None] | None = None  # the commits with which ``join`` was READY
        self._worlds = 0  # entered so far
        self._result: Any = None
        self._raised_ns = 0  # when the last exception came out of the user's function
        self._is_recorded = False

    def join(self) -> None:
        self._start()
        _settle_memory()
        held = Snapshot(self._space)  # READY tells of them, though nobody has looked into them yet
        self._told = held.newest, held.previous
        self._sentinel.sealed(*self._told)
        self._enter()

    def leave(self) -> None:
        self._sentinel.gate()
        self._finish()

    def run(
        self, state: State, call: Callable[[], Any], warmup: Callable[[], object] | None, handler: ErrorHandler
    ) -> Any:
        """The result of the user's function, from the last world. Raises the worker's own exception, recorded."""
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
        # The agent asks for it when this worker does not respond: works without the GIL.
        faulthandler.register(messages.STACKS_SIGNAL, file=2, all_threads=True)
        self._sentinel.start(self._environment.notice_signals)
        _import_ahead()
        self._backend.prepare(self._environment, self._sentinel.say)

    def _run(self, warmup: Callable[[], object] | None) -> Any:
        if self._told is None:
            self._start()
        self._state._attach(self._space)
        self._state._bind(self._session)
        self._state._reserve(self._environment.reserve_bytes)
        if warmup is not None:
            warmup()
        if self._told is None:
            _settle_memory()
        self._state._resume()  # what a worker before this one has committed in its slot
        self._sentinel.sealed(*self._state.commits)
        while (outcome := self._generation()) is not _Outcome.FINISHED:
            self._recover(outcome)
        self._finish()
        return self._result

    def _finish(self) -> None:
        self._regrouper.leave()
        self._sentinel.finish()

    def _enter(self) -> None:
        self._session.enter(self._regrouper.enter(), self._regrouper.context)
        self._worlds += 1

    def _go_on(self) -> None:
        """In the world that ``join`` has entered, which was told what commits there are."""
        told, self._told = self._told, None
        self._sentinel.check()
        if self._state.commits != told:
            raise CollectiveError("the commits with which this worker has joined cannot be resumed from")

    def _generation(self) -> _Outcome:
        """Live through one generation. Raises the worker's own exception, recorded, with the generation left."""
        try:
            if self._told is None:
                self._enter()
            else:
                self._go_on()
            if self._worlds > 1:
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
            self._page.progress()  # whoever comes as far as this does not hang
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
        """Decide by fact, not by text or type: collectives mostly raise plain RuntimeErrors. None: the worker's own."""
        if not self._sentinel.in_generation:
            return None
        causes = chain(error)
        if any(isinstance(cause, HostsUpdatedInterrupt) for cause in causes):
            return _Outcome.INTERRUPTED  # wrapped by user code
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
        """To another process in this slot, which can use the device, and resumes from the commit of this one."""
        self._sentinel.failed(_text(error))
        self._record(error)
        be_replaced("this process cannot use its device any more")

    def _recover(self, outcome: _Outcome) -> None:
        """Leave the generation with the live state equal to the newest commit."""
        self._page.set_place(messages.Place.REGROUP)  # no hang, however long it takes
        if outcome is _Outcome.INTERRUPTED and not self._state._is_shadow and self._save():
            self._state._drop_gradients()
            self._regrouper.leave()
        else:
            self._regrouper.leave()
            self._restore()

    def _save(self) -> bool:
        """At the tick that all leave at. False: the generation has ended before what is on a device was copied."""
        here = CommitId(self._sentinel.generation, self._sentinel.ticks)
        self._state._settle()
        try:
            if self._state.commits[0] != here:
                self._state._seal(here)
        except CollectiveError:
            return False
        return True

    def _restore(self) -> None:
        """If no commit is whole any more, the live state is of no worth; another worker's is."""
        self._state._settle()
        if self._state.commits[0] is None:
            return
        try:
            self._state.restore()
        except StateError as error:
            if self._state.commits[0] is not None:
                raise  # it does not fit
            sys.stderr.write(f"elasticstate: {error}; this worker needs the state of another one\n")


def _settle_memory() -> None:
    """Whatever has survived the start is here to stay; later collections, one in each regroup, need not look at it
    (100 ms with torch imported)."""
    gc.collect()
    gc.freeze()


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _import_ahead() -> None:
    """What torch would import in the middle of the first generation.

    The first DDP imports ``torch.distributed.nn.functional``, whose default arguments bind ``group.WORLD`` of that
    moment and would keep generation 1's group for ever; the first optimizer step imports ``torch._dynamo``.
    """
    import torch._dynamo
    import torch.distributed.nn.functional  # noqa: F401
