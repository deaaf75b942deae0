"""Jobs on hosts that are network namespaces: by ssh, or with agents that dial in."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

from tests.kit import forks
from tests.kit.job import Job, Line
from tests.kit.network import Network

HEARTBEAT_S = 2.0
QUICK = (
    *("--heartbeat-timeout", str(HEARTBEAT_S), "--min-interrupt-distance", "0.1", "--join-window", "30"),
    *("--cooldown-range", "0.2", "0.4", "--orphan-timeout", "20"),
)


def job_on(network: Network, tmp_path: Path, *options: str, **script: object) -> Job:
    """Run a job with a worker on each of the hosts a, b and c. It trains until the file ``stop`` exists."""
    hosts = ("-np", "3", "--min-np", "1", "-H", "a:1,b:1,c:1")
    within = network["d"].storage.enter()
    return Job(tmp_path, *hosts, *QUICK, *options, within=within, until=tmp_path / "stop", steps=10, **script)


def trains_with(job: Job, size: int, count: int = 1) -> Line:
    """Wait until the ``count``-th world of this size has completed a tick."""
    event = job.wait_for_event("world_formed", count, size=size)
    generation = event["generation"]
    job.wait_for(
        f"a tick of generation {generation}", lambda: any(c["generation"] >= generation for c in job.log("commit"))
    )
    return event


def ends_well(job: Job) -> None:
    job.stop_file.touch()
    job.finish()
    job.check_survival()
    check_no_two_worlds(job)


def check_no_two_worlds(job: Job, what: str = "commit") -> None:
    """Check that after the first tick of a later world, an older world ended at most the tick that was in progress."""
    ticks: dict[int, dict[int, float]] = {}  # generation -> step -> time at which the last member ended it
    first: dict[int, float] = {}
    for line in job.log(what):  # ordered by time
        ticks.setdefault(line["generation"], {})[line["step"]] = line["time"]
        first.setdefault(line["generation"], line["time"])
    later = inf
    for generation in sorted(ticks, reverse=True):
        side_by_side = [step for step, last in ticks[generation].items() if last > later]
        assert len(side_by_side) <= 1, f"generation {generation} went on beside a later one: {side_by_side}"
        later = min(later, first[generation])


def next_step_after(job: Job, lost: Line) -> float:
    """Return the seconds from the loss of a host to the first tick without it."""
    resumed = job.wait_for(
        "training resumed", lambda: [e for e in job.events("training_resumed") if e["time"] > lost["time"]]
    )
    return float(resumed[0]["time"]) - float(lost["time"])


class Scene:
    """Job on three hosts that has recovered from all faults so far. ``begin()`` comes before the next one."""

    def __init__(self, network: Network, job: Job) -> None:
        self.network = network
        self.job = job
        self._seen = 0

    def begin(self) -> None:
        self._seen = len(self.job.events())

    def events(self, name: str, **fields: object) -> list[Line]:
        """Return the events since the beginning of the fault."""
        later = (event for event in self.job.events()[self._seen :] if event["event"] == name)
        return [event for event in later if all(event.get(key) == value for key, value in fields.items())]

    def wait_for(self, name: str, **fields: object) -> Line:
        found: list[Line] = self.job.wait_for(f"{name} {fields}", lambda: self.events(name, **fields))
        return found[-1]

    def trains_with(self, size: int) -> Line:
        """Wait until a new world of this size has completed a tick."""
        event = self.wait_for("world_formed", size=size)
        generation = event["generation"]
        self.job.wait_for(f"a tick of generation {generation}", lambda: self.trained_in(generation))
        return event

    def trained_in(self, generation: int) -> list[Line]:
        return [line for line in self.job.log("commit") if line["generation"] >= generation]


PORT = 7077


@contextmanager
def agent(
    network: Network, name: str, token: Path, *options: str, drivers: str = "d"
) -> Iterator[forks.Piped | subprocess.Popen[str]]:
    """Run ``elasticrun agent`` on a host, as a batch system does. ``drivers``: the hosts of possible drivers."""
    arguments = ("--join", ",".join(f"{host}:{PORT}" for host in drivers), "--token-file", str(token), *options)
    process = forks.agent(arguments, network[name].storage.pid)
    try:
        yield process
    finally:
        process.kill()
        print(f"agent of host {name}:", process.communicate()[1])
