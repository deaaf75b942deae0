"""WorkerSession: a state's view of the present generation of a worker."""

from __future__ import annotations

import torch.distributed as dist

from elasticstate import present_world
from elasticstate._native import ControlPage
from elasticstate.core.types import CommitId
from elasticstate.net import messages
from elasticstate.worker.contexts.context import Context
from elasticstate.worker.sentinel import Sentinel


class WorkerSession:
    """Session of a worker under ``elasticrun`` (see state.session.Session)."""

    _context: Context  # context of the present generation

    def __init__(self, sentinel: Sentinel, page: ControlPage, worker_key: str) -> None:
        self._sentinel = sentinel
        self._page = page
        self._reported_bytes = 0
        self.worker_key = worker_key
        self.view: present_world.WorldView = present_world.alone()

    def enter(self, view: present_world.WorldView, context: Context) -> None:
        """Use this world from now on."""
        self.view, self._context = view, context

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

    @property
    def verify_sync(self) -> bool:
        return self.view.verify_sync

    @property
    def records_ticks(self) -> bool:
        return self.view.records_ticks and self.view.size > 1

    def progress(self) -> None:
        self._page.progress()

    def record_commits(self, newest: CommitId | None, previous: CommitId | None, size_bytes: int) -> None:
        self._sentinel.record_commits(newest, previous)
        if size_bytes > self._reported_bytes:
            self._reported_bytes = size_bytes
            self._sentinel.send(messages.CommitSize(size_bytes))

    def record_sync(self, size_bytes: int, seconds: float) -> None:
        self._sentinel.send(messages.Synced(self.view.generation, size_bytes, seconds))

    def process_group_for(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return a group of exactly these ranks, which include this one; None is the default group, for all ranks."""
        if len(ranks) == self.view.size:
            return None
        group: dist.ProcessGroup = self._context.subgroup(tuple(sorted(ranks)))
        return group
