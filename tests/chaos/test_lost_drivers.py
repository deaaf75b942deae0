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

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.long]
NAMES = ("a", "b", "c", "e")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, *NAMES, are_machines=True) as network:
        yield network


def kept(job: Job) -> Line | None:
    """Return who keeps the record now, if these are three hosts, and a standby waits."""
    changes = [e for e in job.events() if e["event"] in ("driver_restarted", "record_kept")]
    newest = changes[-1] if changes else {}
    return newest if len(newest.get("hosts", ())) == 3 and newest["standbys"] else None


def kill_a_worker(network: Network, chance: random.Random, spared: str) -> None:
    """Kill a worker on another host than that of the driver."""
    hosts = [host for host in network.hosts.values() if host.has_power and host.name != spared]
    workers = []
    for host in hosts:
        for pid in host.storage.pids():
            with suppress(OSError):
                if "scripts/train.py" in Path(f"/proc/{pid}/cmdline").read_text():
                    workers.append(pid)
    if workers:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(workers), signal.SIGKILL)


def test_a_job_outlives_all_its_drivers(network: Network, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    minutes, seed = (pytestconfig.getoption(f"chaos_{name}") for name in ("minutes", "seed"))
    chance, until = random.Random(seed), time.monotonic() + 60 * minutes
    options = (
        "-np",
        "5",
        "--min-np",
        "1",
        "-H",
        "d:1,a:1,b:1,c:1,e:1",
        *QUICK,
        "--standbys",
        "1",
        "--job-name",
        "lost",
    )
    within = network["d"].storage.enter()
    with Job(tmp_path, *options, within=within, until=tmp_path / "stop", steps=10) as job:
        here, losses = "d", 0
        while not losses or time.monotonic() < until:
            job.wait_for_while_gone(f"a standby after {losses} losses", lambda: kept(job))
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
        commits = len(job.log("commit"))
        job.wait_for_while_gone("commits in the end", lambda: len(job.log("commit")) > commits + 20)
        job.stop_file.touch()
        job.wait_for_while_gone("the end of the job", lambda: job.events("job_finished"))
        (finished,) = job.events("job_finished")
        print(f"seed {seed}: {losses} hosts of drivers lost; {finished['generations']} generations")
        assert (finished["status"], finished["commits_lost"]) == ("succeeded", 0)
        job.wait_for_while_gone("no process", lambda: not any(network[host].processes() for host in NAMES))
        job.check_survival()
        check_no_two_worlds(job)
