"""FixedLoop: ``run`` in a world that another launcher, such as mpirun, has started. The world never changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from elasticstate import present_world
from elasticstate._native import count_failed_collectives
from elasticstate.core.assignment import fixed_placement
from elasticstate.core.types import CommitId
from elasticstate.errors import CollectiveError
from elasticstate.log import logger
from elasticstate.options import LaunchedPlace
from elasticstate.state.base import State, committer_of
from elasticstate.state.session import FAILED_COLLECTIVE, HeldCommits, SoloSession
from elasticstate.worker import contexts
from elasticstate.worker.alone import SoloLoop, create_default_group
from elasticstate.worker.contexts.context import Rendezvous
from elasticstate.worker.contexts.gloo_groups import GlooGroups
from elasticstate.worker.meeting import TIMEOUT, Meeting, meet

_COLLECTIVE_TIMEOUT = timedelta(seconds=1800)  # the default of --collective-timeout
_NO_TIMEOUT = timedelta(days=365)
_EVIDENCE_S = 1.0  # seconds from the error of a collective to the end of another connection of a process that died
_LOOK_INTERVAL_S = 0.01


class FixedLoop(SoloLoop):
    """One world, without a driver. Commits are in ordinary memory, and the loss of a process ends the world."""

    def __init__(self, place: LaunchedPlace) -> None:
        super().__init__()
        self._counts_failures = count_failed_collectives() and contexts.by_devices() == "gloo"
        self._place = place
        self._functions = 0  # functions of the user that were called
        self._groups = GlooGroups()
        self._gate: Any = None  # group of all ranks: for the end, and to detect the loss of a process

    def join(self) -> None:
        place = self._place
        self._has_joined = True
        with meet(place) as met:
            create_default_group(met.store, place.rank, place.size)
            self._rendezvous = _rendezvous(place, met)
            everyone = tuple(range(place.size))
            self._gate = self._groups.subgroup(replace(self._rendezvous, collective_timeout=_NO_TIMEOUT), everyone)
        placements: list[Any] = [None] * place.size
        dist.all_gather_object(placements, (place.host, place.local_rank))
        placement = fixed_placement(placements, place.rank)
        present_world.enter(
            present_world.WorldView(
                1,
                placement,
                place.size,
                0,
                everyone[1:],
                met.host,
                met.port,
                fresh=True,
                local_place=place.local_rank,
            )
        )

    def run_in_last_world(self, state: State, call: Callable[[], Any], _: object = None) -> Any:
        """Call a function of the user. Raises CollectiveError if an error comes from the loss of a process."""
        self._functions += 1
        place, committer = self._place, committer_of(state)
        session = FixedSession(self._functions, place.rank, place.size, self._group_of, self._check_collectives)
        committer.use_session(session)
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
            self._check_collectives()  # the function may have caught the error of one
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
        self._groups.clear()
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

    def _check_collectives(self) -> None:
        sockets = self._groups.sockets
        if sockets.failed() or (not self._counts_failures and sockets.lost()):
            raise CollectiveError(self._loss(CollectiveError(FAILED_COLLECTIVE)))

    def _group_of(self, ranks: tuple[int, ...]) -> Any:
        return self._groups.subgroup(self._rendezvous, ranks)


class FixedSession(SoloSession):
    """Session of a state in a world that never changes (see state.session.Session).

    Args:
        number: 1 for the first function that is called in this world. Commit ids count it as a generation of its own.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        size: int,
        group_of: Callable[[tuple[int, ...]], Any],
        check_collectives: Callable[[], None],
    ) -> None:
        self.generation = number
        self.ticks = 0
        self.rank = rank
        self.size = size
        self.lacking = tuple(range(1, size))
        self.worker_key = f"rank {rank}"
        self.has_peers = size > 1
        self._group_of = group_of
        self._check_collectives = check_collectives
        self._restore_group: dist.ProcessGroup | None = None

    def check_collectives(self) -> None:
        self._check_collectives()

    def commit_id(self) -> CommitId:
        return CommitId(self.generation, self.ticks + 1)

    def restore_group(self) -> dist.ProcessGroup | None:
        if self.has_peers and self._restore_group is None:
            self._restore_group = self._group_of(tuple(range(self.size)))
        return self._restore_group

    def tick(self) -> None:
        self.ticks += 1

    def record_commits(self, held: HeldCommits) -> None:
        """Do nothing: nobody else uses the commits."""

    def record_sync(self, size_bytes: int, seconds: float) -> None:
        """Do nothing: there is no driver."""

    def process_group_for(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == self.size:
            return None
        group: dist.ProcessGroup = self._group_of(tuple(sorted(ranks)))
        return group


def _rendezvous(place: LaunchedPlace, met: Meeting) -> Rendezvous:
    return Rendezvous(
        store=met.store,
        name=place.key,
        worker=f"rank {place.rank}",
        rank=place.rank,
        size=place.size,
        init_timeout=TIMEOUT,
        collective_timeout=_COLLECTIVE_TIMEOUT,
        check=lambda: None,
    )
