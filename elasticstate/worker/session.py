"""WorkerSession: a state's view of the present generation of a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from elasticstate import present_world
from elasticstate._native import ControlPage
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.core.types import ShardSource, World
from elasticstate.errors import CollectiveError
from elasticstate.net import messages
from elasticstate.replicas.client import ReplicaClient
from elasticstate.state.reshard import CopyReader
from elasticstate.state.session import FAILED_COLLECTIVE, HeldCommits
from elasticstate.worker.contexts.context import Context
from elasticstate.worker.sentinel import Sentinel
from elasticstate.worker.storage import LocalReplicas

_LOOK_INTERVAL_S = 0.05
_CUT = "the collectives of this world were cut, so this step was not trained on all ranks"
_SILENCE_S = 10.0  # of a copy server: then its copy counts as unreachable, and another one may serve


class WorkerSession:
    """Session of a worker under ``elasticrun`` (see state.session.Session)."""

    _context: Context  # context of the present generation

    def __init__(
        self,
        sentinel: Sentinel,
        page: ControlPage,
        worker_key: str,
        key: Callable[[], bytes],
        share: Callable[[SlotId, CommitId], tuple[int, tuple[int, int, int]] | None],
    ) -> None:
        """``key``: returns the job's key for commit tags, when the storage is open. ``share``: see LocalReplicas."""
        self._sentinel = sentinel
        self._page = page
        self._key = key
        self._share = share
        self._reported_bytes = self._sized_in = 0  # size of a commit of the world with this generation
        self._restore_group: dist.ProcessGroup | None = None  # of the present world
        self.worker_key = worker_key
        self.view: World = present_world.alone()

    def enter(self, view: World, context: Context) -> None:
        """Use this world from now on."""
        self.view, self._context = view, context

    def leave(self) -> None:
        """Keep nothing of the present world that its context is about to destroy."""
        self._restore_group = None

    @property
    def generation(self) -> int:
        return self.view.generation

    @property
    def rank(self) -> int:
        return self.view.rank

    @property
    def size(self) -> int:
        return self.view.size

    @property
    def root(self) -> int:
        return self.view.root

    @property
    def lacking(self) -> tuple[int, ...]:
        return self.view.lacking

    @property
    def near(self) -> tuple[int, ...]:
        return self.view.near

    @property
    def root_slot(self) -> int:
        return self.view.root_slot

    @property
    def one_copy(self) -> bool:
        return bool(self.view.keepers)

    @property
    def follows(self) -> int | None:
        return self.view.follows

    @property
    def line(self) -> CommitId | None:
        return self.view.line

    @property
    def sources(self) -> tuple[ShardSource, ...]:
        return self.view.sources

    def check(self) -> None:
        self._sentinel.check()

    @property
    def ticks(self) -> int:
        return self._sentinel.ticks

    def commit_id(self) -> CommitId:
        self._sentinel.may_commit()
        return CommitId(self.view.generation, self._sentinel.ticks + 1)

    def has_ended(self, generation: int) -> bool:
        return self._sentinel.has_ended(generation)

    def tick(self) -> None:
        self._sentinel.tick()

    def check_collectives(self) -> None:
        self._sentinel.check_ticks()
        if self._context.has_failed() or self._context.may_have_failed():
            is_told = self._context.raises_when_cut
            self._sentinel.refuse(is_told)
            raise CollectiveError(FAILED_COLLECTIVE if is_told else self._sentinel.cause or _CUT)

    def has_failed_collective(self) -> bool:
        """Return True if a collective has failed in this process, also after the last tick of the generation."""
        return self._context.has_failed()

    @property
    def has_peers(self) -> bool:
        return self.view.size > 1 and self._sentinel.is_in_generation

    def restore_group(self) -> dist.ProcessGroup | None:
        if not (self.has_peers and self._sentinel.trains):
            return None
        if self._restore_group is None:
            self._restore_group = self.subgroup(tuple(range(self.size)))
        return self._restore_group

    @property
    def verify_sync(self) -> bool:
        return self.view.options.verify_sync

    @property
    def records_ticks(self) -> bool:
        return self.view.options.records_ticks and self.view.size > 1 and self.view.follows is None

    def progress(self) -> None:
        self._page.progress()

    def record_commits(self, held: HeldCommits) -> None:
        self._sentinel.record_commits(held.newest, held.previous)
        if held.newest is None or held.newest.generation != self.generation:
            return  # its shards may be those of another world
        if self._sized_in != self.generation:
            self._sized_in, self._reported_bytes = self.generation, 0
        if held.size_bytes > self._reported_bytes:
            self._reported_bytes = held.size_bytes
            self._sentinel.send(messages.CommitSize(held.size_bytes, held.to_come()))

    def record_commit_time(self, seconds: float) -> None:
        self._sentinel.add_commit_time(seconds)

    def record_attached(self, digests: tuple[int, ...]) -> None:
        """Report that all workers have attached their shards, and sealed them as (generation, 0)."""
        self._sentinel.send(messages.Attached(self.view.generation, digests))

    def copy_reader(self) -> CopyReader:
        client = ReplicaClient(dict(self.view.copy_servers), self._key(), _SILENCE_S)
        watch = threading.Thread(target=self._close_at_end, args=(client, self.generation), daemon=True)
        watch.start()
        host = self.worker_key.rpartition("#")[0].rpartition(":")[0]
        return LocalReplicas(client, host, self._share)

    def _close_at_end(self, client: ReplicaClient, generation: int) -> None:
        """End the reads of a world that is over: a lost host is silent, and the next world has other copies."""
        while not client.closed.wait(_LOOK_INTERVAL_S):
            if self.has_ended(generation):
                client.close()

    def record_sync(self, size_bytes: int, seconds: float) -> None:
        self._sentinel.send(messages.Synced(self.view.generation, size_bytes, seconds))

    def process_group_for(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return a group of exactly these ranks, which include this one; None is the default group, for all ranks."""
        return None if len(ranks) == self.view.size else self.subgroup(tuple(sorted(ranks)))

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return a new group of these ranks, ascending, that nobody else uses."""
        group: dist.ProcessGroup = self._context.subgroup(ranks)
        return group


class LastWorldSession:
    """Session of a function that is called in the last world, after the exit gate. No other world follows.

    Args:
        of: the session of the last world.
        number: 1 for the first such function, 2 for the second, ... Commit ids count it as a generation of its own.
    """

    root = 0
    near: tuple[int, ...] = ()
    root_slot = 0
    one_copy = False
    follows: int | None = None
    line: CommitId | None = None
    sources: tuple[ShardSource, ...] = ()
    verify_sync = False
    records_ticks = False

    def __init__(self, of: WorkerSession, number: int) -> None:
        self._of = of
        self.generation = of.generation + number
        self.rank = of.rank
        self.size = of.size
        self.lacking = tuple(range(1, of.size))
        self.worker_key = of.worker_key
        self.ticks = 0
        self._restore_group: dist.ProcessGroup | None = None

    def check(self) -> None:
        self._of.check()

    def commit_id(self) -> CommitId:
        return CommitId(self.generation, self.ticks + 1)

    def has_ended(self, generation: int) -> bool:
        return self._of.has_ended(self._of.generation)

    def tick(self) -> None:
        self.ticks += 1

    def check_collectives(self) -> None:
        if self._of.has_failed_collective():
            raise CollectiveError(FAILED_COLLECTIVE)

    @property
    def has_peers(self) -> bool:
        return self.size > 1

    def restore_group(self) -> dist.ProcessGroup | None:
        if self.has_peers and self._restore_group is None:
            self._restore_group = self._of.subgroup(tuple(range(self.size)))
        return self._restore_group

    def progress(self) -> None:
        """Do nothing: the agent does not monitor a worker that has passed the exit gate."""

    def record_commits(self, held: HeldCommits) -> None:
        """Do nothing: these are no commits of the job."""

    def record_attached(self, digests: tuple[int, ...]) -> None:
        """Do nothing: no other world follows, so nobody reads the shards."""

    def copy_reader(self) -> CopyReader:
        raise AssertionError("no copies are read after the exit gate")

    def record_commit_time(self, seconds: float) -> None:
        """Do nothing: the job's account ends with the exit gate."""

    def record_sync(self, size_bytes: int, seconds: float) -> None:
        """Do nothing: the job's account ends with the exit gate."""

    def process_group_for(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        return self._of.process_group_for(ranks)
