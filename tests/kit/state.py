"""States without a job: worlds whose members are threads, commit storage in files, and a simulated device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from elasticstate.core.ids import CommitId
from elasticstate.core.types import DigestAnswer, ShardSource
from elasticstate.errors import CollectiveError, CommitStorageError, HostsUpdatedInterrupt, StateError
from elasticstate.state.base import committer_of
from elasticstate.state.reshard import CopyReader
from elasticstate.state.session import HeldCommits
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.torch import TorchState
from elasticstate.state.values import Values
from tests.integration.scripts.slow_device import SlowDevice
from tests.kit.pages import page_at

CommitStorage = Callable[..., Any]


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


class OneClock(torch.optim.Optimizer):
    """All parameters share one tensor that counts the steps, which each of them advances."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                clock = next((entry["clock"] for entry in self.state.values()), torch.zeros(()))
                self.state[p].setdefault("clock", clock).add_(1)
                p.sub_(self.state[p]["clock"])


def contents(state: TorchState) -> str:
    """Return all tensors by name, to the last digit, and the note."""
    values = {k: v.tolist() for k, v in state.capture().items() if isinstance(v, torch.Tensor | np.ndarray)}
    return repr([sorted(values.items()), state.note])


class Job:
    """A worker alone in a world, with tensors on a simulated device."""

    def __init__(self, device: SlowDevice, storage: Any, session: Any, **more: Any) -> None:
        torch.manual_seed(0)
        model, optimizer = parts()
        self.state = TorchState(model=model, optimizer=optimizer, **more, note=[0])
        self.device, self.session = device, session
        committer_of(self.state).snapshot = Snapshot(storage, lambda _: device)
        committer_of(self.state).use_session(session)
        self.was: dict[CommitId, str] = {}  # content at the time of each commit

    def train(self) -> None:
        self.forward().backward()
        self.state.optimizer.step()
        self.state.note = [self.state.note[0] + 1]

    def forward(self) -> torch.Tensor:
        self.state.optimizer.zero_grad()
        inputs = torch.linspace(-1, 1, 32).view(8, 4) * (self.state.note[0] + 1)
        loss: torch.Tensor = self.state.model(inputs).square().mean()
        return loss

    def commit(self) -> CommitId:
        commit = CommitId(self.session.generation, self.session.ticks + 1)
        self.was[commit] = contents(self.state)
        self.state.commit()
        return commit

    def restored(self) -> CommitId:
        """Restore, and check the content. Return the id of the restored commit."""
        self.state.restore()
        newest = self.state.commits[0]
        assert newest is not None
        assert contents(self.state) == self.was[newest]
        return newest


def note_of(content: str) -> list[int]:
    """Return ``note``, the last value of the content."""
    return [int(content[content.rindex("[") + 1 : content.index("]", content.rindex("["))])]


def found(file_storage: CommitStorage) -> tuple[CommitId | None, CommitId | None]:
    """Return the commits that a new worker would hold if this one died now."""
    snapshot = Snapshot(file_storage())
    return snapshot.newest, snapshot.previous


def read_commit(snapshot: Snapshot, commit: CommitId | None) -> Values:
    """Return the values of a commit, as views of its buffer. Raises StateError if it is not held, or is damaged."""
    assert commit is not None
    snapshot.settle()
    buffer = snapshot.find(commit)
    if not buffer.is_intact():
        raise StateError(f"Commit {commit} is damaged.")
    return Values(buffer.memory, buffer.frame, buffer.objects(), {})


@dataclass
class World:
    """A generation whose members are threads, with real Gloo groups between them."""

    size: int
    generation: int = 1
    root: int = 0
    lacking: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    root_slot: int = 0
    one_copy: bool = False
    line: CommitId | None = None
    start: CommitId | None = None
    sources: tuple[ShardSource, ...] = ()
    reader: CopyReader | None = None
    store: dist.HashStore = field(default_factory=dist.HashStore)


@dataclass
class Member:
    """Session of one member. It counts the calls of the state."""

    world: World
    rank: int = 0
    ticks: int = 0
    end_at: int | None = None
    commits: list[tuple[CommitId | None, CommitId | None]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)  # number of bytes of each
    verify_sync: bool = False
    follows: int | None = None
    records_ticks: bool = False
    signs: int = 0
    is_over: bool = False
    has_peers: bool = False
    has_failed_collective: bool = False
    attached: list[int] = field(default_factory=list)  # digests
    compares_commits: bool = True
    awaits_verdicts: bool = False
    verdicts: list[tuple[int, int] | None] = field(default_factory=list)  # one for each wait; then the last one again
    waits: list[int] = field(default_factory=list)  # the ticks whose verdicts were awaited
    digests: list[tuple[int, int, int]] = field(default_factory=list)
    questions: list[tuple[int, int, int]] = field(default_factory=list)
    answers: list[DigestAnswer] = field(default_factory=list)

    def record_digest(self, start: int, tick: int, digest: int) -> None:
        self.digests.append((start, tick, digest))

    def wait_for_verdict(self, tick: int, meanwhile: Callable[[], object]) -> tuple[int, int] | None:
        self.waits.append(tick)
        return self.verdicts.pop(0) if len(self.verdicts) > 1 else self.verdicts[0]

    def wait_for_driver(self) -> None:
        self.waits.append(-1)

    def verdict(self) -> tuple[int, int]:
        return (self.verdicts[0] if self.verdicts else None) or (0, 0)

    def question(self, last: int) -> tuple[int, int, int, int] | None:
        return (len(self.questions), *self.questions[-1]) if len(self.questions) > last else None

    def answer(self, answer: DigestAnswer) -> None:
        self.answers.append(answer)

    @property
    def generation(self) -> int:
        return self.world.generation

    @property
    def view(self) -> Any:
        """The world as this member has received it."""
        return SimpleNamespace(
            generation=self.generation,
            rank=self.rank,
            size=self.world.size,
            root=self.world.root,
            root_slot=self.world.root_slot,
            lacking=self.world.lacking,
            near=self.world.near,
            keepers=(0,) if self.world.one_copy else (),
            follows=self.follows,
            line=self.world.line,
            sources=self.world.sources,
            start=self.world.start,
            options=SimpleNamespace(verify_sync=self.verify_sync),
        )

    def copy_reader(self) -> CopyReader:
        assert self.world.reader is not None
        return self.world.reader

    def record_attached(self, digests: tuple[int, ...]) -> None:
        self.attached.append(digests)

    def check(self) -> None:
        if self.is_over:
            raise CollectiveError("the generation is over")

    def check_collectives(self) -> None:
        if self.has_failed_collective:
            raise CollectiveError("a collective has failed")

    @property
    def worker_key(self) -> str:
        return f"host{self.rank}:{self.rank}#1"

    def commit_id(self) -> CommitId:
        return CommitId(self.generation, self.ticks + 1)

    def has_ended(self, generation: int) -> bool:
        return self.is_over

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == self.end_at:
            raise HostsUpdatedInterrupt("a host has come")

    def progress(self) -> None:
        self.signs += 1

    def record_commits(self, held: HeldCommits) -> None:
        assert (held.size_bytes > 0) == (held.newest is not None)
        self.commits.append((held.newest, held.previous))

    def record_commit_time(self, seconds: float) -> None:
        pass

    def record_sync(self, size_bytes: int, seconds: float) -> None:
        assert seconds >= 0
        self.sent.append(size_bytes)

    def restore_group(self) -> Any:
        return None

    def process_group_for(self, ranks: tuple[int, ...]) -> Any:
        name = f"generation {self.generation}, group {ranks}, number {self.groups.count(ranks)}"
        self.groups.append(ranks)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=10)
        store = dist.PrefixStore(name, self.world.store)
        return Counted(dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), options), self.collectives)


class FileStorage:
    """Buffers and page in files, like those that an agent makes. Their content outlives the snapshot."""

    def __init__(self, folder: Path, owner: bytes = b"job, host, slot.", limit_bytes: int = 1 << 40) -> None:
        self.owner = owner
        self.key = b"the key of the job"
        self.limit_bytes = limit_bytes
        self.control = folder / "slot.control"
        self.files = [folder / f"slot.{index}.safetensors" for index in (0, 1)]
        for file in (self.control, *self.files):
            file.touch()
        os.truncate(self.control, 4096)
        self.page = page_at(self.control)

    def renew(self) -> None:
        raise AssertionError("these files keep their names")

    def open(self, index: int) -> torch.Tensor:
        size = self.files[index].stat().st_size
        return torch.from_file(str(self.files[index]), shared=True, size=size, dtype=torch.uint8)

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        if size_bytes > self.limit_bytes:
            raise CommitStorageError(f"{size_bytes} bytes needed, {self.limit_bytes} free")
        os.truncate(self.files[index], size_bytes)
        return self.open(index)


class Counted:
    """Process group that counts its collectives. It has only the methods that the state needs.

    The members begin one after the other: torch's flight recorder (2.11) enters a new group into a map without a lock.
    """

    _begins = threading.Lock()

    def __init__(self, group: Any, collectives: list[int]) -> None:
        self._group = group
        self._collectives = collectives

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self._collectives.append(sum(tensor.nbytes for tensor in tensors))
        with self._begins:
            return self._group.broadcast(tensors, options)

    def allgather(self, rows: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> Any:
        self._collectives.append(sum(tensor.nbytes for tensor in tensors))
        with self._begins:
            return self._group.allgather(rows, tensors)

    def size(self) -> int:
        return int(self._group.size())


def in_threads(*functions: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Run all functions at once. Raises the first error of any of them."""
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
