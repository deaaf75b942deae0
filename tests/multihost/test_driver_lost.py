"""The host of elasticrun is lost, and a driver on another host continues the job."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from tests.kit.hosts import HEARTBEAT_S, PORT, QUICK, agent, check_no_two_worlds
from tests.kit.job import Job
from tests.kit.network import Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
REGROUP_S = 1.0
HOSTS = "abce"


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", "c", "e", are_machines=True) as network:
        yield network


def job_with(network: Network, tmp_path: Path, hosts: str, *options: str) -> Job:
    """Run a job with a standby, from host d. It trains until the file ``stop`` exists."""
    number = str(len(hosts.split(",")))
    given = ("-np", number, "--min-np", "1", "-H", hosts, *QUICK, "--standbys", "1", "--job-name", "lost", *options)
    return Job(tmp_path, *given, within=network["d"].storage.enter(), until=tmp_path / "stop", steps=10)


def trains(job: Job, size: int) -> None:
    """Wait until the newest world has this size and has made some ticks."""

    def does() -> bool:
        worlds = job.events("world_formed")
        generation = worlds[-1]["generation"] if worlds else 0
        ticks = {line["step"] for line in job.log("commit") if line["generation"] == generation}
        return bool(worlds) and worlds[-1]["size"] == size and len(ticks) > 5

    job.wait_for_while_gone(f"a world of {size} that trains", does)


def standby_listens(job: Job, size: int = 3, standbys: int = 1) -> None:
    """Wait until so many agents keep the record, and so many standbys wait."""

    def does() -> bool:
        changes = [e for e in job.events() if e["event"] in ("driver_restarted", "record_kept")]
        newest = changes[-1] if changes else {}
        return len(newest.get("hosts", ())) == size and len(newest["standbys"]) == standbys

    job.wait_for_while_gone(f"{standbys} standbys", does)


def ends(network: Network, job: Job) -> None:
    """End the job, and check that nothing was lost."""
    job.stop_file.touch()
    job.wait_for_while_gone("the end of the job", lambda: job.events("job_finished"))
    (finished,) = job.events("job_finished")
    assert finished["status"] == "succeeded", finished
    assert finished["commits_lost"] == 0
    job.wait_for_while_gone("no process", lambda: not any(network[host].processes() for host in HOSTS))
    job.check_survival()
    check_no_two_worlds(job)


def largest_gap(job: Job) -> float:
    """Return the longest time in seconds in which no worker has committed."""
    times = sorted(line["time"] for line in job.log("commit"))
    return max(later - earlier for earlier, later in pairwise(times))


def test_a_host_with_the_driver_alone_loses_power_and_nobody_is_interrupted(network: Network, tmp_path: Path) -> None:
    with job_with(network, tmp_path, "a:1,b:1,c:1") as job:
        trains(job, 3)
        standby_listens(job)
        network["d"].power_off()
        job.wait_for_while_gone("a new driver", lambda: job.events("driver_restarted"))
        (restarted,) = job.events("driver_restarted")
        assert (restarted["epoch"], restarted["back"], restarted["lost"]) == (2, ["a", "b", "c"], [])
        trains(job, 3)
        ends(network, job)
        assert len(job.events("world_formed")) == 1


def test_a_host_with_driver_and_worker_loses_power(network: Network, tmp_path: Path) -> None:
    with job_with(network, tmp_path, "d:1,a:1,b:1,c:1") as job:
        trains(job, 4)
        standby_listens(job)
        network["d"].power_off()
        trains(job, 3)
        (restarted,) = job.events("driver_restarted")
        assert (restarted["epoch"], restarted["back"], restarted["lost"]) == (2, ["a", "b", "c"], ["d"])
        assert largest_gap(job) < 1.2 * HEARTBEAT_S + REGROUP_S
        ends(network, job)


def test_an_old_driver_that_was_frozen_or_cut_off_publishes_nothing(network: Network, tmp_path: Path) -> None:
    with job_with(network, tmp_path, "d:1,a:1,b:1,c:1", "--standbys", "3") as job:
        trains(job, 4)
        standby_listens(job, standbys=3)
        job.process.send_signal(signal.SIGSTOP)
        job.wait_for_while_gone("a new driver", lambda: job.events("driver_restarted"))
        assert job.events("driver_restarted")[0]["lost"] == []
        trains(job, 4)
        worlds = len(job.events("world_formed"))
        job.process.send_signal(signal.SIGCONT)
        assert job.process.wait(30) == 1
        assert "the job continues with a newer driver" in job.output
        assert len(job.events("world_formed")) == worlds

        standby_listens(job, standbys=3)  # two of them have waited for the first driver's end, too
        second = network[job.events("driver_restarted")[0]["host"]]
        (driver,) = [pid for pid in second.storage.pids() if "--standby" in Path(f"/proc/{pid}/cmdline").read_text()]
        second.cut()  # with the driver, which lives
        assert second.is_cut()
        job.wait_for_while_gone("a third driver", lambda: len(job.events("driver_restarted")) == 2)
        trains(job, 3)
        second.heal()
        trains(job, 4)
        standby_listens(job, standbys=3)  # one of them beside the second driver, or after it
        job.wait_for_while_gone("the end of the second driver", lambda: driver not in second.storage.pids())
        ends(network, job)


def test_three_of_five_hosts_are_lost_one_after_the_other_each_time_that_of_the_driver(
    network: Network, tmp_path: Path
) -> None:
    with job_with(network, tmp_path, "d:1,a:1,b:1,c:1,e:1") as job:
        host = "d"
        for size, epoch in ((5, 2), (4, 3), (3, 4)):
            trains(job, size)
            standby_listens(job)
            network[host].power_off()
            job.wait_for_while_gone(
                "a new driver", lambda epoch=epoch: len(job.events("driver_restarted")) == epoch - 1
            )
            restarted = job.events("driver_restarted")[-1]
            assert (restarted["epoch"], restarted["lost"]) == (epoch, [host])
            host = restarted["host"]
        trains(job, 2)
        assert largest_gap(job) < 1.2 * HEARTBEAT_S + REGROUP_S
        ends(network, job)


def test_a_driver_that_is_started_again_on_its_machine_asks_the_agents_first(network: Network, tmp_path: Path) -> None:
    with job_with(network, tmp_path, "a:1,b:1,c:1", "--heartbeat-timeout", "30") as job:
        trains(job, 3)
        standby_listens(job)
        job.kill_driver()
        job.start(*job.arguments)
        restarted = job.wait_for_event("driver_restarted")
        assert (restarted["host"], restarted["back"], restarted["lost"]) == ("d", ["a", "b", "c"], [])
        trains(job, 3)
        job.stop_file.touch()
        job.finish()
        job.check_survival()
        assert len(job.events("world_formed")) == 1


def test_a_new_driver_elsewhere_continues_a_job_whose_agents_dial_in(network: Network, tmp_path: Path) -> None:
    """Two hosts work, and a third one, without slots, only keeps the record. No standby waits."""
    token = tmp_path / "token"
    listen = ("--listen", f"0.0.0.0:{PORT}", "--token-file", str(token))
    options = ("-np", "2", "--min-np", "1", *QUICK, "--standbys", "0", "--job-name", "lost", *listen)
    with ExitStack() as stack:
        within = network["d"].storage.enter()
        job = stack.enter_context(Job(tmp_path, *options, within=within, until=tmp_path / "stop", steps=10))
        job.wait_for("token file", token.exists)
        slots = {"a": "1", "b": "1", "c": "0"}
        agents = [stack.enter_context(agent(network, n, token, "--slots", s, drivers="de")) for n, s in slots.items()]
        trains(job, 2)
        job.wait_for_event("record_kept", hosts=["a", "b", "c"], standbys=[])
        network["d"].power_off()

        command = [sys.executable, "-m", "elasticstate", "--reattach", "lost"]
        wrong = subprocess.run(
            network["e"].storage.enter(*command, *listen[:2], "--token-file", str(tmp_path / "no")),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (wrong.returncode, "there is no such file" in wrong.stderr) == (2, True), wrong.stderr
        second = stack.enter_context(subprocess.Popen(network["e"].storage.enter(*command, *listen)))
        stack.callback(second.kill)
        job.wait_for_while_gone("a new driver", lambda: job.events("driver_restarted"))
        (restarted,) = job.events("driver_restarted")
        assert (restarted["host"], restarted["back"], restarted["lost"]) == ("e", ["a", "b"], [])
        steps = len(job.log("commit"))
        job.wait_for_while_gone("more commits", lambda: len(job.log("commit")) > steps + 20)
        job.stop_file.touch()
        assert second.wait(30) == 0
        assert [process.wait(30) for process in agents] == [0, 0, 0]
        job.check_survival()
    assert len(job.events("world_formed")) == len({e["generation"] for e in job.events("world_formed")}) <= 2
    assert job.events("worker_exited")[-1]["exit_code"] == 0
