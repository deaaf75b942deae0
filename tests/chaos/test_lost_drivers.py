"""The host of the driver loses power again and again, whatever the job is doing, while workers are killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.hosts import QUICK, check_no_two_worlds
from tests.kit.job import Job, Line
from tests.kit.network import Network, missing
from tests.kit.series import Series, faults_file

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.long]
NAMES = ("a", "b", "c", "e")
OPTIONS = ("-np", "5", "--min-np", "1", "-H", "d:1,a:1,b:1,c:1,e:1", *QUICK, "--standbys", "1", "--job-name", "lost")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, *NAMES, are_machines=True) as network:
        yield network


def trains(job: Job, size: int) -> bool:
    """Return True if the newest world has so many members or more, and has made a tick: each of them has a commit."""
    newest = (job.events("world_formed") or [{"generation": 0, "size": 0}])[-1]
    return newest["size"] >= size and any(line["generation"] >= newest["generation"] for line in job.log("commit"))


def kept(job: Job) -> Line | None:
    """Return who keeps the record now, if these are three hosts, and a standby waits."""
    changes = [e for e in job.events() if e["event"] in ("driver_restarted", "record_kept")]
    newest = changes[-1] if changes else {}
    return newest if len(newest.get("hosts", ())) == 3 and newest["standbys"] else None


def processes(network: Network, what: str, spared: str) -> list[int]:
    """Return the processes with this word in their command lines, on other hosts than that of the driver."""
    found = []
    for host in network.hosts.values():
        for pid in host.storage.pids() if host.has_power and host.name != spared else []:
            with suppress(OSError):
                if what in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
    return found


def kill_a_worker(network: Network, chance: random.Random, spared: str) -> None:
    """Kill a worker on another host than that of the driver."""
    workers = processes(network, "scripts/train.py", spared)
    if workers:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(workers), signal.SIGKILL)


def test_a_job_outlives_all_its_drivers(network: Network, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    minutes, seed = (pytestconfig.getoption(f"chaos_{name}") for name in ("minutes", "seed"))
    chance, until = random.Random(seed), time.monotonic() + 60 * minutes
    with Job(tmp_path, *OPTIONS, within=network["d"].storage.enter(), until=tmp_path / "stop", steps=10) as job:
        here, losses = "d", 0
        while not losses or time.monotonic() < until:
            job.wait_for_while_gone(f"a standby after {losses} losses", lambda: kept(job) and trains(job, 3))
            if chance.random() < 0.5:
                kill_a_worker(network, chance, spared=here)
            time.sleep(chance.uniform(0, 1.5))  # the fault strikes in any phase
            network[here].power_off()
            losses += 1
            found = f"driver {losses + 1}, as host {here} was lost"
            job.wait_for_while_gone(found, lambda: len(job.events("driver_restarted")) >= losses)  # noqa: B023
            network[here].power_on()
            network[here].heal()
            here = job.events("driver_restarted")[-1]["host"]
        trains_on(job)
        job.stop_file.touch()
        finished = ended(network, job)
        print(f"seed {seed}: {losses} hosts of drivers lost; {finished['generations']} generations")


def trains_on(job: Job) -> None:
    commits = len(job.log("commit"))
    job.wait_for_while_gone("more commits", lambda: len(job.log("commit")) > commits + 20)


def ended(network: Network, job: Job) -> Line:
    """Check the end of a job that was told to end."""
    job.wait_for_while_gone("the end of the job", lambda: job.events("job_finished"))
    (finished,) = job.events("job_finished")
    assert (finished["status"], finished["commits_lost"]) == ("succeeded", 0)
    job.wait_for_while_gone("no process", lambda: not any(network[host].processes() for host in NAMES))
    job.check_survival()
    check_no_two_worlds(job)
    return finished


class Losses:
    """Losses of the host of the driver, each at a point that a worker on another host has reached, and waits in."""

    def __init__(self, network: Network, job: Job) -> None:
        self.network, self.job = network, job
        self.here = "d"
        self._count = 0
        self._series = Series(job, 5)

    def others(self, what: str) -> list[int]:
        return processes(self.network, what, spared=self.here)

    def arm(self, point: str) -> None:
        """Let a worker that reaches this point wait there."""
        (self.job.logs / "wait").touch()
        self._fired = self.job.logs / f"fired-{self._series.fired}-0"
        self._series.arm(f"wait@{point}")

    def strike(self, phase: str, also: str = "") -> None:
        """Let the host of the driver lose power as soon as a worker waits; ``also``: another host, just before."""
        job = self.job
        job.wait_for_while_gone(f"a worker that waits in the phase {phase}", self._fired.exists)
        self.lose(phase, also)
        (job.logs / "wait").unlink()

    def lose(self, phase: str, also: str = "") -> None:
        for host in filter(None, (also, self.here)):
            self.network[host].power_off()
        self._count += 1
        self.job.wait_for_while_gone(
            f"driver {self._count + 1} after a loss in the phase {phase}",
            lambda: len(self.job.events("driver_restarted")) >= self._count,
        )
        lost, self.here = self.here, self.job.events("driver_restarted")[-1]["host"]
        for host in filter(None, (also, lost)):
            self.network[host].power_on()
            self.network[host].heal()

    def is_ready(self, size: int = 5) -> None:
        """Wait until the job would survive the next losses."""
        job = self.job
        job.wait_for_while_gone(f"a standby after {self._count} losses", lambda: kept(job))
        job.wait_for_while_gone(f"{size} workers after {self._count} losses", lambda: size == 0 or trains(job, size))


def test_the_host_of_the_driver_is_lost_in_each_phase(network: Network, tmp_path: Path) -> None:
    boots = tmp_path / "boots"
    script = {"until": tmp_path / "stop", "steps": 10, "faults_file": faults_file(tmp_path), "boot_until": boots}
    with Job(tmp_path, *OPTIONS, within=network["d"].storage.enter(), **script) as job:
        losses = Losses(network, job)
        losses.is_ready(size=0)
        losses.lose("boot")
        boots.touch()
        trains_on(job)
        losses.is_ready()
        losses.lose("training")
        trains_on(job)
        for phase, point in (("forming", "init"), ("sync", "sync")):
            for also_another in (False, True):
                losses.is_ready()
                keepers = kept(job)
                assert keepers is not None
                free = [name for name in ("d", *NAMES) if name not in (*keepers["hosts"], losses.here)]
                losses.arm(point)
                os.kill(losses.others("scripts/train.py")[0], signal.SIGKILL)
                losses.strike(phase, also=free[0] if also_another else "")
                trains_on(job)
        losses.is_ready()
        losses.arm("leave")
        os.kill(losses.others("elasticstate.agent")[0], signal.SIGTERM)
        job.wait_for_while_gone("a host that drains", lambda: job.events("host_draining"))
        losses.strike("drain")
        trains_on(job)
        losses.is_ready(size=3)  # the host that drains may stay away
        losses.arm("gate")
        job.stop_file.touch()
        losses.strike("exit gate")
        ended(network, job)
