"""Jobs with ``--backend mpi``: the deaths, joins and leaves of test_survival.py that make sense there, with DDP.

Who survives keeps its process: nobody exits whom the test has not killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from job import Hosts, Job

from elasticstate.driver.mpirun import Mpirun
from elasticstate.net.messages import Holder

MPI = ("--backend", "mpi", "--failure-grace", "0.5", "--join-window", "30", "--min-interrupt-distance", "0.5")


def survived(job: Job, deaths: int, generations: int = 2) -> None:
    job.finish(0)
    job.check_survival()
    assert {line["backend"] for line in job.log("enter")} == {"mpi"}
    exited = job.events("worker_exited")
    unclean = [event for event in exited if event["exit_code"] != 0 and event["rank"] is not None]  # not in boot
    assert len(unclean) == deaths, unclean
    assert len(job.events("world_formed")) >= generations, job.events("world_formed")
    nothing_is_left(job)


def nothing_is_left(job: Job) -> None:
    """Of mpirun, and of what it has started."""
    name = job.events("job_started")[0]["job"]
    assert not [process for process in psutil.process_iter() if f"-{name}/mpi" in command_of(process)]


def command_of(process: psutil.Process) -> str:
    """ "" when it has ended."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_request_that_cannot_be_met_does_not_end_mpirun(tmp_path: Path) -> None:
    """That would be the end of all workers."""
    mpirun, log = Mpirun(tmp_path), tmp_path / "mpi" / "mpirun.log"
    try:
        mpirun.ask([Holder("nobody.invalid", os.getpid(), str(tmp_path / "first"))])
        wait_until(lambda: log.exists() and "no holders for" in log.read_text(errors="replace"), "the refusal")
        mpirun.ask([Holder("localhost", os.getpid(), str(tmp_path / "second"))])
        wait_until((tmp_path / "second").exists, "an identity")
        assert not (tmp_path / "first").exists()
    finally:
        mpirun.stop()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)


@pytest.mark.parametrize("rank", [1, 0], ids=["middle", "rank0"])
def test_one_worker_is_killed_and_comes_back(tmp_path: Path, rank: int) -> None:
    stop = tmp_path / "stop"
    with Job(tmp_path, "-np", "3", "--min-np", "2", *MPI, steps=30, until=stop) as job:
        job.wait_for_step(10)
        os.kill(job.pid_of(rank), signal.SIGKILL)
        job.wait_for_event("world_formed", size=2, generation=2)
        job.wait_for_event("world_formed", size=3, generation=3)
        job.stop_file.touch()
        survived(job, deaths=1, generations=3)
        assert job.events("training_resumed")[0]["ticks_lost"] <= 1


def test_three_of_four_are_killed_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "4", "--min-np", "1", *MPI, steps=60) as job:
        job.wait_for_step(10)
        for pid in [job.pid_of(rank) for rank in (0, 1, 2)]:
            os.kill(pid, signal.SIGKILL)
        job.wait_for_event("worker_exited", 3, signal=9)
        survived(job, deaths=3)


@pytest.mark.parametrize(
    "fault",
    [
        "kill@store:rank=0:generation=2",
        "kill@init:rank=1:generation=2",
        "kill@new_group:rank=1:generation=2",
        "kill@leave:rank=0:generation=1",
    ],
)
def test_a_second_worker_dies_while_the_world_regroups(tmp_path: Path, fault: str) -> None:
    with Job(tmp_path, "-np", "4", "--min-np", "1", *MPI, steps=60, fault=["kill@10:rank=2", fault]) as job:
        survived(job, deaths=2)
        assert job.fired() == 2


def test_a_worker_that_stands_still_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "2", "--heartbeat-timeout", "2", *MPI)
    with Job(tmp_path, *options, steps=60) as job:
        job.wait_for_step(10)
        os.kill(job.pid_of(1), signal.SIGSTOP)
        job.wait_for_event("worker_unresponsive")
        survived(job, deaths=1)


def test_a_host_comes_and_goes(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    stop = tmp_path / "stop"
    with Job(tmp_path, "-np", "2", "--max-np", "4", *hosts.options, *MPI, steps=30, until=stop) as job:
        job.wait_for_step(10)
        hosts.set("localhost:2", "127.0.0.1:2")
        job.wait_for_event("world_formed", size=4)
        hosts.set("localhost:2")
        job.wait_for_event("world_formed", size=2, generation=3)
        job.stop_file.touch()
        survived(job, deaths=0, generations=3)
        assert all(event["ticks_lost"] == 0 for event in job.events("training_resumed"))
