"""Part of the MPI backend in a worker: MpiBackend and MpiContext, the groups of one generation over MPI.

* ``world_builder.py``: the identity of a process for MPI; the communicator of a world, built from that of the last one
* ``group.py``: torch's collectives as MPI calls, and running operations

mpi4py is loaded here, but not started. The wheels of torch contain no MPI backend, but call one if it exists
(compat/process_groups.py).
"""

# ruff: noqa: E402
from __future__ import annotations

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False  # MPI_Finalize would wait for dead members

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from mpi4py import MPI

from elasticstate.compat.process_groups import use_as_mpi_backend
from elasticstate.errors import CollectiveError, UsageError
from elasticstate.mpi.driver_part import Applicant, IdentityRequest
from elasticstate.mpi.worker.group import GONE, MpiGroup, Progress
from elasticstate.mpi.worker.world_builder import WorldBuilder, group_of
from elasticstate.net.messages import BackendRequest, FromWorkerBody, encode
from elasticstate.options import WorkerEnvironment
from elasticstate.worker.contexts import Aside, Context, Fault, Rendezvous
from elasticstate.worker.contexts.gloo import TorchGroups
from elasticstate.worker.script import exit_for_replacement

_LOOK_INTERVAL_S = 0.002
_STUCK_AFTER_S = 2.0


class MpiBackend:
    """The MPI backend (see worker.contexts.Backend).

    The members of a job's first world start MPI in that world, together, because Open MPI uses shared memory only
    between processes of one Open MPI job. A new worker starts MPI before it sends READY, so that the others do not wait
    for the start.
    """

    def __init__(self) -> None:
        self._builder: WorldBuilder | None = None

    def prepare(self, environment: WorkerEnvironment, send: Callable[[FromWorkerBody], None]) -> None:
        if MPI.Is_initialized():
            raise UsageError(
                "--backend: 'mpi': the script has initialized MPI, which elasticstate must do. Remove the call of "
                "MPI_Init, or the library that calls it."
            )

        def request(applicants: tuple[Applicant, ...]) -> None:
            send(BackendRequest(encode(IdentityRequest(applicants))))

        path = Path(f"{environment.commits}.identity")
        path.unlink(missing_ok=True)  # no process waits for it any more
        self._builder = WorldBuilder(environment.worker.host, environment.local_address, os.getpid(), path, request)
        if environment.reserve_bytes:  # other workers have committed
            self._builder.start_early()

    def context(self) -> MpiContext:
        return MpiContext(self._builder)


class MpiContext(Context):
    """The MPI groups of one generation. See worker.contexts.Context."""

    severs_in_python = True

    def __init__(self, builder: WorldBuilder | None) -> None:
        super().__init__()
        self._builder = builder
        self._groups = TorchGroups(lambda size: not self._severed, lambda: None)
        self._restore_torch: Callable[[], None] | None = None
        self._rendezvous: Rendezvous | None = None
        self._progress: Progress | None = None
        self._world: MPI.Intracomm | None = None
        self._subgroups: list[MPI.Intracomm] = []
        self._severed = False

    # ------------------------------------------------------------------------------------------------------ main thread

    def create(self, rendezvous: Rendezvous) -> None:
        builder = self._builder
        assert builder is not None, "prepare() comes first"
        world = self._create_on_thread(lambda: builder.build(rendezvous), rendezvous.init_timeout)
        self._rendezvous, self._progress, self._world = rendezvous, Progress(), world
        self._restore_torch = use_as_mpi_backend(SimpleNamespace(create=self.subgroup))
        self._groups.create("mpi", rendezvous.collective_timeout)

    def _create_on_thread(self, make: Callable[[], MPI.Intracomm], timeout: timedelta) -> MPI.Intracomm:
        """Run ``make`` on a separate thread: an MPI call cannot be interrupted, but the wait for it can."""
        made: list[MPI.Intracomm] = []
        aside = Aside(lambda: made.append(make()), None)
        deadline = aside.begun + timeout.total_seconds()
        while not aside.join(_LOOK_INTERVAL_S):
            if self._severed:
                deadline = min(deadline, time.monotonic() + _STUCK_AFTER_S)
            if time.monotonic() > deadline:
                exit_for_replacement("MPI has not created a communicator in time: a member died during the call")
        if aside.error is not None:
            error, aside.error = aside.error, None  # it would keep this frame
            raise error
        return made[0]

    def subgroup(self, ranks: Sequence[int]) -> MpiGroup:
        """Return a group of these ranks of the world; of all ranks, if ``ranks`` is empty, as torch's default group."""
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

    def classify(self, error: BaseException) -> Fault:
        if isinstance(error, dist.DistError):
            return Fault.GENERATION
        if isinstance(error, MPI.Exception) and error.Get_error_class() in GONE:
            return Fault.GENERATION
        return Fault.UNKNOWN

    # ------------------------------------------------------------------------------------------------------- any thread

    def sever(self) -> None:
        self._severed = True
        self.sockets.sever()
        if self._progress is not None:
            self._progress.sever()
        builder = self._builder
        if builder is not None:
            for comm in [*self._subgroups, *builder.unfinished, *([self._world] if self._world is not None else [])]:
                builder.revoke(comm)

    def broken(self) -> bool:
        return self._severed or (self._progress is not None and self._progress.has_failed)
