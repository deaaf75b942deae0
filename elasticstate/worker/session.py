"""WorkerSession: a state's view of the present generation of a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import torch.distributed as dist

from elasticstate import present_world
from elasticstate._native import ControlPage
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.core.types import DigestAnswer, World
from elasticstate.errors import CollectiveError
from elasticstate.net import messages
from elasticstate.replicas.client import ReplicaClient
from elasticstate.state.reshard import CopyReader
from elasticstate.state.session import FAILED_COLLECTIVE, HeldCommits, Session
from elasticstate.worker import user_metrics
from elasticstate.worker.contexts import Context
from elasticstate.worker.sentinel import Sentinel
from elasticstate.worker.storage import LocalReplicas

_LOOK_INTERVAL_S = 0.05
_VERDICT_INTERVAL_S = 0.0005
_VERDICT_TIMEOUTS = 2.0  # times --regroup-timeout: after one, the driver does not wait for members without commits
_PROGRESS_S = 1.0
_CUT = "the collectives of this world were cut, so this step was not trained on all ranks"
_SILENCE_S = 10.0  # of a copy server: then its copy counts as unreachable, and another one may serve


class WorkerSession(Session):
    """Session of a worker under ``elasticrun``."""

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
        super().__init__(present_world.alone(), worker_key)
        self._sentinel = sentinel
        self._page = page
        self._key = key
        self._share = share
        self._verdict = (0, 0, 0, 0)  # the newest one that was read, after its number
        self._given_up = (0, 0)  # generation and tick whose verdict has not come
        self._reported_bytes = self._sized_in = 0  # size of a commit of the world with this generation

    def enter(self, view: World, context: Context) -> None:
        """Use this world from now on."""
        self.view, self._context = view, context

    def leave(self) -> None:
        """Keep nothing of the present world that its context is about to destroy."""
        self._restore_group = None

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
        user_metrics.end_tick()
        self._sentinel.tick()

    def check_collectives(self) -> None:
        self._sentinel.check_ticks()
        if self._context.may_have_failed():
            is_told = self._context.raises_when_cut
            self._sentinel.refuse(is_told)
            raise CollectiveError(FAILED_COLLECTIVE if is_told else self._sentinel.cause or _CUT)

    def has_failed_collective(self) -> bool:
        """Return True if a collective has failed in this process, also after the last tick of the generation."""
        return self._context.has_failed()

    @property
    def has_peers(self) -> bool:
        return self.view.size > 1 and self._sentinel.is_in_generation

    @property
    def compares_commits(self) -> bool:
        return self.view.options.compares_commits and self.view.size > 1

    @property
    def awaits_verdicts(self) -> bool:
        return self.view.options.awaits_verdicts and self.view.size > 1

    def wait_for_verdict(self, tick: int, meanwhile: Callable[[], object]) -> tuple[int, int] | None:
        began_at = reported_at = time.monotonic()
        limit_s = _VERDICT_TIMEOUTS * self.view.options.regroup_timeout_s
        while (verdict := self.verdict())[1] < tick:
            self.check()
            now = time.monotonic()
            if self._page.is_alone or now > began_at + limit_s or self._given_up == (self.generation, tick):
                self._given_up = self.generation, tick
                return None
            if now > reported_at + _PROGRESS_S:
                reported_at = now
                self.progress()
            meanwhile()
            time.sleep(_VERDICT_INTERVAL_S)
        return verdict

    def wait_for_driver(self) -> None:
        while self._page.is_alone:
            self.check()
            self.progress()
            time.sleep(_LOOK_INTERVAL_S)
        self._given_up = 0, 0

    def verdict(self) -> tuple[int, int]:
        found = self._page.verdict(self._verdict[0])
        self._verdict = found or self._verdict
        _, generation, equal, compared = self._verdict
        return (equal, compared) if generation == self.generation else (0, 0)

    def restore_group(self) -> dist.ProcessGroup | None:
        return super().restore_group() if self.has_peers and self._sentinel.trains else None

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

    def record_digest(self, start: int, tick: int, digest: int) -> None:
        digests = ((start, tick, digest),)
        self._sentinel.send(messages.CommitDigests(self.view.generation, digests, self.awaits_verdicts))

    def question(self, last: int) -> tuple[int, int, int, int] | None:
        return self._page.question(last)

    def answer(self, answer: DigestAnswer) -> None:
        self._sentinel.send(answer)

    def record_attached(self, digests: tuple[int, ...]) -> None:
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

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._context.subgroup(ranks)
        return group


class LastWorldSession(Session):
    """Session of a function that is called in the last world, after the exit gate: the job's account is closed.

    ``of``: the session of the last world. ``number``: 1 for the first such function, 2 for the second, ...
    """

    def __init__(self, of: WorkerSession, number: int) -> None:
        view = present_world.fixed(of.view.placement, of.view.size, of.view.store)
        super().__init__(msgspec.structs.replace(view, generation=of.generation + number), of.worker_key)
        self._of = of

    def check(self) -> None:
        self._of.check()

    def has_ended(self, generation: int) -> bool:
        return self._of.has_ended(self._of.generation)

    def check_collectives(self) -> None:
        if self._of.has_failed_collective():
            raise CollectiveError(FAILED_COLLECTIVE)

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return self._of.subgroup(ranks)
