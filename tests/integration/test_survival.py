"""Real workers die in every way and place. The others continue, and no commit is lost.

Most faults strike one after the other at one job (series.py), with a test for each fault.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.job import Hosts, Job
from tests.kit.series import (
    Errors,
    Series,
    a_second_dies,
    faults_file,
    kill,
    one_after_the_other,
    one_is_killed,
    three_are_killed,
)

FAST = ("--join-window", "30", "--min-interrupt-distance", "0.5")
SECOND = (
    "kill@init:rank=1:generation={next}",
    "kill@store:rank=1:generation={next}",
    "kill@store:rank=0:generation={next}",
    "kill@init:rank=0:generation={next}",
    "kill@new_group:rank=1:generation={next}",
    "kill@callback:rank=1:generation={next}",
    "kill@leave:rank=1:generation={now}",
    "kill@leave:rank=0:generation={now}",
    "segv@step:rank=1:generation={next}",
)


def survived(job: Job, faults: int | None = None, generations: int = 2) -> None:
    job.finish(0)
    job.check_survival(faults)
    assert len(job.events("world_formed")) >= generations, job.events("world_formed")


# ------------------------------------------------------------------------------ faults one after the other at one job


def a_second_dies_twenty_milliseconds_later(series: Series) -> None:
    first, second = series.job.pid_of(1), series.job.pid_of(2)

    def both() -> None:
        kill(first)
        threading.Event().wait(0.02)  # the fault itself: a second death during the recovery
        kill(second)

    recovery = series.strike(deaths=2, act=both)
    assert {exited["signal"] for exited in recovery.exits} == {signal.SIGKILL}


def an_exception_in_one_worker(series: Series) -> None:
    (exited,) = series.strike("raise@step:rank=1:generation={now}", deaths=1).exits
    assert (exited["exit_code"], exited["rank"]) == (1, 1)


def an_exit(series: Series, status: int) -> None:
    (exited,) = series.strike(f"exit{status}@step:rank=1:generation={{now}}", deaths=1).exits
    assert exited["exit_code"] == status


def one_dies_in_the_gate(series: Series) -> None:
    """End the series: the world in which it happens is the last but one."""
    job, now = series.job, series.wait_until_whole()
    series.arm("kill@gate:rank=1:generation={now}")
    job.stop_file.touch()
    job.finish(0)
    assert job.fired() == series.fired
    (step,) = {line["step"] for line in job.log("gate") if line["generation"] == now}
    again = [line for line in job.log("enter") if line["generation"] > now]
    assert again
    assert all(line["step"] == step for line in again)


STRIKES: dict[str, Callable[[Series], object]] = {
    "one is killed from outside: middle": lambda series: one_is_killed(series, 1),
    "one is killed from outside: rank 0": lambda series: one_is_killed(series, 0),
    **{
        f"a second dies while the world regroups: {fault}": lambda series, fault=fault: a_second_dies(series, fault)
        for fault in SECOND
    },
    "a second dies 20 ms after the first": a_second_dies_twenty_milliseconds_later,
    "an exception in one worker restarts its slot alone": an_exception_in_one_worker,
    "a worker exits with 0 in mid-training": lambda series: an_exit(series, 0),
    "a worker exits with 3 in mid-training": lambda series: an_exit(series, 3),
    "three of four are killed at once": three_are_killed,
    "one dies while others wait in the exit gate": one_dies_in_the_gate,
}


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Let all faults strike at one job of four workers. The check of the whole job is a part of the last one."""
    folder = tmp_path_factory.mktemp("series")
    options = ("-np", "4", "--min-np", "1", *FAST, "--cooldown-range", "0", "0")
    script = {"steps": 10, "step_seconds": 0.05, "until": folder / "stop", "faults_file": faults_file(folder)}
    with Job(folder, *options, **script, callback=True) as job:
        series = Series(job, 4)

        def one(fault: str) -> None:
            STRIKES[fault](series)
            if fault == list(STRIKES)[-1]:
                job.check_survival(series.fired)

        return one_after_the_other(STRIKES, one)


@pytest.mark.parametrize("fault", STRIKES)
def test_the_others_continue(struck: Errors, fault: str) -> None:
    struck.check(fault)


# ---------------------------------------------------------------------------------------------------- jobs of their own


def test_the_root_and_then_a_receiver_die_in_the_first_sync(tmp_path: Path) -> None:
    """There is no commit yet: both worlds begin with a sync from rank 0."""
    faults = ["kill@sync:rank=0:generation=1", "kill@sync:rank=1:generation=2"]
    with Job(tmp_path, "-np", "3", "--min-np", "1", *FAST, steps=60, fault=faults) as job:
        survived(job, faults=2, generations=3)


def test_an_exception_in_all_workers_at_one_step_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "2", "--min-np", "1", *FAST, steps=300, fault=["raise@20"]) as job:
        job.finish(3)
        assert job.fired() == 2
        assert "ValueError: a bug of the user's at step" in job.output.splitlines()[-1]
        assert len(job.events("world_formed")) == 1, "the job must not spin"


def test_a_script_that_wraps_every_exception_and_keeps_gradients_goes_back_to_the_commit(tmp_path: Path) -> None:
    """The optimizer has written between commit and failure, and backward has left partial gradients."""
    faults = ["kill@23:rank=1", "kill@33:rank=1", "kill@backward:step=44:rank=1"]
    script = {"commit_every": 5, "wrap": True, "zero_grad_last": True}
    with Job(tmp_path, "-np", "4", "--min-np", "1", *FAST, steps=60, fault=faults, **script) as job:
        survived(job, faults=3, generations=4)


def test_a_worker_dies_between_an_interrupt_at_a_tick_without_commit_and_its_ready(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    options = ("-np", "2", "--min-np", "1", *hosts.options, *FAST)
    stop = tmp_path / "stop"
    fault = ["kill@leave:rank=1:generation=1"]
    with Job(tmp_path, *options, steps=40, fault=fault, commit_every=7, until=stop) as job:
        job.wait_for_step(7)
        hosts.set("localhost:3")
        job.wait_for_event("worker_exited", signal=9)
        job.wait_for_event("world_formed", generation=2)
        stop.touch()
        survived(job, faults=1)


def test_hosts_come_and_go_while_workers_die(tmp_path: Path) -> None:
    """Planned changes lose nothing, also when a worker dies in the middle of one."""
    hosts = Hosts(tmp_path).set("localhost:2")
    options = ("-np", "2", "--min-np", "1", *hosts.options, *FAST, "--cooldown-range", "1", "2")
    faults = ["kill@leave:rank=1:generation=1"]
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", fault=faults) as job:
        _one_dies_between_the_interrupt_and_its_ready(job, hosts)
        _a_host_is_added_while_another_worker_dies(job, hosts)
        _a_host_is_removed(job, hosts)
        _slots_are_reduced_and_rank_0_goes(job, hosts)
        _an_agent_is_killed(job, hosts)
        job.stop_file.touch()
        survived(job, faults=1, generations=9)


def world_after(job: Job, events: int, size: int) -> None:
    """Wait for a world of this size, and its first tick, in the lines after the first ``events``."""

    def formed() -> bool:
        later = job.events()[events:]
        worlds = [e["generation"] for e in later if e["event"] == "world_formed" and e["size"] == size]
        return any(e["event"] == "training_resumed" and e["generation"] in worlds for e in later)

    job.wait_for(f"a world of {size} that trains", formed)


def _one_dies_between_the_interrupt_and_its_ready(job: Job, hosts: Hosts) -> None:
    job.wait_for_step(7)
    hosts.set("localhost:3")
    job.wait_for_event("worker_exited", signal=9)
    world_after(job, 0, 3)
    assert job.fired() == 1


def _a_host_is_added_while_another_worker_dies(job: Job, hosts: Hosts) -> None:
    seen = len(job.events())
    hosts.set("localhost:3", "127.0.0.2:1")
    job.wait_for_event("host_added", host="127.0.0.2")
    kill(job.pid_of(1))
    job.wait_for_event("worker_exited", 2, signal=9)
    world_after(job, seen, 4)


def _a_host_is_removed(job: Job, hosts: Hosts) -> None:
    seen = len(job.events())
    hosts.set("localhost:3")
    left = job.wait_for_event("worker_exited", host="127.0.0.2")
    assert left["exit_code"] == 0
    world_after(job, seen, 3)
    lost = [e["ticks_lost"] for e in job.events()[seen:] if e["event"] == "training_resumed"]
    assert lost == [0]


def _slots_are_reduced_and_rank_0_goes(job: Job, hosts: Hosts) -> None:
    seen = len(job.events())
    hosts.set("localhost:1", "127.0.0.2:2")
    world_after(job, seen, 3)
    rank_0 = job.pid_of(0)
    hosts.set("127.0.0.2:1")
    world_after(job, seen, 1)
    job.wait_for_event("worker_exited", pid=rank_0)
    exits = [e for e in job.events()[seen:] if e["event"] == "worker_exited"]
    assert {e["exit_code"] for e in exits} == {0}


def _an_agent_is_killed(job: Job, hosts: Hosts) -> None:
    """The death of an agent takes its workers along. The host comes back after its cooldown."""
    seen = len(job.events())
    hosts.set("127.0.0.2:1", "127.0.0.3:2")
    world_after(job, seen, 3)
    agent = job.wait_for_event("agent_joined", host="127.0.0.3")["pid"]
    seen = len(job.events())
    kill(agent)
    job.wait_for_event("agent_lost", host="127.0.0.3")
    world_after(job, seen, 1)
    job.wait_for_event("host_cooldown", host="127.0.0.3")
    world_after(job, seen, 3)


def test_too_few_workers_for_too_long_is_an_error_that_names_what_is_missing(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1", "127.0.0.2:1")
    options = ("-np", "2", *hosts.options, *FAST, "--elastic-timeout", "1")
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(10)
        hosts.set("localhost:1")
        job.finish(1)
        assert "--elastic-timeout" in job.output.splitlines()[-1]
        assert "127.0.0.2" in job.output.splitlines()[-1]
