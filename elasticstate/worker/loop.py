"""WorkerLoop: the loop of ``run`` in a worker of elasticrun, from generation to generation.

::

            ┌─────────────────────────────────────────────────────────────────┐
            ▼                                                                 │
    READY → WORLD → process group → callbacks → sync → train(state) ── interrupt: save ──► leave
                                                         │   └──────── failure: leave ──► restore
                                                         ▼
                                           exit gate → the code after train(state) → end

After a failure, the last tick becomes a commit before the restore, if the live state is proven to be that of the tick.
READY means: the worker's live state equals its commit. The worker's own exception leaves the loop.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum, auto
from typing import Any

import torch

from elasticstate import present_world
from elasticstate._native import show_numeric_hosts
from elasticstate.commits import owner_of
from elasticstate.compat import torch_tensors
from elasticstate.compat.process_groups import PrefixStore, Store, TCPStore
from elasticstate.core.ids import CommitId
from elasticstate.errors import CollectiveError, HostsUpdatedInterrupt, StateError, StateMisfitError, UsageError
from elasticstate.log import logger
from elasticstate.net import messages
from elasticstate.net.link import StorageLink, WorkerLink
from elasticstate.net.messages import World
from elasticstate.net.names import LOCALHOST
from elasticstate.options import WorkerEnvironment, tunes_malloc
from elasticstate.state import durable_state
from elasticstate.state.base import State, committer_of
from elasticstate.state.committer import Committer
from elasticstate.state.repeat_check import RepeatCheck
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.step_check import StepCheck
from elasticstate.tracebacks import error_chain, text_of
from elasticstate.worker import call_monitor, contexts, script, user_metrics
from elasticstate.worker.contexts import Backend, Fault, Rendezvous, addresses
from elasticstate.worker.record import ErrorHandler, handle
from elasticstate.worker.script import exit_for_replacement
from elasticstate.worker.sentinel import Sentinel
from elasticstate.worker.session import LastWorldSession, WorkerSession
from elasticstate.worker.storage import AgentStorage, open_peer

_SLICE = timedelta(seconds=0.25)


class Regrouper:
    """Transitions of one worker from world to world: READY, a world, its process groups, and leaving these.

    Used on the main thread only.
    """

    def __init__(self, environment: WorkerEnvironment, sentinel: Sentinel, backend: Backend) -> None:
        self._environment = environment
        self._sentinel = sentinel
        self._backend = backend
        self.context = backend.context()
        self._server: TCPStore | None = None  # this worker's own; all members use the one of rank 0
        self._store: Store | None = None
        self._rendezvous: Rendezvous | None = None
        self._retiring: threading.Thread | None = None  # destroys the groups of the last generation
        show_numeric_hosts()

    def enter(
        self,
        behind: bool = False,
        names: int = 0,
        has_shards: bool = False,
        prepare: Callable[[World], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> World:
        """Enter the next world: READY → WORLD → process group.

        Raises torch's errors, or CollectiveError, when the generation fails.

        ``behind``: this worker ended ticks without training in the last generation. ``names`` and ``has_shards``: see
        messages.Ready. ``prepare`` is called with the world before its process group is created, ``meanwhile`` after
        READY, while the other members may still leave the last world.
        """
        if self._server is None:
            self._server = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
        address = f"{self._environment.local_address}:{self._server.port}"
        view = self._sentinel.ready(address, behind, names, has_shards, meanwhile)
        self.context = self._backend.context()
        self._sentinel.enter(view, self.context)
        self._sentinel.check()
        present_world.enter(view)
        if prepare is not None:
            prepare(view)
        store = self._connect(view)
        self._sentinel.check()
        options = view.options
        name = f"{self._environment.job}/{view.generation}"
        self._rendezvous = Rendezvous(
            store=PrefixStore(name, store),
            name=name,
            worker=str(self._environment.worker),
            rank=view.rank,
            size=view.size,
            init_timeout=timedelta(seconds=min(options.regroup_timeout_s, options.collective_timeout_s)),
            collective_timeout=timedelta(seconds=options.collective_timeout_s),
            check=self._sentinel.check,
            address=self._environment.local_address,
        )
        self.context.create(self._rendezvous)
        self._sentinel.check()
        self._sentinel.formed()
        return view

    def cause_of(self, error: str) -> str:
        """Return the text of the error of another member that has caused this one, if it is known; else ``error``."""
        if self._rendezvous is None or self._sentinel.trains:
            return error
        return addresses.cause_of(self._rendezvous, error) or error

    def leave(self, by_plan: bool = False, is_last: bool = False) -> None:
        """Destroy the generation's groups and store, so that nothing of the generation remains in this process.

        ``by_plan``: all members leave at the same tick. Then the groups are destroyed beside the next generation, until
        this worker leaves that one. ``is_last``: all members have passed the exit gate.
        """
        if self._retiring is not None:
            self._retiring.join()
            self._retiring = None
        torch_tensors.release_works()
        if by_plan:
            # No daemon: the interpreter must not end while the thread is inside a destructor of torch.
            self._retiring = threading.Thread(target=self.context.retire(), name="elasticstate-retire", daemon=False)
            self._retiring.start()
        else:
            self.context.destroy(by_plan=is_last)
        if isinstance(self._store, TCPStore) and self._store is self._server:
            self._server = None  # its keys belong to this generation, so it cannot be used again
        self._store = self._rendezvous = None
        self._sentinel.leave()
        gc.collect()

    def _connect(self, view: World) -> TCPStore:
        """Connect to the store of rank 0 in short attempts, and check between them whether the generation has ended."""
        self.context.sockets.watch_store(*store_address(view))
        if view.rank == 0:
            assert self._server is not None
            self._store = self._server
            return self._server
        host, port = view.store_address
        timeout_s = view.options.regroup_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_SLICE)
            except RuntimeError as error:
                self._sentinel.check()
                if time.monotonic() >= deadline:
                    raise CollectiveError(
                        f"{self._environment.worker} at {self._environment.local_address} cannot connect to rank 0 at "
                        f"{host}, port {port}, within --regroup-timeout of {timeout_s:g} s: {error}. "
                        f"{addresses.HOSTS}"
                    ) from None
                continue
            store.set_timeout(timedelta(seconds=timeout_s))
            self._store = store
            return store


def store_address(view: World) -> tuple[str, int]:
    """Return the remote address of this worker's connection to the store.

    Rank 0 connects to its own server over the loopback interface, as TCPStore does.
    """
    host, port = view.store_address
    return (LOCALHOST if view.rank == 0 else host), port


def release_exception(error: BaseException) -> None:
    """Release all objects that an exception keeps alive: the frames of its whole chain, and its attributes. They keep
    the DDP wrapper, its buckets and the dead process group alive."""
    for link in error_chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link.__cause__ = link.__context__ = None
        link.__dict__.clear()


class TorchModes:
    """The modes of the calling thread at the time of construction: gradients, autocast, default dtype and device,
    deterministic algorithms, and anomaly detection.

    A function such as ``torch.set_grad_enabled(False)`` has no end: a survivor would train on without gradients, and
    newcomers with them. So each call of the user's function begins with the modes of the first one.
    """

    def __init__(self) -> None:
        self._nesting = _autocast_nesting()
        self._modes = [read() for read, _ in _switches()]

    def set(self) -> None:
        """Make these the modes of the calling thread again."""
        for _ in range(_autocast_nesting() - self._nesting):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        for (read, write), mode in zip(_switches(), self._modes, strict=True):
            if read() != mode:
                write(mode)


def _switches() -> Iterator[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Yield a function that reads a mode, and one that sets it."""
    yield torch.is_grad_enabled, torch.set_grad_enabled
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        yield functools.partial(torch.is_autocast_enabled, kind), functools.partial(torch.set_autocast_enabled, kind)
        yield functools.partial(torch.get_autocast_dtype, kind), functools.partial(torch.set_autocast_dtype, kind)
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)
    yield torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    yield (
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda warns: torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warns),
    )
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield (
        torch.is_anomaly_check_nan_enabled,
        lambda checks: torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), checks),
    )


def _autocast_nesting() -> int:
    """Return how many autocast contexts are open."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


_TWICE = "trying to initialize the default process group twice"  # of torch's ValueError


@contextmanager
def own_process_groups() -> Iterator[None]:
    """Context in which a second ``init_process_group``, by user code, raises UsageError. torch itself refuses it."""
    try:
        yield
    except ValueError as error:
        if _TWICE not in str(error):
            raise
        raise UsageError(
            "init_process_group() was called inside a function decorated with @elasticstate.run, where elasticstate "
            "creates the default process group. Use that group, or torch.distributed.new_group()."
        ) from error


KEPT_BYTES = 1 << 30
_LARGEST_BYTES = 32 << 20  # of a block of the heap: glibc's own limit, DEFAULT_MMAP_THRESHOLD_MAX
_FILL_BYTES = 16 << 20  # of a block
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h

_keeps = False


def keep_freed_memory() -> None:
    """Keep up to KEPT_BYTES of freed blocks. Do nothing without glibc, or if the user has set options of ``malloc``.

    A change of worlds frees gradients and the buckets of DistributedDataParallel. By default, glibc returns freed
    memory at the end of its heap to the kernel if that is more than twice the largest freed block, at most 64 MiB
    (mallopt(3), M_TRIM_THRESHOLD). Then the first steps of the next world wait for fresh pages. Larger blocks than
    32 MiB are returned to the kernel at once, as always.
    """
    global _keeps
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or tunes_malloc():
        return
    set_option(_MMAP_THRESHOLD, _LARGEST_BYTES)  # glibc stops adapting this limit when one of the options is set
    set_option(_TRIM_THRESHOLD, KEPT_BYTES)
    _keeps = True


def fill(size_bytes: int) -> None:
    """Write to ``size_bytes`` of fresh memory, KEPT_BYTES at most, and free it, so that later blocks are not fresh.

    A worker that joins a running job calls it before its first READY: the others wait for its first step.
    """
    if _keeps and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        count = min(size_bytes, KEPT_BYTES) // _FILL_BYTES
        _ = [torch.zeros(_FILL_BYTES, dtype=torch.uint8, device="cpu") for _ in range(count)]


_sentinel: Sentinel | None = None  # until the process ends: a worker whose run is over still sends heartbeats


class _Outcome(Enum):
    """Result of a generation."""

    FINISHED = auto()
    INTERRUPTED = auto()  # at a tick that all members completed: nothing is lost
    FAILED = auto()  # the worker goes back to its last tick if that is proven whole, else to its last commit


class WorkerLoop:
    """The elastic loop of one worker. ``join`` may enter the first world before ``run``."""

    _state: State
    _committer: Committer
    _repeats: RepeatCheck
    _train: Callable[[], Any]
    _handler: ErrorHandler

    def __init__(self, environment: WorkerEnvironment) -> None:
        global _sentinel
        link = WorkerLink(environment.socket)
        link.connect()
        self._environment = environment
        worker = environment.worker
        storage = StorageLink(environment.socket, worker)
        owner = functools.partial(owner_of, environment.job_id, worker.host)
        self._storage = AgentStorage(
            storage.ask, owner(worker.slot), lambda *question: self._sentinel.request(*question)
        )
        self._peer = functools.partial(open_peer, storage, self._storage, owner)
        self._commit_facts: Callable[[], tuple[int, bool]] = lambda: (0, False)  # names, has_shards, of the state
        self._read_ahead: Callable[[World], None] = lambda view: None  # the same
        page = self._page = self._storage.page  # the stamps stay on this page if the commits move
        self._sentinel = _sentinel = Sentinel(link.detach(), worker, page, reports=True)
        self._session = WorkerSession(
            self._sentinel, page, str(environment.worker), lambda: self._storage.key, storage.ask_for_copy
        )
        self._backend = contexts.choose(environment.backend)
        self._regrouper = Regrouper(environment, self._sentinel, self._backend)
        self._joined_with: tuple[CommitId | None, CommitId | None] | None = None  # commits that ``join`` reported
        self._is_behind = False  # this worker ended the ticks of the last generation without training
        self._must_compare = False  # the script may have changed values while the interrupt left it
        self._has_misreported = False  # READY has named a commit that turned out to be damaged
        self._torch_modes: TorchModes | None = None  # as of the first call of the user's function
        self._result: Any = None
        self._is_past_gate = False
        self._later_functions = 0  # functions called in the last world, after the exit gate
        self._raised_ns = 0  # time when the last exception left the user's function
        self._is_recorded = False

    # ------------------------------------------------------------------------------------------------ before and after

    def join(self) -> None:
        """Enter a world before a state exists."""
        self._start()
        _freeze_memory()
        held = Snapshot(self._storage)  # READY reports these commits before they are read
        self._joined_with = held.newest, held.previous
        self._sentinel.record_commits(*self._joined_with)
        self._enter()

    def finish(self) -> None:
        """Wait in the exit gate for all members of a world that ``join`` entered. ``end`` must follow."""
        self._sentinel.wait_in_gate()
        self._pass_gate()

    def run(
        self, state: State, train: Callable[[], Any], warmup: Callable[[], object] | None, handler: ErrorHandler
    ) -> Any:
        """Return the result of the user's function in the last world, which exists until ``end``.

        Raises the worker's own exception, recorded.
        """
        self._state = state
        self._committer = committer_of(state)
        self._repeats = RepeatCheck(state)
        self._train = train
        self._handler = handler
        with self._recording():
            self._prepare(warmup)
            self._repeats.restored = self._committer.commits[0]
            while (outcome := self._run_generation()) is not _Outcome.FINISHED:
                self._recover(outcome)
            self._pass_gate()
            return self._result

    def run_in_last_world(self, state: State, train: Callable[[], Any], handler: ErrorHandler) -> Any:
        """Run another function between the exit gate and ``end``. It is not elastic: a failed world raises its error.

        Commits of a state that was not in use before stay in the memory of this process.
        """
        self._later_functions += 1
        self._handler = handler
        with self._recording():
            committer_of(state).use_session(LastWorldSession(self._session, self._later_functions))
            state.sync()
            with own_process_groups():
                return train()

    def end(self) -> None:
        """Destroy the process groups of the last world, after the exit gate."""
        self._regrouper.leave(is_last=True)

    def failure_text(self, error: BaseException) -> str:
        """Return a message if ``error``, raised by a collective, comes from the failure of a member; otherwise ""."""
        if not self._is_failure(error):
            return ""
        if self._is_past_gate:
            return f"a worker has failed after the training, where no other world is made: {error}"
        return f"a worker of the world has failed: {error}"

    def _is_failure(self, error: BaseException) -> bool:
        """Return True if ``error``, or the world itself, proves that a member has failed."""
        return (
            self._sentinel.has_ended(self._sentinel.generation)
            or self._regrouper.context.broken()
            or any(self._is_of_world(cause) for cause in error_chain(error))
        )

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Record the exception that ends this worker, unless it is recorded already."""
        try:
            yield
        except Exception as error:
            if not self._is_recorded:
                self._raised_ns = time.time_ns()
                self._record(error)
            raise

    def _start(self) -> None:
        # The agent sends this signal when the worker does not respond. faulthandler works without the GIL.
        faulthandler.register(messages.STACKS_SIGNAL, file=2, all_threads=True)
        self._sentinel.start(self._environment.preemption_signals)
        call_monitor.start(self._sentinel.send)
        user_metrics.start(self._sentinel.send)
        keep_freed_memory()
        _import_early()
        self._backend.prepare(self._environment, self._sentinel.send)

    def _prepare(self, warmup: Callable[[], object] | None) -> None:
        """Do everything that comes before the first READY, so that this worker is ready to train."""
        has_joined = self._joined_with is not None
        if not has_joined:
            self._start()
        self._committer.use_storage(self._storage)
        self._committer.use_session(self._session)
        self._committer.loaded = {}
        self._committer.use_peers(self._peer)
        self._commit_facts = lambda: (self._committer.names, self._committer.snapshot.has_attached)
        self._read_ahead = self._read_root_ahead
        self._committer.snapshot.reserve(self._environment.reserve_bytes)
        fill(2 * self._environment.reserve_bytes)  # see docs/decisions/worker-processes.md
        if warmup is not None:
            warmup()
        if not has_joined:
            _freeze_memory()
        may_prefetch = not has_joined and not self._environment.one_copy
        self._resume(may_prefetch)
        if self._committer.commits[0] is None:
            self._state._require_picklable()
        self._sentinel.record_commits(*self._committer.commits)

    def _resume(self, may_prefetch: bool) -> None:
        """Load the commit that an earlier worker has left in this slot, or else that of another worker of this host.
        Raises StateMisfitError: this process ends before any other worker stops for it."""
        try:
            if not self._committer.resume() and may_prefetch:
                self._committer.prefetch()
        except StateMisfitError:  # the others may have trained on, in another structure
            if not (may_prefetch and self._committer.prefetch()):
                raise

    def _pass_gate(self) -> None:
        self._is_past_gate = True
        call_monitor.stop()
        user_metrics.end()
        self._sentinel.finish()

    # --------------------------------------------------------------------------------------------------- one generation

    def _run_generation(self) -> _Outcome:
        """Run one generation. Raises the worker's own exception, recorded, after leaving the generation."""
        try:
            self._enter_or_continue()
            self._committer.stored = None
            if (source := self._session.view.durable) is not None:  # no member holds a usable commit
                durable_state.Resume(self._committer, source).run()
            if self._committer.go_back():
                self._repeats.restored = self._committer.commits[0]
            has_state = self._committer.start_from_line() or self._committer.has_own_commit
            has_state = has_state or self._committer.has_followed
            if has_state:  # else: the job's first world, or sync brings the state
                if type(self._state).on_reset is not State.on_reset:
                    self._committer.must_seal = True  # a subclass may change values there
                self._state.on_reset()
            self._state.sync()
            self._committer.continue_iterators()
            self._torch_modes = self._torch_modes or TorchModes()
            self._sentinel.begin_training()
            with own_process_groups(), StepCheck(self._state, self._train), self._repeats:
                self._result = self._train()
            self._session.check_collectives()  # the function may have caught the end of this generation
            self._committer.settle()
            self._committer.make_up_commit()
            self._committer.send_digest()
            self._sentinel.wait_in_gate()
            return _Outcome.FINISHED
        except HostsUpdatedInterrupt as interrupt:
            release_exception(interrupt)
            self._committer.send_digest()
            return _Outcome.INTERRUPTED
        except (SystemExit, KeyboardInterrupt):
            with script.ignored():
                self._regrouper.leave()
            raise
        except BaseException as error:
            self._raised_ns = time.time_ns()
            self._page.progress()  # a worker that gets this far does not hang
            outcome = self._judge(error)
            if outcome is None:
                contexts.explain(error)
                self._record(error)
                self._regrouper.leave()
                raise
            if outcome is _Outcome.FAILED and self._is_device_lost(error):
                # Another process in this slot can use the device, and resumes from this worker's commit.
                self._sentinel.report_failure(text_of(error))
                self._record(error)
                exit_for_replacement("this process cannot use its device any more")
            release_exception(error)
            return outcome

    def _enter_or_continue(self) -> None:
        """Enter the next world, or continue in the world that ``join`` entered."""
        joined_with, self._joined_with = self._joined_with, None
        if joined_with is None:
            self._enter()
            return
        self._sentinel.check()
        if self._committer.commits != joined_with:
            raise CollectiveError("this worker cannot restore the commits that it reported when it joined the world")

    def _read_root_ahead(self, view: World) -> None:
        if view.follows is None:
            self._committer.read_ahead(view.near, view.rank, view.root_slot, view.generation)

    def _enter(self) -> None:
        undo, self._must_compare = self._undo_unwinding if self._must_compare else None, False
        view = self._regrouper.enter(self._is_behind, *self._commit_facts(), self._read_ahead, undo)
        self._session.enter(view, self._regrouper.context)
        self._is_behind = False
        if self._has_misreported:
            self._has_misreported = False
            raise CollectiveError("this worker cannot restore the commits that it has reported for this world")

    # ------------------------------------------------------------------------------------------------------- exceptions

    def _judge(self, error: BaseException) -> _Outcome | None:
        """Return the outcome by facts, as collectives mostly raise plain RuntimeErrors; None for an own error."""
        if not self._sentinel.is_in_generation:
            return None
        causes = error_chain(error)
        if any(isinstance(cause, HostsUpdatedInterrupt) for cause in causes):
            return _Outcome.INTERRUPTED  # user code has wrapped the interrupt
        text = text_of(error)
        if self._is_failure(error):
            self._sentinel.report_failure(self._regrouper.cause_of(text))
            return _Outcome.FAILED
        return None if self._sentinel.is_own_error(text) else _Outcome.FAILED

    def _is_of_world(self, cause: BaseException) -> bool:
        if isinstance(cause, CollectiveError):
            return not isinstance(cause, UsageError)  # of a package whose calls differ: no retry would help
        return self._regrouper.context.classify(cause) is not Fault.UNKNOWN

    def _is_device_lost(self, error: BaseException) -> bool:
        context = self._regrouper.context
        return any(context.classify(cause) is Fault.DEVICE for cause in error_chain(error)) or not context.usable()

    def _record(self, error: BaseException) -> None:
        handle(self._handler, error, self._raised_ns, self._sentinel.ticks)
        self._is_recorded = True

    # --------------------------------------------------------------------------------------- between two generations

    def _recover(self, outcome: _Outcome) -> None:
        """Leave the generation with the live state equal to the newest commit."""
        self._page.set_place(messages.Place.REGROUP)  # a worker in this place never counts as hung
        if self._torch_modes is not None:
            self._torch_modes.set()  # before user code, such as reset callbacks
        self._is_behind = self._committer.is_behind
        self._committer.loaded = {}
        self._session.leave()
        self._state._leave_world()
        if outcome is _Outcome.INTERRUPTED and not self._is_behind and self._save():
            self._state._drop_gradients()
            self._committer.detach()
            self._regrouper.leave(by_plan=True)
            self._must_compare = True
        else:
            self._committer.detach()
            self._regrouper.leave()  # nothing of the generation writes any more
            if not self._is_behind and not self._sentinel.has_interrupted:
                self._committer.commit_last_tick()
            self._restore()
        self._repeats.restored = self._committer.commits[0]

    def _save(self) -> bool:
        """Make sure that this worker holds the commit of the tick where all members leave. Return False if it does not.

        A tick without a commit is saved here, with what the script has changed while the interrupt left it. That is
        the commit of no rank if a collective has failed meanwhile, or if the script has caught the interrupt and gone
        on. A follower saves nothing, and reports READY without a commit. If it holds an older one, it restores that.
        """
        self._committer.settle()
        if self._session.view.follows is not None:
            return self._committer.commits[0] is None
        here = self._last_tick
        if self._committer.begun == here:  # sealed at the tick, also on other ranks
            return self._committer.commits[0] == here
        if self._sentinel.has_gone_on or self._regrouper.context.has_failed():
            return False
        gc.collect()  # the script's finalizers may change values, too
        try:
            self._committer.seal(here)
        except CollectiveError:
            return False
        return True

    @property
    def _last_tick(self) -> CommitId:
        return CommitId(self._sentinel.generation, self._sentinel.ticks)

    def _undo_unwinding(self) -> None:
        """Restore the commit of the last tick if the script has changed values while the interrupt left it.

        That takes as long as to read the state, so it is done after READY, while other members still leave the last
        world, and when nothing of the script is left.
        """
        if self._committer.begun != self._last_tick or self._session.view.follows is not None:
            return  # saved afterwards
        if changed := self._committer.changed_since_commit():
            logger.warning(
                "%s was changed after commit %s, while the interrupt of a planned change left the script. The worker "
                "restores the commit, with which all others begin the next world.",
                changed,
                self._last_tick,
            )
            reported = self._committer.commits
            self._restore()
            self._has_misreported = self._committer.commits != reported

    def _restore(self) -> None:
        """Restore the newest commit. If no commit is intact, discard the live state and use another worker's."""
        self._committer.settle()
        if self._committer.commits[0] is None:
            return
        try:
            self._state.restore()
        except StateMisfitError as error:  # the training has changed the structure since: a new process may have it
            logger.warning("%s", error)
            exit_for_replacement("it cannot go back to its commit, because its objects have changed since")
        except StateError as error:
            if self._committer.commits[0] is not None:
                raise
            logger.warning("this worker receives the state of another worker at the next sync: %s", error)


def _freeze_memory() -> None:
    """Exclude all present objects from later garbage collections: each regroup runs one (100 ms with torch imported).

    The end of the process is a second faster, too. But modules made with nanobind then report leaks: so does Triton,
    which torch 2.15 imports with its compiler.
    """
    gc.collect()
    gc.freeze()
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)


def _import_early() -> None:
    """Import modules that torch would otherwise import within the first generation: with the first DDP
    ``torch.distributed.nn.functional``, whose default arguments bind the present ``group.WORLD`` and would keep
    generation 1's group forever; with the first optimizer step torch's compiler."""
    import torch.distributed.nn.functional

    torch.compiler.disable(_freeze_memory)  # type: ignore[no-untyped-call]  # imports the compiler, and does no more
