from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticstate.core.types import CommitId
from elasticstate.errors import HostsUpdatedInterrupt


@dataclass
class World:
    """A generation whose members are threads, with real Gloo groups between them."""

    size: int
    generation: int = 1
    root: int = 0
    lacking: tuple[int, ...] = ()
    store: dist.HashStore = field(default_factory=dist.HashStore)


@dataclass
class Member:
    """The session of one member. Counts what is asked of it."""

    world: World
    rank: int = 0
    ticks: int = 0
    end_at: int | None = None
    commits: list[tuple[CommitId | None, CommitId | None]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)  # bytes of each

    @property
    def generation(self) -> int:
        return self.world.generation

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def root(self) -> int:
        return self.world.root

    @property
    def lacking(self) -> tuple[int, ...]:
        return self.world.lacking

    @property
    def worker_key(self) -> str:
        return f"host:{self.rank}#1"

    def commit_id(self) -> CommitId:
        return CommitId(self.generation, self.ticks + 1)

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == self.end_at:
            raise HostsUpdatedInterrupt("a host has come")

    def sealed(self, commit: CommitId | None, previous: CommitId | None) -> None:
        self.commits.append((commit, previous))

    def synced(self, size_bytes: int, seconds: float) -> None:
        assert seconds >= 0
        self.sent.append(size_bytes)

    def process_group_for(self, ranks: tuple[int, ...]) -> Any:
        self.groups.append(ranks)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=10)
        store = dist.PrefixStore(f"generation {self.generation}", self.world.store)
        return Counted(dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), options), self.collectives)


class Counted:
    """A process group that counts its broadcasts; anything else is not there."""

    def __init__(self, group: Any, collectives: list[int]) -> None:
        self._group = group
        self._collectives = collectives

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self._collectives.append(sum(tensor.nbytes for tensor in tensors))
        return self._group.broadcast(tensors, options)


def in_threads(*functions: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Run all at once; the first error of any is raised here."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    stuck = [i for i, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"members {stuck} have not come back after {timeout_s} s"


@pytest.fixture
def world() -> type[World]:
    return World


@pytest.fixture
def member() -> type[Member]:
    return Member


@pytest.fixture
def together() -> Callable[..., None]:
    return in_threads
