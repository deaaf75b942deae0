"""All-reduce of the ``mpi`` backend, measured alternately with mpi4py's own ``Allreduce`` in the same processes.

Three workers of ``elasticrun --backend mpi`` reduce 64 MB of float32: with torch.distributed, and with mpi4py on the
communicator of their world. Prints markdown. The figure of a round is that of its slowest rank.
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
from pathlib import Path
from statistics import median

SIZES = (64 << 10, 1 << 20, 64 << 20)  # bytes
GOAL = 0.9  # of mpi4py's bandwidth, at the largest size


def work(rounds: int, path: Path) -> None:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import elasticstate as elastic

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        comm = dist.group.WORLD._comm  # type: ignore[union-attr]
        found: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
        for size in SIZES:
            tensor = torch.zeros(size // 4)
            array = tensor.numpy()

            def by_torch(tensor: torch.Tensor = tensor) -> None:
                dist.all_reduce(tensor)

            def by_mpi4py(array: object = array) -> None:
                comm.Allreduce(MPI.IN_PLACE, array)

            for _ in range(rounds + 1):  # the first round does not count
                pair = []
                for reduce in (by_torch, by_mpi4py):
                    comm.Barrier()
                    begun = time.perf_counter()
                    reduce()
                    pair.append(comm.allreduce(time.perf_counter() - begun, MPI.MAX))
                found[size].append((pair[0], pair[1]))
        if elastic.rank() == 0:
            path.write_text(json.dumps({size: pairs[1:] for size, pairs in found.items()}))

    train(elastic.ObjectState())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.rounds, args.worker)
        return
    with tempfile.TemporaryDirectory(prefix="elasticstate-bench-") as folder:
        path = Path(folder, "found")
        script = [sys.executable, __file__, "--worker", str(path), "--rounds", str(args.rounds)]
        command = [sys.executable, "-m", "elasticstate", "-np", "3", "--backend", "mpi", "--", *script]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-3000:])
        found = {int(size): pairs for size, pairs in json.loads(path.read_text()).items()}
    cores = len(os.sched_getaffinity(0))
    print(f"Python {platform.python_version()}, {cores} cores, 3 workers; medians of {args.rounds} rounds.\n")
    print("| all-reduce of | by torch, `mpi` | by mpi4py, `Allreduce` | bandwidth, of mpi4py's |\n|---|---|---|---|")
    for size, pairs in found.items():
        ours, theirs = (median(column) * 1e3 for column in zip(*pairs, strict=True))
        share = median(of_mpi4py / of_torch for of_torch, of_mpi4py in pairs)
        print(f"| {size >> 10} KB | {ours:.2f} ms | {theirs:.2f} ms | {share:.2f} |")
    print(f"\nGoal at {SIZES[-1] >> 20} MB: at least {GOAL}.")


if __name__ == "__main__":
    main()
