"""MpiContext: the groups of one generation over MPI.

The wheels of torch contain no MPI backend, but call one if it exists (compat/process_groups.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from elasticstate._native import GlooSockets
from elasticstate.compat.process_groups import use_as_mpi_backend
from elasticstate.errors import CollectiveError
from elasticstate.mpi.worker.group import GONE, MpiGroup, Progress
from elasticstate.mpi.worker.library import MPI
from elasticstate.mpi.worker.world_builder import WorldBuilder, group_of
from elasticstate.worker.contexts.context import Fault, Rendezvous, TorchGroups
from elasticstate.worker.replacement import exit_for_replacement

_LOOK_INTERVAL_S = 0.002
_STUCK_AFTER_S = 2.0


class MpiContext:
    """The MPI groups of one generation. See worker.contexts.context.Context."""

    severs_in_python = True
    raises_when_cut = True

    def __init__(self, builder: WorldBuilder | None) -> None:
        self.sockets = GlooSockets()  # sockets of the store
        self._builder = builder
        self._groups = TorchGroups(lambda size: not self._severed, lambda: None)
        self._restore_torch: Callable[[], None] | None = None
        self._rendezvous: Rendezvous | None = None
        self._progress: Progress | None = None
        self._world: MPI.Intracomm | None = None
        self._subgroups: list[MPI.Intracomm] = []
        self._revoked: list[MPI.Comm] = []
        self._severed = False

    # ------------------------------------------------------------------------------------------------------ main thread

    def watch_store(self, address: tuple[str, int]) -> None:
        self.sockets.watch_store(*address)

    def create(self, rendezvous: Rendezvous) -> None:
        builder = self._builder
        assert builder is not None, "prepare() comes first"
        world = self._create_on_thread(lambda: builder.build(rendezvous), rendezvous.init_timeout)
        self._rendezvous, self._progress, self._world = rendezvous, Progress(), world
        self._restore_torch = use_as_mpi_backend(_GroupFactory(self))
        self._groups.create("mpi", rendezvous.collective_timeout)

    def _create_on_thread(self, make: Callable[[], MPI.Intracomm], timeout: timedelta) -> MPI.Intracomm:
        """Run ``make`` on a separate thread: an MPI call cannot be interrupted, but the wait for it can."""
        result = _Result(make)
        thread = threading.Thread(target=result.fill, daemon=True)
        thread.start()
        deadline = time.monotonic() + timeout.total_seconds()
        while thread.is_alive():
            thread.join(_LOOK_INTERVAL_S)
            if self._severed:
                deadline = min(deadline, time.monotonic() + _STUCK_AFTER_S)
            if time.monotonic() > deadline:
                exit_for_replacement("MPI has not created a communicator in time: a member died during the call")
        return result.get()

    def group(self, ranks: Sequence[int]) -> MpiGroup:
        """Return a torch process group of these ranks of the world; of all ranks, if ``ranks`` is empty."""
        if self._severed:
            raise CollectiveError("the generation has ended")
        assert self._world is not None
        assert self._progress is not None
        assert self._rendezvous is not None
        world, timeout = self._world, self._rendezvous.collective_timeout
        comm = world
        if ranks:
            comm = self._create_on_thread(lambda: group_of(world, ranks, lambda: self._severed), timeout)
            self._subgroups.append(comm)
        return MpiGroup(comm, self._progress, timeout)

    def subgroup(self, ranks: tuple[int, ...]) -> MpiGroup:
        return self.group(ranks)

    def retire(self) -> Callable[[], None]:
        """Destroy the groups at once: see context.Context."""
        self.destroy()
        return lambda: None

    def destroy(self, by_plan: bool = False) -> None:
        if self._progress is not None:
            self._progress.sever()
            self._progress.stop()
        self._groups.destroy()
        if self._restore_torch is not None:
            self._restore_torch()
            self._restore_torch = None
        if self._builder is not None:
            self._builder.retire(self._subgroups)
        self._subgroups.clear()
        self._world = None
        self.sockets.forget()

    def has_failed(self) -> bool:
        return self._progress is not None and self._progress.collective_has_failed

    def may_have_failed(self) -> bool:
        return False

    def classify(self, error: BaseException) -> Fault:
        if isinstance(error, dist.DistError):
            return Fault.GENERATION
        if isinstance(error, MPI.Exception) and error.Get_error_class() in GONE:
            return Fault.GENERATION
        return Fault.UNKNOWN

    def usable(self) -> bool:
        return True

    # ------------------------------------------------------------------------------------------------------- any thread

    def sever(self) -> None:
        self._severed = True
        self.sockets.sever()
        if self._progress is not None:
            self._progress.sever()
        comms = [*self._subgroups, *(self._builder.unfinished if self._builder is not None else ())]
        if self._world is not None:
            comms.append(self._world)
        for comm in comms:
            if comm not in self._revoked:
                self._revoked.append(comm)
                comm.Revoke()

    def own_failure(self) -> str:
        return ""  # a collective that fails raises an error

    def broken(self) -> bool:
        return self._severed or (self._progress is not None and self._progress.has_failed)


class _Result:
    """Result of a thread that makes a communicator."""

    def __init__(self, make: Callable[[], MPI.Intracomm]) -> None:
        self._make = make
        self._world: MPI.Intracomm | None = None
        self._error: BaseException | None = None

    def fill(self) -> None:
        try:
            self._world = self._make()
        except BaseException as error:
            self._error = error

    def get(self) -> MPI.Intracomm:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        assert self._world is not None
        return self._world


class _GroupFactory:
    """Replacement for torch's class ``ProcessGroupMPI``, as long as a generation exists."""

    def __init__(self, context: MpiContext) -> None:
        self._context = context

    def create(self, ranks: Sequence[int]) -> MpiGroup:
        """Return a new group. torch calls it without ranks for the default group."""
        return self._context.group(ranks)
