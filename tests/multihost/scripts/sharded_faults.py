"""The script sharded.py with faults at named points: ``--faults-file`` and the options of sharded.py.

The faults are data, as in tests/integration/scripts/faults.py. The points::

    commit-bytes    half of a commit's bytes are in their buffer
    seal            rank 0 has sealed a commit, and this rank has not
    reshard         this worker has read a part of another worker's copy
    damage          a bit of the newest sealed commit was flipped in the memory of this worker

While the file ``<log>/pause`` exists, no step begins.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "integration" / "scripts"))

import torch
import torch.distributed as dist
from faults import Fault, Faults

import elasticstate as elastic
from elasticstate.core.ids import CommitId
from elasticstate.core.types import CopyOf
from elasticstate.replicas.client import ReplicaClient
from elasticstate.state import snapshot
from elasticstate.state.base import committer_of
from elasticstate.state.snapshot import Buffer

LONGEST_S = 30.0  # for another rank to seal


def armed(point: str) -> Fault | None:
    """Return the fault that strikes this worker now, after it has been recorded."""
    return faults.taken(point, rank=elastic.rank())


def others_sealed(commit: CommitId) -> bool:
    return (logs / f"sealed-0-{commit.generation}-{commit.tick}").exists()


gathers = {name: getattr(snapshot, name) for name in ("gather", "gather_each")}
write_seal, read_into = Buffer.write_seal, ReplicaClient.read_into
commit_of = elastic.TorchState.commit


def half_of_gather(name: str, memory: Any, pieces: Any, start: int, length: int, *rest: Any) -> int:
    fault = armed("commit-bytes")
    before = memory.clone() if fault is not None else None
    result: int = gathers[name](memory, pieces, start, length, *rest)
    if fault is not None and before is not None:
        half = length // 2
        memory[half:length] = before[half:length]
        faults.fire(fault)
    return result


def seal_after_rank_0(buffer: Buffer, commit: CommitId, found: int) -> None:
    if commit.tick and (fault := armed("seal")) is not None:
        deadline = time.monotonic() + LONGEST_S
        while not others_sealed(commit):
            assert time.monotonic() < deadline, "rank 0 has not sealed"
            time.sleep(0.001)
        (logs / f"struck-seal-{commit.generation}-{commit.tick}").touch()
        faults.fire(fault)
    write_seal(buffer, commit, found)
    if elastic.rank() == 0 and commit.tick:
        (logs / f"sealed-0-{commit.generation}-{commit.tick}").touch()


def read_and_die(client: ReplicaClient, copy: CopyOf, ranges: Any) -> None:
    read_into(client, copy, ranges)
    host, slot, _ = os.environ["ELASTICSTATE_WORKER"].rsplit(":", 2)
    if copy.slot != (host, int(slot)) and (fault := armed("reshard")) is not None:
        faults.fire(fault)


def all_see(path: Path) -> bool:
    seen = torch.tensor(float(path.exists()))
    dist.all_reduce(seen, op=dist.ReduceOp.MIN)
    return bool(seen.item())


def commit_and_pause(state: elastic.TorchState) -> None:
    commit_of(state)
    if (fault := armed("damage")) is not None:
        newest = committer_of(state).snapshot._newer
        newest.memory[newest.length // 2] ^= 1
        (logs / f"struck-damage-{newest.commit.generation}-{newest.commit.tick}").touch()
        faults.fire(fault)
    if all_see(logs / "pause"):  # else others wait in the next step for a rank that has paused
        line = {"what": "paused", "time": time.time(), "rank": elastic.rank(), "step": state.step}
        with open(logs / f"paused-{os.getpid()}.jsonl", "a") as file:
            print(json.dumps(line), file=file)
        while (logs / "pause").exists():
            time.sleep(0.005)


at = sys.argv.index("--faults-file")
faults_file = Path(sys.argv[at + 1])
del sys.argv[at : at + 2]
logs = Path(sys.argv[sys.argv.index("--log") + 1])
faults = Faults([], logs, faults_file)
for name in gathers:
    setattr(snapshot, name, functools.partial(half_of_gather, name))
Buffer.write_seal = seal_after_rank_0  # type: ignore[method-assign]
ReplicaClient.read_into = read_and_die  # type: ignore[method-assign]
elastic.TorchState.commit = commit_and_pause  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).parent / "sharded.py"), run_name="__main__")
