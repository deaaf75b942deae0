"""What a state sees of the present generation of a worker."""

from __future__ import annotations

import torch.distributed as dist

from elasticstate._native import ControlPage
from elasticstate.core.types import CommitId
from elasticstate.net import messages
from elasticstate.state.base import State
from elasticstate.worker import world
from elasticstate.worker.contexts.context import Context
from elasticstate.worker.sentinel import Sentinel


class WorkerSession:
    """What the state sees of the present generation (see state.base.Session)."""

    _context: Context  # of the present generation

    def __init__(self, sentinel: Sentinel, page: ControlPage, worker_key: str) -> None:
        self._sentinel = sentinel
        self._page = page
        self._told_bytes = 0
        self.worker_key = worker_key
        self.view: world.WorldView = world.alone()
        self.state: State | None = None

    def enter(self, view: world.WorldView, context: Context) -> None:
        """Live in this world from now on."""
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
    def ticks(self) -> int:
        return self._sentinel.ticks

    def commit_id(self) -> CommitId:
        self._sentinel.may_commit()
        return CommitId(self.view.generation, self._sentinel.ticks + 1)

    def tick(self) -> None:
        self._sentinel.tick()

    @property
    def verify_sync(self) -> bool:
        return self.view.verify_sync

    def progress(self) -> None:
        self._page.progress()

    def sealed(self, commit: CommitId | None, previous: CommitId | None) -> None:
        self._sentinel.sealed(commit, previous)
        if self.state is not None and self.state.commit_bytes > self._told_bytes:
            self._told_bytes = self.state.commit_bytes
            self._sentinel.say(messages.CommitSize(self._told_bytes))

    def synced(self, bytes: int, seconds: float) -> None:
        self._sentinel.say(messages.Synced(self.view.generation, bytes, seconds))

    def process_group_for(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """A group of exactly these ranks, which includes this one; None is the default group: all ranks."""
        if len(ranks) == self.view.size:
            return None
        group: dist.ProcessGroup = self._context.subgroup(tuple(sorted(ranks)))
        return group
