"""Jobs with ``--backend mpi``: deaths, joins and leaves as in test_survival.py where MPI supports them, with DDP.

Survivors keep their processes: only the workers that the test kills end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from elasticstate.mpi.driver_part import Applicant, Mpirun
from elasticstate.net.trust import make_token
from tests.kit.job import Hosts, Job
from tests.kit.processes import command_of
from tests.kit.series import (
    Errors,
    Series,
    a_second_dies,
    faults_file,
    one_after_the_other,
    one_is_killed,
    three_are_killed,
)

MPI = ("--backend", "mpi", "--join-window", "30", "--min-interrupt-distance", "0.5")


def survived(job: Job, deaths: int, generations: int = 2) -> None:
    job.finish(0)
    job.check_survival()
    assert {line["backend"] for line in job.log("enter")} == {"mpi"}
    exited = job.events("worker_exited")
    # not during the start
    unclean = [event for event in exited if event["exit_code"] != 0 and event["rank"] is not None]
    assert len(unclean) == deaths, unclean
    assert len(job.events("world_formed")) >= generations, job.events("world_formed")
    nothing_is_left(job)


def nothing_is_left(job: Job) -> None:
    """Check that mpirun and all processes that it started are gone."""
    name = job.events("job_started")[0]["job"]
    assert not [process for process in psutil.process_iter() if f"-{name}/mpi" in command_of(process)]


def test_a_request_that_cannot_be_met_does_not_end_mpirun(tmp_path: Path) -> None:
    """The end of mpirun would end all workers."""
    mpirun, dead = Mpirun(tmp_path, 30), subprocess.Popen(["true"])
    dead.wait()
    gone, here = (Applicant("localhost", pid, str(tmp_path)) for pid in (dead.pid, os.getpid()))
    try:
        mpirun.request_identities([])  # a request for no processes
        wait_until(lambda: "could not start holders for []" in mpirun.last_output(), "the refusal")
        mpirun.request_identities([gone])
        mpirun.request_identities([here])
        wait_until(lambda: mpirun.identity(here) is not None, "an identity")
        assert mpirun.identity(gone) is None
    finally:
        mpirun.stop()


def test_an_identity_for_another_host_is_held_until_its_worker_has_ended(tmp_path: Path) -> None:
    mpirun, far = Mpirun(tmp_path, 30), [Applicant("far", pid, str(tmp_path)) for pid in (1, 2)]
    try:
        mpirun.request_identities(far, make_token())
        wait_until(lambda: all(mpirun.identity(member) is not None for member in far), "identities")
        assert {identity.relay_port > 0 for member in far if (identity := mpirun.identity(member))} == {True}
        holders = [json.loads((tmp_path / "mpi" / "held" / "far" / str(pid)).read_text())["pid"] for pid in (1, 2)]
        assert all(command_of(psutil.Process(pid)) for pid in holders)
        mpirun.end_identity("far", 1)
        wait_until(lambda: not psutil.pid_exists(holders[0]), "end of the first holder")
        assert mpirun.identity(far[0]) is None
        assert command_of(psutil.Process(holders[1]))
        mpirun.end_identities_of("far")
        wait_until(lambda: not psutil.pid_exists(holders[1]), "end of the second holder")
    finally:
        mpirun.stop()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)


def one_is_killed_and_comes_back(series: Series, rank: int) -> None:
    recovery = one_is_killed(series, rank)
    assert [world["size"] for world in recovery.worlds] == [3, 4]


def mpirun_is_killed(series: Series) -> None:
    """All workers restart, and resume from their commits."""
    job = series.job
    series.wait_until_whole()
    name = job.events("job_started")[0]["job"]
    broker = f"{sys.executable} -m elasticstate.mpi.broker "
    brokers = [process for process in psutil.process_iter() if command_of(process).startswith(broker)]
    (mpirun,) = (process.parent() for process in brokers if f"-{name}/mpi" in command_of(process))
    assert mpirun is not None
    before = started(job)
    recovery = series.strike(deaths=4, act=mpirun.kill)
    assert recovery.resumed[0]["ticks_lost"] <= 1
    assert len(started(job) - before) == 4
    (warning,) = job.events("warning")
    assert warning["text"].startswith("mpirun has ended: all workers restart and resume from their commits")


def started(job: Job) -> set[str]:
    return {event["worker"] for event in job.events("worker_started")}


SECOND = (
    "kill@store:rank=0:generation={next}",
    "kill@init:rank=1:generation={next}",
    "kill@new_group:rank=1:generation={next}",
    "kill@leave:rank=0:generation={now}",
)
STRIKES: dict[str, Callable[[Series], None]] = {
    "one is killed and comes back: middle": lambda series: one_is_killed_and_comes_back(series, 1),
    "one is killed and comes back: rank 0": lambda series: one_is_killed_and_comes_back(series, 0),
    **{
        f"a second dies while the world regroups: {fault}": lambda series, fault=fault: a_second_dies(series, fault)
        for fault in SECOND
    },
    "three of four are killed at once": three_are_killed,
    "mpirun is killed": mpirun_is_killed,
}


@pytest.fixture(scope="module")
def struck(runtime_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Let all faults strike at one job of four workers. The check of the whole job is a part of the last one."""
    folder = tmp_path_factory.mktemp("series")
    script = {"steps": 10, "until": folder / "stop", "faults_file": faults_file(folder)}
    with Job(folder, "-np", "4", "--min-np", "1", *MPI, "--cooldown-range", "0", "0", **script) as job:
        series = Series(job, 4)

        def one(fault: str) -> None:
            STRIKES[fault](series)
            if fault == list(STRIKES)[-1]:
                job.stop_file.touch()
                job.finish()
                job.check_survival(series.fired)
                assert {line["backend"] for line in job.log("enter")} == {"mpi"}
                nothing_is_left(job)

        return one_after_the_other(STRIKES, one)


@pytest.mark.parametrize("fault", STRIKES)
def test_the_others_continue(struck: Errors, fault: str) -> None:
    struck.check(fault)


def test_a_worker_that_stands_still_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "2", "--heartbeat-timeout", "2", *MPI)
    with Job(tmp_path, *options, steps=60) as job:
        job.wait_for_step(10)
        os.kill(job.pid_of(1), signal.SIGSTOP)
        job.wait_for_event("worker_unresponsive")
        survived(job, deaths=1)


def test_a_worker_that_is_late_is_replaced_and_the_others_go_on(tmp_path: Path) -> None:
    """The late worker is alive in user code. The others could not shrink their communicator."""
    options = ("-np", "4", "--min-np", "2", "--max-np", "4", *MPI, "--regroup-timeout", "3")
    with Job(tmp_path, *options, steps=60, fault=["spin@10:rank=1"]) as job:
        job.wait_for("the spin", lambda: job.fired() == 1)
        os.kill(job.pid_of(3), signal.SIGKILL)  # the others wait for the spinning worker
        job.wait_for_event("worker_exited", rank=1)
        resumed = job.wait_for_event("training_resumed")
        assert resumed["generation"] == 2
        survived(job, deaths=2)


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
