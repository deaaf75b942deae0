"""Worlds with attached values: workers that fork from a server, with real Gloo groups and files as buffers."""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import logging
import math
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from elasticstate.commits import Shard as Place, Sharding
from elasticstate.compat.dtensors import Split
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.core.types import CopyOf, ShardSource
from elasticstate.errors import CopyError
from elasticstate.state.peer import SealReader
from elasticstate.state.reshard import Piece, chunk_of
from elasticstate.state.snapshot import Snapshot
from tests.kit.state import FileStorage, Member, World

TIMEOUT_S = 120.0

torch.compiler.disable(lambda: None)  # imports the compiler here: else each worker does, for its first optimizer


def storage_of(folder: Path, slot: int) -> FileStorage:
    """Return the commit storage of a slot. Its content outlives its workers."""
    place = folder / f"slot {slot}"
    place.mkdir(parents=True, exist_ok=True)
    return FileStorage(place)


class SnapshotCopies:
    """Copy reader over the commits of slots. It counts what is read."""

    def __init__(self, snapshot_of: Callable[[int], Snapshot]) -> None:
        self._snapshot_of = snapshot_of
        self.bytes_read = 0
        self.headers_read = 0
        self.closed = 0
        self.broken: set[int] = set()  # slots whose hosts do not answer
        self.breaks_after: dict[int, int] = {}  # by slot: number of reads after which its host does not answer

    def _content(self, copy: CopyOf) -> tuple[torch.Tensor, Any]:
        slot = copy.slot.slot
        left = self.breaks_after[slot] = self.breaks_after.get(slot, 1 << 62) - 1
        if slot in self.broken or left < 0:
            raise CopyError("the host does not answer")
        snapshot = self._snapshot_of(slot)
        for buffer in (snapshot._newer, snapshot._older):
            if buffer.commit == copy.commit:
                return buffer.memory, buffer
        raise CopyError(f"the slot holds {snapshot.newest} and {snapshot.previous}")

    def header(self, copy: CopyOf) -> bytes:
        memory, buffer = self._content(copy)
        if not buffer.is_intact():
            raise CopyError("the checksum is wrong")
        self.headers_read += 1
        return memory[: buffer.frame.random].numpy().tobytes()

    def length(self, copy: CopyOf) -> int:
        return int(self._content(copy)[1].length)

    def read(self, copy: CopyOf, offset: int, length: int) -> bytes:
        return self._content(copy)[0][offset : offset + length].numpy().tobytes()

    def read_into(self, copy: CopyOf, ranges: Sequence[tuple[int, memoryview]]) -> None:
        memory, buffer = self._content(copy)
        content = memory.numpy().data
        for offset, place in ranges:
            assert offset + len(place) <= buffer.length
            place[:] = content[offset : offset + len(place)]
            self.bytes_read += len(place)

    def close(self) -> None:
        self.closed += 1


class FileCopies(SnapshotCopies):
    """Copy reader over the buffers of slots in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(functools.partial(_read_only, folder))


def _read_only(folder: Path, slot: int) -> Snapshot:
    """Return the commits of a slot. Its owner may write the older buffer meanwhile, which must not unseal anything."""
    storage: Any = storage_of(folder, slot)
    storage.page = SealReader(storage.page)
    return Snapshot(storage)


def source(digest: int, slot: int, commit: CommitId) -> ShardSource:
    return ShardSource(digest, CopyOf(f"host{slot}", SlotId(f"host{slot}", slot), commit))


class GroupMember(Member):
    """Member of a world whose groups are torch's own."""

    def process_group_for(self, ranks: tuple[int, ...]) -> Any:
        return dist.new_group(ranks, use_local_synchronization=True) if len(ranks) < self.world.size else None


def keepers(value: object) -> list[str]:
    """Return frames, generators and exceptions that keep a value alive; its other referrers if there are none."""
    found: list[str] = []
    seen: dict[int, object] = {}
    near = list(map(str, map(type, gc.get_referrers(value))))
    left = [value]
    while left and len(seen) < 5000:
        one = left.pop(0)
        seen[id(one)] = one
        for referrer in gc.get_referrers(one):
            if isinstance(referrer, types.FrameType | types.GeneratorType | types.TracebackType | BaseException):
                found.append(f"{type(one).__name__} <- {referrer!r}")
            if (
                referrer is not left
                and referrer is not seen
                and id(referrer) not in seen
                and not isinstance(referrer, types.FrameType)
            ):
                left.append(referrer)
    return found or near


Train = Callable[[GroupMember, FileStorage], Any]


OFTEN_IMPORTED = (
    *("torch._dynamo.backends.debugging", "torch._dynamo.repro.after_dynamo", "torch._dynamo.testing"),
    *("torch._inductor.compile_fx", "torch.distributed._tools", "torch.distributed.fsdp"),
    "torch.distributed.tensor.debug",
)
"""Modules that each worker would import for itself."""


class WorldServer:
    """Process that has imported torch, and has no other thread: the workers of worlds fork from it.

    A fork of a process that has trained may hang, because the threads of torch do not exist in it. Use it as a context
    manager.
    """

    def __enter__(self) -> WorldServer:
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        self._process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def in_world(self, *world: Any) -> list[Any]:
        """Run one world: see ``in_world``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        cloudpickle.dump(world, self._process.stdin)
        self._process.stdin.flush()
        error, answers = pickle.load(self._process.stdout)
        assert not error, error
        found: list[Any] = answers
        return found


def serve() -> None:
    """Run worlds until the standard input ends."""
    for name in OFTEN_IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a worker would copy the pages of all objects
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what workers print
    while True:
        try:
            world = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = "", in_world(*world)
        except Exception:
            answer = traceback.format_exc(), []
        pickle.dump(answer, answers)
        answers.flush()


def in_world(
    folder: Path,
    size: int,
    generation: int,
    train: Train,
    line: CommitId | None = None,
    digests: Sequence[int] = (),
) -> list[Any]:
    """Run one world of forked workers, and return what ``train`` returns on each rank.

    ``line``, ``digests``: commit from which the world starts, and the digests of the slots 0, 1, ... that hold it.
    """
    store = folder / f"store {generation}"
    sources = tuple(source(digest, slot, line) for slot, digest in enumerate(digests) if line is not None)
    workers = []
    for rank in range(size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            world = World(size, generation, lacking=() if line else tuple(range(1, size)), line=line, sources=sources)
            world.reader = FileCopies(folder)
            _run(write, store, GroupMember(world, rank), folder, train)
        os.close(write)
        workers.append((pid, read))
    return _results(workers)


def _run(write: int, store: Path, member: GroupMember, folder: Path, train: Train) -> None:
    """Train in this forked process, and end it."""
    sys.unraisablehook = sys.__unraisablehook__  # that of pytest keeps exceptions, with all objects of their frames
    logging.disable()  # the same for the exceptions in records of logs
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), member.world.size),
            rank=member.rank,
            world_size=member.world.size,
            timeout=timedelta(seconds=60),
        )
        answer: tuple[bool, Any] = True, train(member, storage_of(folder, member.rank))
        dist.destroy_process_group()
    except BaseException:
        answer = False, traceback.format_exc()
    with os.fdopen(write, "wb") as pipe:
        pickle.dump(answer, pipe)
    os._exit(0)


def _results(workers: Sequence[tuple[int, int]]) -> list[Any]:
    deadline = time.monotonic() + TIMEOUT_S
    found: dict[int, bytes] = {read: b"" for _, read in workers}
    open_pipes = set(found)
    try:
        while open_pipes:
            ready, _, _ = select.select(list(open_pipes), [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{len(open_pipes)} workers have not returned after {TIMEOUT_S} s"
            for read in ready:
                part = os.read(read, 1 << 20)
                found[read] += part
                if not part:
                    open_pipes.discard(read)
    finally:
        for pid, read in workers:
            os.close(read)
            if open_pipes:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    answers = [pickle.loads(content) for content in found.values()]
    errors = [text for is_good, text in answers if not is_good]
    assert not errors, "\n".join(errors)
    return [value for _, value in answers]


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.float64)
COMMIT = CommitId(1, 1)


@dataclass(frozen=True)
class Mesh:
    """A mesh, and the placements of each tensor on it."""

    shape: tuple[int, ...]
    splits: dict[str, tuple[Split, ...]]

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.shape))


def whole_tensors(draw: random.Random) -> dict[str, torch.Tensor]:
    found = {}
    for i in range(draw.randint(1, 5)):
        shape = [draw.choice((0, 1, 2, 3, 5, 7, 8)) for _ in range(draw.randint(0, 4))]
        content = torch.randint(0, 256, (math.prod(shape) * 8,), dtype=torch.uint8)
        dtype = draw.choice(DTYPES)
        values = content[: math.prod(shape) * dtype.itemsize]
        values = values % 2 if dtype is torch.bool else values
        found[f"model.{i}"] = values.view(dtype).view(shape)
    return found


def mesh(draw: random.Random, tensors: dict[str, torch.Tensor]) -> Mesh:
    shape = tuple(draw.choice(((1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 3), (1, 4), (2, 2, 2))))

    def split(tensor: torch.Tensor) -> Split:
        return (draw.randrange(tensor.ndim), 0) if tensor.ndim and draw.random() < 0.7 else None

    splits = {}
    for name, tensor in tensors.items():
        chosen = [split(tensor) for _ in shape]
        if len(shape) == 2 and chosen[0] is not None and chosen[1] is not None and chosen[0][0] == chosen[1][0]:
            chosen[0] = draw.choice((chosen[0], (chosen[0][0], shape[1])))  # FSDP2 after tensor parallelism
        splits[name] = tuple(chosen)
    return Mesh(shape, splits)


def local(tensors: dict[str, torch.Tensor], mesh: Mesh, coordinate: tuple[int, ...]) -> dict[str, Piece]:
    found = {}
    for name, tensor in tensors.items():
        offsets, sizes = chunk_of(tuple(tensor.shape), mesh.shape, coordinate, mesh.splits[name])
        part = tensor[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
        found[name] = Piece(part.clone(memory_format=torch.contiguous_format), Place(tuple(tensor.shape), offsets))
    return found


def committed(pieces: dict[str, Piece]) -> Snapshot:
    snapshot = Snapshot()
    sharding = Sharding(("model",), {name: piece.shard for name, piece in pieces.items()})
    captured = {**{name: piece.local for name, piece in pieces.items()}, "model": "a tree", "plain": torch.ones(3)}
    snapshot.begin(captured, b"random", COMMIT, sharding=sharding)
    snapshot.finish()
    return snapshot
