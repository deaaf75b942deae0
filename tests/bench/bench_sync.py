"""Cost of ``sync()`` to a newcomer, measured alternately with one raw Gloo broadcast of a flat tensor of the same size.

Two processes on this machine, Gloo over TCP. The state is a module and an SGD optimizer with momentum, half of the
bytes each. The newcomer already has both, as after a warm-up, so all memory has been touched. A round ends when the
newcomer's live tensors are equal to the root's (sync), or when its flat tensor is (broadcast); the two times are
compared.

Figures are medians over the rounds; ratios of the medians, and medians of the ratios of each round. Prints markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from elasticstate import TorchState
from elasticstate.core.ids import CommitId
from elasticstate.state.base import committer_of
from elasticstate.state.session import HeldCommits

MB = 1 << 20
GOAL = 0.8
TIMEOUT_S = 600.0


class Session:
    """Session of rank 0 (root) or rank 1 (newcomer). Each sync has a generation of its own."""

    records_ticks = compares_commits = awaits_verdicts = False
    has_peers = False
    ticks = 0

    def __init__(self, rank: int) -> None:
        self.view = SimpleNamespace(
            rank=rank,
            size=2,
            root=0,
            lacking=(1,),
            near=(),
            keepers=(),
            follows=None,
            line=None,
            options=SimpleNamespace(verify_sync=False),
        )
        self.worker_key = f"worker {rank}"
        self.generation = 1
        self.size_bytes = 0
        self.collectives = 0

    def commit_id(self) -> CommitId:
        return CommitId(self.generation, 1)

    def tick(self) -> None: ...
    def check_collectives(self) -> None: ...
    def progress(self) -> None: ...
    def has_ended(self, generation: int) -> bool:
        return False

    def record_commits(self, held: HeldCommits) -> None: ...

    def record_commit_time(self, seconds: float) -> None:
        pass

    def record_sync(self, size_bytes: int, seconds: float) -> None:
        self.size_bytes = size_bytes

    def restore_group(self) -> Any:
        return None

    def process_group_for(self, ranks: tuple[int, ...]) -> Any:
        assert ranks == (0, 1)
        return Counted(self)


class Counted:
    """Default group that counts its collectives."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self._session.collectives += 1
        assert dist.group.WORLD is not None
        return dist.group.WORLD.broadcast(tensors, options)


def state_of(rank: int, tensors: int, size_bytes: int) -> TorchState:
    elements = size_bytes // tensors // 4
    module = torch.nn.ParameterList(torch.full((elements,), float(rank + 1)) for _ in range(tensors // 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module:
        optimizer.state[parameter]["momentum_buffer"] = torch.full((elements,), float(rank))
    return TorchState(module=module, optimizer=optimizer)


def timed_sync(state: TorchState, session: Session) -> float:
    if session.view.rank == 1:
        for parameter in state.module:
            parameter.data.fill_(-1)
    session.generation += 1
    session.collectives = 0
    dist.barrier()
    started = time.perf_counter()
    state.sync()
    seconds = time.perf_counter() - started
    assert all(parameter[-1] == 1 for parameter in state.module), "all have the root's"
    return seconds


def timed_broadcast(flat: torch.Tensor, size_bytes: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    dist.broadcast(flat[:size_bytes], 0)
    return time.perf_counter() - started


def work(rank: int, args: argparse.Namespace) -> None:
    """Run one of the two processes. The newcomer prints the seconds of each round."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(args.folder / "store"), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
    session = Session(rank)
    state = state_of(rank, args.tensors, args.mb * MB)
    committer_of(state).use_session(session)
    if rank == 0:
        state.commit()
    timed_sync(state, session)
    timed_sync(state, session)  # touches both buffers
    flat = torch.full((session.size_bytes,), rank, dtype=torch.uint8)
    rounds = []
    for i in range(args.rounds):
        steps = [lambda: timed_sync(state, session), lambda: timed_broadcast(flat, session.size_bytes)]
        order = [0, 1] if i % 2 == 0 else [1, 0]
        seconds = {step: steps[step]() for step in order}
        rounds.append((seconds[0], seconds[1]))
    collectives = session.collectives
    few = state_of(rank, 10, args.mb * MB)
    committer_of(few).use_session(session)
    timed_sync(few, session)
    if rank == 1:
        result = {"rounds": rounds, "bytes": flat.numel(), "many": collectives, "few": session.collectives}
        print(json.dumps(result))
    dist.destroy_process_group()


def report(result: dict[str, Any], args: argparse.Namespace) -> None:
    syncs, broadcasts = zip(*result["rounds"], strict=True)
    size = result["bytes"]
    ratios = [broadcast / sync for sync, broadcast in result["rounds"]]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    print(f"{args.mb} MB in {args.tensors} tensors, {args.rounds} rounds; {machine}\n")
    print("| | median | GB/s |\n|---|---|---|")
    for name, seconds in (("sync", syncs), ("one raw broadcast", broadcasts)):
        print(f"| {name} | {median(seconds) * 1e3:.0f} ms | {size / median(seconds) / 1e9:.2f} |")
    print("\n| rate of sync / rate of the raw broadcast | | goal |\n|---|---|---|")
    print(f"| ratio of the medians | {median(broadcasts) / median(syncs):.2f} | {GOAL} |")
    print(f"| median of the ratios | {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {GOAL} |")
    print(f"\nCollectives: {result['many']} with {args.tensors} tensors, {result['few']} with 10.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args)
        return
    with tempfile.TemporaryDirectory(prefix="elasticstate-bench-") as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--rank"]
        root = subprocess.Popen([*command, "0"])
        try:
            newcomer = subprocess.run([*command, "1"], stdout=subprocess.PIPE, check=True, text=True, timeout=TIMEOUT_S)
            root.wait(TIMEOUT_S)
        finally:
            root.kill()
    report(json.loads(newcomer.stdout), args)


if __name__ == "__main__":
    main()
