"""Time from the kill of a worker to the next step of the others, with and without ``--standbys``.

Each job has a worker on each of four simulated hosts (network namespaces), so that three agents keep the record with
``--standbys 1``; without, it is a file on the driver's machine. The jobs run alternately, and each loses workers, one
after the other. Needs root. Prints markdown, and exits with 1 if the goal is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.kit.hosts import QUICK
from tests.kit.job import Job
from tests.kit.network import Network

HOSTS = "abce"
GOAL = 1.03  # times the regroup with the local file
SYSTEMS = {"local file": (), "three agents": ("--standbys", "1")}


def is_whole(job: Job) -> bool:
    """Return True if a world of all hosts trains, and the record is where it is to be."""
    worlds = job.events("world_formed")
    generation = worlds[-1]["generation"] if worlds and worlds[-1]["size"] == len(HOSTS) else None
    kept = job.events("record_kept")
    is_kept = "--standbys" not in job.arguments or (kept and len(kept[-1]["hosts"]) == 3 and kept[-1]["standbys"])
    return bool(is_kept) and len([line for line in job.log("commit") if line["generation"] == generation]) > 20


def regroups(
    network: Network, folder: Path, options: tuple[str, ...], kills: int, chance: random.Random
) -> list[float]:
    """Run a job. Return the seconds from each kill to the next step of the others."""
    hosts = ",".join(f"{host}:1" for host in HOSTS)
    given = (
        "-np",
        str(len(HOSTS)),
        "--min-np",
        "1",
        "-H",
        hosts,
        *QUICK,
        "--job-name",
        f"bench-{folder.name}",
        *options,
    )
    seconds = []
    with Job(folder, *given, within=network["d"].storage.enter(), until=folder / "stop", steps=10) as job:
        for _ in range(kills):
            job.wait_for("a whole world", lambda: is_whole(job))
            time.sleep(chance.uniform(0, 0.1))  # any moment of a step
            newest = job.events("world_formed")[-1]["generation"]
            victim = job.pid_of(chance.randrange(1, len(HOSTS)), newest)
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            later = lambda newest=newest: [x for x in job.log("commit") if x["generation"] > newest]  # noqa: E731
            seconds.append(job.wait_for("the next step", later)[0]["time"] - killed)
        job.stop_file.touch()
        job.finish()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--kills", type=int, default=6, help="of each run")
    args = parser.parse_args()
    chance = random.Random(1)
    runtime = tempfile.TemporaryDirectory(prefix="es-run-")  # each host mounts its own over it
    os.environ["XDG_RUNTIME_DIR"] = runtime.name
    found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for run in range(args.runs):
        for name, options in SYSTEMS.items():
            print(f"run {run + 1} of {args.runs}: {name}", file=sys.stderr)
            with (
                tempfile.TemporaryDirectory(prefix="es-bench-") as folder,
                Network(Path(folder), *HOSTS, new_processes=True, are_machines=True) as network,
            ):
                found[name] += regroups(network, Path(folder), options, args.kills, chance)
    print(
        f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores; medians of {args.runs * args.kills} kills.\n"
    )
    print("| record | kill to next step |\n| --- | --- |")
    for name, seconds in found.items():
        print(f"| {name} | {1000 * median(seconds):.0f} ms |")
    ratio = median(found["three agents"]) / median(found["local file"])
    print(f"\nThree agents: {ratio:.3f} of the local file (goal: at most {GOAL:g}).")
    runtime.cleanup()
    sys.exit(ratio > GOAL)


if __name__ == "__main__":
    main()
