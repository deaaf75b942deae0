"""Cost of what is measured and recorded in each tick: 50 all-reduces and the end of a tick, with and without.

Three processes take turns: one measures nothing, one measures its waits (for stragglers), and one records its
collectives (for hangs, with ``--hang-timeout``). Each is a world of one, because the cost is the same in each rank.
All run on one core, and times are CPU times: otherwise load on the machine, and the choice of the cores, changes more
than is measured. Prints markdown. Exits with 1 if one of the two costs more than 0.2 % of a step of 100 ms.
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
from elasticstate.agent.workers import FLIGHT_RECORDER
from elasticstate.compat.process_groups import last_collectives

COLLECTIVES = 50  # per tick
STEP_S, GOAL_S = 0.1, 200e-6
KINDS = ("nothing", "waits", "collectives")


def run(kind: str, requests: Connection, ticks: int) -> None:
    """Run in each process: answer each request with the seconds of a tick."""
    os.environ.update(FLIGHT_RECORDER if kind == "collectives" else dict.fromkeys(FLIGHT_RECORDER, "0"))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page = _native.ControlPage(None)
    sentinel = _native.Sentinel(page, ours.detach())
    assert kind != "waits" or _native.measure_waits()
    sentinel.enter(1, _native.GlooSockets())
    tensor = torch.ones(256)
    while requests.recv():
        begun = time.process_time()
        for _ in range(ticks):
            for _ in range(COLLECTIVES):
                dist.all_reduce(tensor)
            sentinel.tick()
        requests.send((time.process_time() - begun) / ticks)
    assert bool(_native.waited_ns() and page.points(0)[0]) == (kind == "waits")
    assert bool(last_collectives(0)) == (kind == "collectives")
    theirs.close()
    dist.destroy_process_group()


def measure(pairs: int, ticks: int) -> dict[str, list[float]]:
    """Return the seconds of a tick of each kind, in turns."""
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    processes = []
    for kind in KINDS:
        ends[kind], theirs = context.Pipe()
        processes.append(context.Process(target=run, args=(kind, theirs, ticks), daemon=True))
        processes[-1].start()
        theirs.close()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(pairs + 1):
        for kind, end in ends.items():
            end.send(True)
            found[kind].append(end.recv())
    for end, process in zip(ends.values(), processes, strict=True):
        end.send(False)
        process.join()
        assert process.exitcode == 0
    return {kind: seconds[1:] for kind, seconds in found.items()}  # the first turn warms up


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=101)
    parser.add_argument("--ticks", type=int, default=20)
    args = parser.parse_args()
    found = measure(args.pairs, args.ticks)
    plain, missed = found[KINDS[0]], False
    print(
        f"\n{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {COLLECTIVES} all-reduces a tick\n"
    )
    print("| in each tick | tick without | with it | ratio | cost | of a step of 100 ms |\n|---|---|---|---|---|---|")
    for kind in KINDS[1:]:
        without_s, with_s = median(plain), median(found[kind])
        cost_s = with_s - without_s
        cells = f"{without_s * 1e6:.0f} µs | {with_s * 1e6:.0f} µs | {with_s / without_s:.3f} | {cost_s * 1e6:.1f} µs"
        print(f"| {kind} | {cells} | {max(0.0, cost_s / STEP_S):.3%} |")
        missed |= cost_s > GOAL_S
    print(f"\nGoal: each costs ≤ {GOAL_S * 1e6:.0f} µs.")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
