"""Real workers die in every way and place. The others continue, and no commit is lost."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest
from job import Hosts, Job

FAST = ("--failure-grace", "0.5", "--join-window", "30", "--min-interrupt-distance", "0.5")


@pytest.fixture(autouse=True, params=["forked", "new-process"])
def _start_of_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with workers that fork from the template process, and with workers that are new processes."""
    monkeypatch.setenv("ELASTICSTATE_TEMPLATE", "1" if request.param == "forked" else "0")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def survived(job: Job, faults: int | None = None, generations: int = 2) -> None:
    job.finish(0)
    job.check_survival(faults)
    assert len(job.events("world_formed")) >= generations, job.events("world_formed")


@pytest.mark.parametrize("rank", [1, 0], ids=["middle", "rank0"])
def test_one_worker_is_killed_from_outside(tmp_path: Path, rank: int) -> None:
    with Job(tmp_path, "-np", "3", "--min-np", "2", *FAST, steps=60) as job:
        job.wait_for_step(10)
        kill(job.pid_of(rank))
        exited = job.wait_for_event("worker_exited", signal=9)
        assert exited["rank"] == rank
        survived(job)
        resumed = job.events("training_resumed")
        assert resumed
        assert resumed[0]["ticks_lost"] <= 1


def test_three_of_four_are_killed_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "4", "--min-np", "1", *FAST, steps=60) as job:
        job.wait_for_step(10)
        for pid in [job.pid_of(rank) for rank in (0, 1, 2)]:
            kill(pid)
        job.wait_for_event("worker_exited", 3, signal=9)
        survived(job)


@pytest.mark.parametrize(
    "fault",
    [
        "kill@init:rank=1:generation=2",
        "kill@store:rank=1:generation=2",
        "kill@store:rank=0:generation=2",
        "kill@init:rank=0:generation=2",
        "kill@new_group:rank=1:generation=2",
        "kill@sync:rank=0:generation=1",
        "kill@sync:rank=1:generation=1",
        "kill@callback:rank=1:generation=2",
        "kill@leave:rank=1:generation=1",
        "kill@leave:rank=0:generation=1",
        "segv@30:rank=1",
    ],
)
def test_a_second_worker_dies_while_the_world_regroups(tmp_path: Path, fault: str) -> None:
    script = {"callback": True} if "callback" in fault else {}
    first = [] if ":generation=1" in fault and "sync" in fault else ["kill@10:rank=2"]
    with Job(tmp_path, "-np", "4", "--min-np", "1", *FAST, steps=60, fault=[*first, fault], **script) as job:
        survived(job, faults=len(first) + 1)


def test_a_second_death_twenty_milliseconds_after_the_first(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "4", "--min-np", "1", *FAST, steps=60) as job:
        job.wait_for_step(10)
        first, second = job.pid_of(1), job.pid_of(2)
        kill(first)
        threading.Event().wait(0.02)  # the fault itself: a second death during the recovery
        kill(second)
        job.wait_for_event("worker_exited", 2, signal=9)
        survived(job)


def test_an_exception_in_one_worker_restarts_its_slot_alone(tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "2", *FAST)
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", fault=["raise@20:rank=1"]) as job:
        exited = job.wait_for_event("worker_exited", exit_code=1)
        assert exited["rank"] == 1
        job.wait_for_event("world_formed", size=3, generation=3)
        job.stop_file.touch()
        survived(job, faults=1, generations=3)
        assert len(job.events("worker_exited")) == 1 + 3


def test_an_exception_in_all_workers_at_one_step_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "3", "--min-np", "1", *FAST, steps=300, fault=["raise@20"]) as job:
        job.finish(1)
        assert job.fired() == 3
        assert "ValueError: a bug of the user's at step" in job.output.splitlines()[-1]
        assert len(job.events("world_formed")) == 1, "the job must not spin"


@pytest.mark.parametrize("what", ["exit0", "exit3"])
def test_a_worker_that_exits_in_mid_training_is_a_failure_whatever_its_status(tmp_path: Path, what: str) -> None:
    with Job(tmp_path, "-np", "3", "--min-np", "2", *FAST, steps=60, fault=[f"{what}@20:rank=1"]) as job:
        job.wait_for_event("worker_exited", exit_code=0 if what == "exit0" else 3)
        survived(job, faults=1)


def test_a_worker_dies_while_others_wait_in_the_exit_gate(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "3", "--min-np", "2", *FAST, steps=30, fault=["kill@gate:rank=1"]) as job:
        survived(job, faults=1)
        again = [e for e in job.log("enter") if e["generation"] == 2]
        assert again
        assert all(e["step"] == 30 for e in again)


def test_a_script_that_wraps_every_exception_survives(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "3", "--min-np", "2", *FAST, steps=60, fault=["kill@20:rank=1"], wrap=True) as job:
        survived(job, faults=1)


def test_no_partial_gradient_survives_a_failure_in_backward(tmp_path: Path) -> None:
    fault = ["kill@backward:step=20:rank=1"]
    with Job(tmp_path, "-np", "3", "--min-np", "2", *FAST, steps=60, fault=fault, zero_grad_last=True) as job:
        survived(job, faults=1)


def test_a_second_failure_restores_the_commit_and_not_what_the_optimizer_wrote(tmp_path: Path) -> None:
    faults = ["kill@23:rank=1", "kill@33:rank=1"]
    with Job(tmp_path, "-np", "4", "--min-np", "2", *FAST, steps=60, fault=faults, commit_every=5) as job:
        survived(job, faults=2, generations=3)


@pytest.mark.parametrize("commit_every", [1, 7], ids=["commit_tick", "check_only_tick"])
def test_a_worker_dies_between_an_interrupt_and_its_ready(tmp_path: Path, commit_every: int) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    options = ("-np", "2", "--min-np", "1", *hosts.options, *FAST)
    stop = tmp_path / "stop"
    fault = ["kill@leave:rank=1:generation=1"]
    with Job(tmp_path, *options, steps=40, fault=fault, commit_every=commit_every, until=stop) as job:
        job.wait_for_step(7)
        hosts.set("localhost:3")
        job.wait_for_event("worker_exited", signal=9)
        job.wait_for_event("world_formed", generation=2)
        stop.touch()
        survived(job, faults=1)


def test_a_host_is_removed_by_discovery(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2", "127.0.0.2:1")
    with Job(tmp_path, "-np", "3", "--min-np", "1", *hosts.options, *FAST, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(10)
        hosts.set("localhost:2")
        left = job.wait_for_event("worker_exited", host="127.0.0.2")
        assert left["exit_code"] == 0
        job.wait_for_event("training_resumed")
        job.stop_file.touch()
        survived(job)
        assert job.events("training_resumed")[0]["ticks_lost"] == 0
        assert [e["size"] for e in job.events("world_formed")] == [3, 2]


def test_slots_of_a_host_are_reduced_and_rank0_goes(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1", "127.0.0.2:2")
    with Job(tmp_path, "-np", "3", "--min-np", "1", *hosts.options, *FAST, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(10)
        hosts.set("127.0.0.2:1")
        job.wait_for_event("world_formed", size=1)
        job.stop_file.touch()
        survived(job)
        assert {e["exit_code"] for e in job.events("worker_exited")} == {0}


def test_a_newcomer_knows_before_it_is_ready_how_much_a_commit_takes(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1")
    told = ["sh", "-c", 'echo "room for $ELASTICSTATE_RESERVE_BYTES bytes"; exec "$@"', "sh"]
    options = ("-np", "1", *hosts.options, *FAST)
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", before=told) as job:
        job.wait_for_step(10)
        hosts.set("localhost:2")
        joined = job.wait_for_event("sync", generation=2)
        job.wait_for_event("training_resumed")
        job.stop_file.touch()
        survived(job)
        room = max(int(said) for said in re.findall(r"room for (\d+) bytes", job.output))
        assert room >= 0.9 * joined["bytes"]


def test_a_host_is_added_while_another_worker_dies(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    with Job(tmp_path, "-np", "2", "--min-np", "1", *hosts.options, *FAST, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(10)
        hosts.set("localhost:2", "127.0.0.2:1")
        job.wait_for_event("host_added", host="127.0.0.2")
        kill(job.pid_of(1))
        job.wait_for_event("worker_exited", signal=9)
        job.wait_for_event("world_formed", size=3)
        job.stop_file.touch()
        survived(job)


def test_newcomers_that_crash_while_importing_disturb_nobody(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    options = ("-np", "2", "--min-np", "1", *hosts.options, *FAST)
    crash = 'case "$ELASTICSTATE_WORKER" in 127.0.0.2:*) exec "$1" -c "import no_such_module";; esac; exec "$@"'
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", before=["sh", "-c", crash, "sh"]) as job:
        job.wait_for_step(10)
        hosts.set("localhost:2", "127.0.0.2:1")
        job.wait_for_event("worker_exited", 2, host="127.0.0.2", exit_code=1)
        job.stop_file.touch()
        survived(job, generations=1)
        assert len(job.events("world_formed")) == 1
        assert "No module named 'no_such_module'" in job.output


def test_too_few_workers_for_too_long_is_an_error_that_names_what_is_missing(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1", "127.0.0.2:1")
    options = ("-np", "2", *hosts.options, *FAST, "--elastic-timeout", "1")
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(10)
        hosts.set("localhost:1")
        job.finish(1)
        assert "--elastic-timeout" in job.output.splitlines()[-1]
        assert "127.0.0.2" in job.output.splitlines()[-1]


def test_an_agent_killed_with_sigkill_takes_its_workers_along_and_the_others_go_on(tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "1", "-H", "localhost:2,127.0.0.2:1", "--cooldown-range", "1", "2")
    with Job(tmp_path, *options, *FAST, steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(10)
        agent = job.wait_for_event("agent_joined", host="127.0.0.2")["pid"]
        kill(agent)
        job.wait_for_event("agent_lost", host="127.0.0.2")
        job.wait_for_event("world_formed", size=2)
        job.wait_for_event("host_cooldown", host="127.0.0.2")
        job.wait_for_event("world_formed", size=3, generation=3)
        job.stop_file.touch()
        survived(job, generations=3)
