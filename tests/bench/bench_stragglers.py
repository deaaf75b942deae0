"""Cost of the measure of waits, per tick: 50 all-reduces and the end of a tick, without the measure and with it.

Two processes take turns: one measures, and the other one does not. Each is a world of one, because the cost is the same
in each rank. Prints markdown. Exits with 1 if the measure costs more than 0.2 % of a step of 100 ms.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import socket
import sys
import time
from multiprocessing.connection import Connection
from statistics import median

import torch
import torch.distributed as dist

from elasticstate import _native

COLLECTIVES = 50  # per tick
STEP_S, GOAL_S = 0.1, 200e-6


def run(measures: bool, requests: Connection, ticks: int) -> None:
    """Run in each process: answer each request with the seconds of a tick."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page = _native.ControlPage(None)
    sentinel = _native.Sentinel(page, ours.detach())
    assert not measures or _native.measure_waits()
    sentinel.enter(1, _native.GlooSockets())
    tensor = torch.ones(256)
    while requests.recv():
        begun = time.perf_counter()
        for _ in range(ticks):
            for _ in range(COLLECTIVES):
                dist.all_reduce(tensor)
            sentinel.tick()
        requests.send((time.perf_counter() - begun) / ticks)
    assert bool(_native.waited_ns() and page.points(0)[0]) == measures
    theirs.close()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=101)
    parser.add_argument("--ticks", type=int, default=20)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for measures in (False, True):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=run, args=(measures, theirs, args.ticks)))
        processes[-1].start()
        ends.append(mine)
    pairs: list[tuple[float, float]] = []
    for _ in range(args.pairs + 1):  # the first one warms up
        found = []
        for end in ends:
            end.send(True)
            found.append(end.recv())
        pairs.append((found[0], found[1]))
    for end, process in zip(ends, processes, strict=True):
        end.send(False)
        process.join()
        assert process.exitcode == 0
    plain = median(without for without, _ in pairs[1:])
    measured = median(seconds for _, seconds in pairs[1:])
    ratio = median(seconds / without for without, seconds in pairs[1:])
    cost_s = (ratio - 1) * plain
    print(
        f"\n{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {COLLECTIVES} all-reduces a tick\n"
    )
    print("| tick without the measure | with it | ratio | cost | of a step of 100 ms |\n|---|---|---|---|---|")
    cells = f"{plain * 1e6:.0f} µs | {measured * 1e6:.0f} µs | {ratio:.3f} | {cost_s * 1e6:.1f} µs"
    print(f"| {cells} | {max(0.0, cost_s / STEP_S):.3%} |\n\nGoal: cost ≤ {GOAL_S * 1e6:.0f} µs.")
    return int(cost_s > GOAL_S)


if __name__ == "__main__":
    sys.exit(main())
