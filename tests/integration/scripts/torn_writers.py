"""Writers that are killed in mid-commit, one after the other over the same files. Prints a line of JSON for each kill.

Run as ``python torn_writers.py FOLDER KILLS SEED``. This process imports torch once, and is the parent of every writer.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch

from elasticstate import TorchState, present_world
from elasticstate._native import ControlPage
from elasticstate.core.ids import CommitId
from elasticstate.state.base import committer_of
from elasticstate.state.session import HeldCommits
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.values import Values

OWNER = b"the torn commits"
SIZES = [1_000_000, 1, 30_000, 0, 300_000, *[1_000] * 100, 600_000]  # elements


class FileStorage:
    """Two buffers and a page in files, like those that an agent makes."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.owner = OWNER
        self.key = b"the key of the job"
        if not self.file("control").exists():
            self.file("control").write_bytes(bytes(4096))
            for index in (0, 1):
                self.file(f"{index}.safetensors").touch()
        with self.file("control").open("r+b") as file:
            self.page = ControlPage(file.fileno())

    def file(self, name: str) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.{name}")

    def renew(self) -> None:
        raise AssertionError("these files keep their names")

    def open(self, index: int) -> torch.Tensor:
        with self.file(f"{index}.safetensors").open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            return (
                torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8) if size else torch.empty(0).byte()
            )

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        with self.file(f"{index}.safetensors").open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        return self.open(index)


class Session:
    """A world of one, in generation 1."""

    generation = 1
    view = msgspec.structs.replace(present_world.alone(), generation=1)
    worker_key = "alone"
    records_ticks = False
    has_peers = False
    compares_commits = awaits_verdicts = False

    def __init__(self, ticks: int) -> None:
        self.ticks = ticks

    def commit_id(self) -> CommitId:
        return CommitId(1, self.ticks + 1)

    def has_ended(self, generation: int) -> bool:
        return False

    def tick(self) -> None:
        self.ticks += 1

    def check_collectives(self) -> None: ...
    def restore_group(self) -> None: ...
    def progress(self) -> None: ...
    def record_commit_time(self, seconds: float) -> None: ...
    def record_commits(self, held: HeldCommits) -> None: ...


def content(tick: int) -> Iterator[tuple[str, int, float]]:
    """Yield (name, elements, value) of each tensor at the end of a tick. Every five ticks their number changes."""
    for i, size in enumerate(SIZES):
        yield f"tensor {i}", size, float(tick * 1000 + i)
    for i in range(tick // 5 % 4):
        yield f"lazy {i}", 20_000 + 1_000 * (tick // 5), float(-tick)  # makes the buffers grow, too


def fill(state: TorchState, tick: int) -> None:
    """Give ``state`` the content of the end of ``tick``."""
    tensors = state.tensors
    wanted = {name: (size, value) for name, size, value in content(tick)}
    for name in tensors.keys() - wanted.keys():
        del tensors[name]
    for name, (size, value) in wanted.items():
        if name not in tensors or tensors[name].numel() != size:
            tensors[name] = torch.empty(size)
        tensors[name].fill_(value)
    state.note = f"tick {tick}"


def wrong(values: dict[str, object], tick: int) -> list[str]:
    """Return the names of values that differ from the content at the end of ``tick``."""
    wanted = {f"tensors.{name}": (size, value) for name, size, value in content(tick)}
    found = {name for name, value in values.items() if isinstance(value, torch.Tensor)}
    bad = sorted(found ^ wanted.keys())
    for name in found & wanted.keys():
        size, value = wanted[name]
        tensor = values[name]
        if tensor.shape != (size,) or not bool((tensor == value).all()):
            bad.append(name)
    return bad if values["note"] == f"tick {tick}" else [*bad, "note"]


class Marks:
    """Progress of a writer in memory shared with its parent: the ticks whose commit has begun and ended, and the time.

    Each word is written with a single store. (``struct.pack_into`` first clears all of them, and a kill may strike
    then.)
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)
        self._ticks = np.frombuffer(self._memory, dtype=np.uint64, count=2)
        self._at = np.frombuffer(self._memory, dtype=np.float64, count=1, offset=16)

    @property
    def begun(self) -> int:
        return int(self._ticks[0])

    @property
    def ended(self) -> int:
        return int(self._ticks[1])

    @property
    def at(self) -> float:
        """Time of the last call of begin() or end(), on the monotonic clock, in seconds."""
        return float(self._at[0])

    def start(self, ended: int) -> None:
        """Prepare for a new writer, which continues after tick ``ended``: no commit has begun."""
        self._ticks[0], self._ticks[1] = 0, ended

    def begin(self, tick: int) -> None:
        self._at[0] = time.monotonic()
        self._ticks[0] = tick

    def end(self, tick: int) -> None:
        self._at[0] = time.monotonic()
        self._ticks[1] = tick


class Stateful(dict):
    """Tensors by name. Some of them are added and removed."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self)

    def load_state_dict(self, values: dict[str, torch.Tensor]) -> None:
        self.clear()
        self.update(values)


def write(prefix: Path, marks: Marks) -> None:
    """Continue from the last commit, forever."""
    state = TorchState(tensors=Stateful(), note="")
    committer_of(state).use_storage(FileStorage(prefix))
    last = state.commits[0]
    if last is not None and not committer_of(state).resume():
        raise RuntimeError("what the parent has seen whole cannot be resumed from")
    committer_of(state).use_session(Session(last.tick if last is not None else 0))
    while True:
        tick = committer_of(state).session.ticks + 1
        fill(state, tick)
        marks.begin(tick)
        state.commit()
        marks.end(tick)


def fork(prefix: Path, marks: Marks) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            write(prefix, marks)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


def wait_for(pid: int, reached: Callable[[], bool]) -> None:
    """Wait until a writer has come so far."""
    while not reached():
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            raise RuntimeError("a writer has ended by itself")
        time.sleep(5e-5)  # leaves both cores to the writer


def begin_of(pid: int, marks: Marks, tick: int) -> float:
    """Wait until a writer has begun to commit ``tick``. Return the time at which it began."""
    wait_for(pid, lambda: marks.begun >= tick)
    return marks.at


def end_of(pid: int, marks: Marks, tick: int) -> float:
    """Wait until a writer has committed ``tick``. Return the time at which it ended."""
    wait_for(pid, lambda: marks.ended >= tick)
    return marks.at


def measure(prefix: Path, marks: Marks) -> float:
    """Return the duration of a commit in seconds."""
    pid = fork(prefix, marks)
    took = []
    for tick in range(1, 20):
        started = begin_of(pid, marks, tick)
        took.append(end_of(pid, marks, tick) - started)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return median(took[5:])


def main(folder: str, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a writer would copy the pages of all objects
    prefix = Path(folder) / "slot"
    marks = Marks()
    commit_s = measure(prefix, marks)
    rng = random.Random(seed)
    for _ in range(kills):
        newest = Snapshot(FileStorage(prefix)).newest
        first = newest.tick + 1 if newest is not None else 1
        marks.start(first - 1)
        pid = fork(prefix, marks)
        begun_at = begin_of(pid, marks, first + rng.randrange(3))
        until = begun_at + rng.random() * commit_s
        time.sleep(max(0.0, until - time.monotonic()))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        snapshot = Snapshot(FileStorage(prefix))
        held = {}
        for commit in (snapshot.newest, snapshot.previous):
            if commit is not None:
                buffer = snapshot.find(commit)
                assert buffer.is_intact(), commit
                held[commit.tick] = wrong(dict(Values(buffer.memory, buffer.frame, buffer.objects(), {})), commit.tick)
        line = {
            "first": first,
            "begun": marks.begun,
            "ended": marks.ended,
            "signal": os.WTERMSIG(status),
            "newest": snapshot.newest.tick if snapshot.newest is not None else None,
            "held": held,
            "commit_s": commit_s,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
