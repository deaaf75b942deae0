"""The driver is killed while the workers train. A new driver reattaches, and handles all that has happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from elasticstate.driver.record import find_job
from tests.kit.job import Job

FAST = (
    "--join-window",
    "30",
    "--min-interrupt-distance",
    "0.2",
    "--cooldown-range",
    "0",
    "0",
)
TWO_HOSTS = ("-np", "4", "--min-np", "1", "-H", "localhost:2,127.0.0.2:2")


@pytest.fixture
def name() -> str:
    return f"restart-{uuid.uuid4().hex[:8]}"


def newest_step(job: Job) -> int:
    return max((int(line["step"]) for line in job.log("commit")), default=0)


def kill_the_driver(job: Job, name: str) -> None:
    """Kill the driver in mid-training, and wait until the workers have made more steps."""
    record = find_job(name)
    assert record is not None
    job.kill_driver()
    step = newest_step(job)
    job.wait_for_while_gone("steps without a driver", lambda: newest_step(job) > step + 5)


def account(job: Job) -> dict[str, float]:
    """Return the parts of the job's time: from the start of its first driver, and those of its generations."""
    (finished,), (started,) = job.events("job_finished"), job.events("job_started")
    times = {"goodput": finished["goodput_s"], **finished["badput_s"]}
    assert finished["wall_s"] == pytest.approx(finished["time"] - started["time"], rel=0.01)
    assert finished["wall_s"] == pytest.approx(sum(times.values()), abs=1e-4)
    ended = job.events("generation_finished")
    assert sum(event["wall_s"] for event in ended) == pytest.approx(finished["wall_s"], abs=1e-3)
    assert sum(event["goodput_s"] for event in ended) == pytest.approx(finished["goodput_s"], abs=1e-3)
    return times


def test_the_world_goes_on_without_its_driver_and_with_the_next_one(tmp_path: Path, name: str) -> None:
    with Job(tmp_path, *TWO_HOSTS, *FAST, "--job-name", name, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(5)
        kill_the_driver(job, name)
        job.start(*job.arguments)
        restarted = job.wait_for_event("driver_restarted")
        assert (restarted["epoch"], restarted["back"], restarted["lost"]) == (2, ["127.0.0.2", "localhost"], [])
        step = newest_step(job)
        job.wait_for_step(step + 10)
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()
        assert len(job.events("world_formed")) == 1, "nobody was interrupted"
        assert len({line["pid"] for line in job.log("commit")}) == 4
        times = account(job)
        assert "no_driver" not in times, "the workers have trained without a driver"
        assert times["goodput"] > 0
    assert find_job(name) is None


def test_a_death_while_there_is_no_driver_is_dealt_with_by_the_next_one(tmp_path: Path, name: str) -> None:
    with Job(tmp_path, *TWO_HOSTS, *FAST, "--job-name", name, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(5)
        kill_the_driver(job, name)
        victim = job.pid_of(1)
        os.kill(victim, signal.SIGKILL)
        job.wait_for_while_gone("the death", lambda: not psutil.pid_exists(victim))
        job.start(*job.arguments)
        exited = job.wait_for_event("worker_exited", pid=victim)
        assert (exited["signal"], exited["rank"], exited["generation"]) == (signal.SIGKILL, 1, 1)
        job.wait_for_event("world_formed", count=2)
        job.wait_for_event("world_formed", size=4, count=2, timeout=90)  # after a new worker has started in the slot
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()
        assert job.events("training_resumed")[0]["lower_bounds"] == ["downtime_s"], "it had stood still before"
        finished = job.events("job_finished")[-1]
        assert (finished["driver"], finished["lower_bounds"]) == (2, ["downtime_s"])
        assert finished["downtime_s"] > 0
        times = account(job)
        assert times["no_driver"] > 0, "after the last tick of the survivors"
        assert times["goodput"] > 0
        assert re.search(
            r"after [\d.]+ s: 3 generations, 1 failure, downtime at least [\d.]+ s, 0 commits lost, 0 ticks redone, "
            r"goodput [\d.]+%, .*; 2 drivers",
            job.output,
        )


def test_failures_count_towards_the_reset_limit_over_all_drivers(tmp_path: Path, name: str) -> None:
    limits = ("-np", "2", "--min-np", "2", "--reset-limit", "1", "--cooldown-range", "0", "0", "--job-name", name)
    with Job(tmp_path, *limits, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(5)
        os.kill(job.pid_of(1), signal.SIGKILL)
        job.wait_for_event("training_resumed")
        kill_the_driver(job, name)
        job.start(*job.arguments)
        job.wait_for_event("driver_restarted")
        os.kill([line["pid"] for line in job.log("enter") if line["rank"] == 1][-1], signal.SIGKILL)
        job.wait_for("the end of the job", lambda: job.process.poll() is not None)
        assert "root cause: reset limit: 2 generations have failed, --reset-limit is 1" in job.output


def test_an_agent_and_its_workers_that_die_with_the_driver_are_replaced(tmp_path: Path, name: str) -> None:
    with Job(tmp_path, *TWO_HOSTS, *FAST, "--job-name", name, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(5)
        agent = psutil.Process(job.wait_for_event("agent_joined", host="127.0.0.2")["pid"])
        os.kill(agent.pid, signal.SIGSTOP)  # so that the agent does not see the driver die first
        job.kill_driver()
        agent.kill()
        psutil.wait_procs([agent], timeout=10)
        job.start(*job.arguments)
        assert job.wait_for_event("driver_restarted")["lost"] == ["127.0.0.2"]
        job.wait_for_event("world_formed", size=2)
        job.wait_for_event("world_formed", size=4, count=2, timeout=90)
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()


def test_when_all_processes_of_a_job_are_killed_it_goes_on_from_memory(tmp_path: Path, name: str) -> None:
    """A supervisor may kill the whole process group of the job that it restarts."""
    with Job(tmp_path, "-np", "2", *FAST, "--job-name", name, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(20)
        children = psutil.Process(job.process.pid).children(recursive=True)
        job.process.send_signal(signal.SIGSTOP)
        for child in children:
            with suppress(psutil.NoSuchProcess):  # a worker may have ended with its agent
                child.kill()
        job.kill_driver()
        psutil.wait_procs(children, timeout=10)
        assert not [child for child in children if child.is_running()]
        step = newest_step(job)
        job.start(*job.arguments)
        job.wait_for("another generation", lambda: [e for e in job.log("enter") if e["generation"] == 2])
        assert min(int(e["step"]) for e in job.log("enter") if e["generation"] == 2) >= step
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()


def test_a_job_that_finishes_without_its_driver_is_finished_by_the_next_one(tmp_path: Path, name: str) -> None:
    with Job(tmp_path, *TWO_HOSTS, *FAST, "--job-name", name, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(5)
        kill_the_driver(job, name)
        job.stop_file.touch()
        job.wait_for_while_gone("all to be in the gate", lambda: len(job.log("gate")) == 4)
        job.start("--reattach", name)
        job.finish(0)
        job.check_survival()
        assert len(job.events("world_formed")) == 1
        assert job.events("job_finished")[-1]["status"] == "succeeded"


def test_commands_that_have_ended_meanwhile_are_not_run_again(tmp_path: Path, name: str) -> None:
    ran = tmp_path / "ran"
    command = ["sh", "-c", f'echo "$$" >> {ran}; while ! test -e {tmp_path}/stop; do sleep 0.1; done']
    with Job(tmp_path, "-np", "2", *FAST, "--job-name", name, command=command) as job:
        job.wait_for("both", lambda: ran.exists() and len(ran.read_text().split()) == 2)
        job.kill_driver()
        job.stop_file.touch()
        shells = [int(pid) for pid in ran.read_text().split()]
        job.wait_for_while_gone("their end", lambda: not [pid for pid in shells if psutil.pid_exists(pid)])
        job.start("--reattach", name)
        job.finish(0)
        assert len(ran.read_text().split()) == 2


def test_a_living_job_has_one_driver(tmp_path: Path, name: str) -> None:
    with Job(tmp_path, "-np", "1", *FAST, "--job-name", name, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(2)
        for arguments in (job.arguments, ["--reattach", name]):
            second = subprocess.run(
                [sys.executable, "-m", "elasticstate", *arguments], capture_output=True, text=True, timeout=30
            )
            assert second.returncode == 2
            assert second.stderr.count("\n") == 1
            assert f"a job of this name is already running: its driver is process {job.process.pid}" in second.stderr
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()


def test_the_name_of_a_job_that_waits_for_its_driver_is_not_given_to_another(tmp_path: Path, name: str) -> None:
    with Job(tmp_path, "-np", "1", *FAST, "--job-name", name, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(2)
        kill_the_driver(job, name)
        for arguments, complaint in (
            (
                ["-np", "1", "--job-name", name, "--", "true"],
                "a job of this name lost its driver, and it runs another command",
            ),
            (
                ["--reattach", name, "-np", "3"],
                "--reattach: '-np 3': must not be given. A job keeps the command and the options",
            ),
            (["--reattach", "nobody"], "this user has no such job on this machine"),
        ):
            other = subprocess.run(
                [sys.executable, "-m", "elasticstate", *arguments], capture_output=True, text=True, timeout=30
            )
            assert (other.returncode, other.stderr.count("\n")) == (2, 1)
            assert complaint in other.stderr
        job.start("--reattach", name)
        job.wait_for_event("driver_restarted")
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()


def test_what_is_on_disk_is_for_nobody_else(tmp_path: Path, name: str) -> None:
    with Job(tmp_path, "-np", "1", *FAST, "--job-name", name, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(2)
        directory = Path(psutil.Process(job.pid_of(0)).environ()["ELASTICSTATE_SOCKET"]).parent
        assert directory.stat().st_mode & 0o777 == 0o700
        record = directory / "driver.json"
        assert record.stat().st_mode & 0o777 == 0o600
        assert json.loads(record.read_text())["epoch"] == 1
        job.stop_file.touch()
        job.finish(0)
