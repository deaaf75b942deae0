"""FixedLoop: ``run`` in a world that another launcher, such as mpirun, has started. The world never changes."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from elasticstate import present_world
from elasticstate._native import GlooSockets, count_failed_collectives
from elasticstate.compat.process_groups import HashStore, PrefixStore, Store, TCPStore, rendezvous
from elasticstate.core.worlds import fixed_placement
from elasticstate.errors import CollectiveError, UsageError
from elasticstate.log import logger
from elasticstate.net.link import StoreListener
from elasticstate.options import LaunchedPlace, usable_runtime_directory
from elasticstate.private import open_directory, read_file, write_file
from elasticstate.state.base import State, committer_of
from elasticstate.state.session import FAILED_COLLECTIVE, Session
from elasticstate.state.step_check import StepCheck
from elasticstate.worker import contexts
from elasticstate.worker.contexts import Rendezvous
from elasticstate.worker.contexts.gloo import GlooGroups
from elasticstate.worker.loop import own_process_groups

TIMEOUT = timedelta(seconds=300)
_SLICE = timedelta(seconds=1)
_LOOK_INTERVAL_S = 0.01
_FILE = "store"
_SET_MASTER = "Set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port there, for all processes"


class Meeting(NamedTuple):
    """The store of a world, and its address."""

    store: Store
    host: str
    port: int


@contextmanager
def meet(place: LaunchedPlace) -> Iterator[Meeting]:
    """Give the store in which the processes of this world meet. All must have joined at the end of the context.

    Raises UsageError or OptionError if the processes cannot meet, and torch's error if one of them does not come.
    """
    if place.master is not None:
        store, _, _ = next(iter(rendezvous("env://", place.rank, place.size, timeout=TIMEOUT)))
        yield Meeting(store, *place.master)
    elif place.is_on_one_host:
        with _on_one_host(place) as store:
            yield Meeting(store, store.host, store.port)
    elif place.slurm_address is not None:
        yield Meeting(_at(place, *place.slurm_address), *place.slurm_address)
    else:
        store = _by_mpi(place)
        yield Meeting(store, store.host, store.port)


@contextmanager
def _on_one_host(place: LaunchedPlace) -> Iterator[TCPStore]:
    """Give a store at the loopback interface. A file in a private directory names its port."""
    path = usable_runtime_directory() / f"elasticstate-{os.getuid()}-world-{place.key}"
    if place.rank != 0:
        yield _find_store(str(path))
        return
    with suppress(FileExistsError):
        path.mkdir(0o700)
    directory = open_directory(path)
    listener = StoreListener("127.0.0.1")
    store = TCPStore(
        "127.0.0.1",
        listener.port,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=os.dup(listener.fileno()),
    )
    listener.close()
    token = secrets.token_hex(16)
    store.set(token, "")
    try:
        write_file(directory, _FILE, f"{store.port} {token}".encode())
        yield store
    finally:
        with suppress(OSError):
            os.unlink(_FILE, dir_fd=directory)
            path.rmdir()
        os.close(directory)


def _find_store(path: str) -> TCPStore:
    """Return the store that rank 0 has written into the directory ``path``. Raises UsageError if rank 0 does not."""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, dist.DistError):  # a file of a dead process names no living store
            directory = open_directory(path)
            try:
                port, token = read_file(directory, _FILE).decode().split()
            finally:
                os.close(directory)
            store = TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False, timeout=_SLICE)
            if store.check([token]):
                store.set_timeout(TIMEOUT)
                return store
        time.sleep(_LOOK_INTERVAL_S)
    raise UsageError(f"Rank 0 has written no port to {path} within {TIMEOUT.total_seconds():g} s. {_SET_MASTER}.")


def _at(place: LaunchedPlace, host: str, port: int) -> Store:
    """Return a store on the host of rank 0. Raises UsageError if the processes cannot connect there."""
    try:
        store = TCPStore(host, port, is_master=place.rank == 0, wait_for_workers=False, timeout=TIMEOUT)
    except dist.DistNetworkError as error:
        raise UsageError(f"The processes cannot meet at {host}:{port}: {error}. {_SET_MASTER}.") from error
    return PrefixStore(place.key, store)


def _by_mpi(place: LaunchedPlace) -> TCPStore:
    """Return a store whose address rank 0 has sent with MPI. Raises UsageError if the processes have no common MPI."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise UsageError(
            f"{place.launcher} has started this world on several hosts, and does not pass on the address of rank 0. "
            f"{_SET_MASTER}: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ... Or install mpi4py."
        ) from None
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (place.rank, place.size):
        raise UsageError(
            f"{place.launcher} has started {place.size} processes, but the world of mpi4py has {world.Get_size()}: "
            f"it uses another MPI. {_SET_MASTER}."
        )
    atexit.register(_abort_after_exception, world)
    if place.rank == 0:
        store = TCPStore(place.host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    host, port = world.bcast((place.host, store.port) if place.rank == 0 else None)
    return store if place.rank == 0 else TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def _abort_after_exception(world: Any) -> None:
    """End all processes: the end of MPI would wait for the others, which wait for this one in a collective."""
    if getattr(sys, "last_value", None) is not None:
        world.Abort(1)


class SoloLoop:
    """A world of one, without a driver. Commits are in ordinary memory, and there are no other workers to wait for."""

    def __init__(self) -> None:
        self._has_joined = False

    def join(self) -> None:
        self._has_joined = True
        create_default_group(HashStore(), 0, 1)
        present_world.enter(present_world.alone())

    def run(self, state: State, call: Callable[[], Any], warmup: Callable[[], object] | None, _: object) -> Any:
        """Return the result of the user's function. The world exists until ``end``."""
        if warmup is not None:
            warmup()
        if not self._has_joined:
            self.join()
        try:
            with StepCheck(state, call):
                result = self.run_in_last_world(state, call)
            self.finish()
        except BaseException:
            self.end()
            raise
        return result

    def run_in_last_world(self, state: State, call: Callable[[], Any], _: object = None) -> Any:
        """Call a function of the user. There is no other world."""
        with own_process_groups():
            state.sync()
            return call()

    def finish(self) -> None:
        """Do nothing: there are no members to wait for."""

    def end(self) -> None:
        """Destroy the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def failure_text(self, error: BaseException) -> str:
        return ""


def create_default_group(store: Store, rank: int, size: int) -> None:
    """Create the default process group of a world without a driver."""
    excepthook = sys.excepthook
    dist.init_process_group(contexts.for_torch(), store=store, rank=rank, world_size=size)
    sys.excepthook = excepthook


_COLLECTIVE_TIMEOUT = timedelta(seconds=1800)  # the default of --collective-timeout
_NO_TIMEOUT = timedelta(days=365)
_EVIDENCE_S = 1.0  # seconds from the error of a collective to the end of another connection of a process that died


class FixedLoop(SoloLoop):
    """One world, without a driver. Commits are in ordinary memory, and the loss of a process ends the world."""

    def __init__(self, place: LaunchedPlace) -> None:
        super().__init__()
        self._counts_failures = count_failed_collectives() and contexts.by_devices() == "gloo"
        self._place = place
        self._functions = 0  # functions of the user that were called
        self._groups = GlooGroups(GlooSockets())
        self._gate: Any = None  # group of all ranks: for the end, and to detect the loss of a process

    def join(self) -> None:
        place = self._place
        self._has_joined = True
        with meet(place) as met:
            create_default_group(met.store, place.rank, place.size)
            self._rendezvous = Rendezvous(
                store=met.store,
                name=place.key,
                worker=f"rank {place.rank}",
                rank=place.rank,
                size=place.size,
                init_timeout=TIMEOUT,
                collective_timeout=_COLLECTIVE_TIMEOUT,
                check=lambda: None,
            )
            everyone = tuple(range(place.size))
            self._gate = self._groups.subgroup(replace(self._rendezvous, collective_timeout=_NO_TIMEOUT), everyone)
        placements: list[Any] = [None] * place.size
        dist.all_gather_object(placements, (place.host, place.local_rank))
        placement = fixed_placement(placements, place.rank)
        present_world.enter(present_world.fixed(placement, place.size, f"{met.host}:{met.port}"))

    def run_in_last_world(self, state: State, call: Callable[[], Any], _: object = None) -> Any:
        """Call a function of the user. Raises CollectiveError if an error comes from the loss of a process."""
        self._functions += 1
        place, committer = self._place, committer_of(state)
        committer.use_session(FixedSession(self._functions, self))
        if place.rank == 0 and self._functions == 1:
            logger.warning(
                "%s has started this world of %d workers. It never changes, and ends when a worker is lost. Start the "
                "script with elasticrun to continue after losses.",
                place.launcher,
                place.size,
            )

        def begin() -> Any:
            committer.continue_iterators()  # as on the ranks that have received the state
            return call()

        try:
            result = super().run_in_last_world(state, begin if self._functions == 1 else call)
            self.check_collectives()  # the function may have caught the error of one
            return result
        except RuntimeError as error:
            if isinstance(error, CollectiveError) or not (text := self.failure_text(error)):
                raise
            raise CollectiveError(text) from error

    def finish(self) -> None:
        """Wait for all others. Raises CollectiveError if one of them is lost."""
        try:
            self._gate.barrier().wait()
        except RuntimeError as error:
            raise CollectiveError(self._loss(error)) from error

    def end(self) -> None:
        """Destroy the process groups."""
        self._gate = None
        self._groups.be_quiet()
        self._groups.take()
        super().end()

    def failure_text(self, error: BaseException) -> str:
        return self._loss(error) if self._is_a_worker_lost(error) else ""

    def _is_a_worker_lost(self, error: BaseException) -> bool:
        deadline = time.monotonic() + _EVIDENCE_S
        while not self._groups.sockets.broken():
            if time.monotonic() > deadline:
                return isinstance(error, dist.DistError)
            time.sleep(_LOOK_INTERVAL_S)
        return True

    def _loss(self, error: BaseException) -> str:
        return (
            f"a worker of this world was lost, so the world ends, as {self._place.launcher} has started it: {error}. "
            "Start the script with elasticrun to continue after losses."
        )

    def check_collectives(self) -> None:
        sockets = self._groups.sockets
        if sockets.failed() or (not self._counts_failures and sockets.lost()):
            raise CollectiveError(self._loss(CollectiveError(FAILED_COLLECTIVE)))

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._groups.subgroup(self._rendezvous, ranks)
        return group


class FixedSession(Session):
    """Session of a state in a world that never changes. ``number``: 1 for the first function that is called in it."""

    def __init__(self, number: int, loop: FixedLoop) -> None:
        view = msgspec.structs.replace(present_world.world(), generation=number)
        super().__init__(view, f"rank {view.rank}")
        self._loop = loop

    def check_collectives(self) -> None:
        self._loop.check_collectives()

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return self._loop.subgroup(ranks)
