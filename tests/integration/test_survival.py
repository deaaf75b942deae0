"""Real workers die in every way and place. The others continue, and no commit is lost.

Most deaths strike one after the other at one job (deaths.py), with a test for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deaths import FAST, STRIKES, kill, struck_by_all
from job import Hosts, Job
from series import Errors


@pytest.fixture(autouse=True, scope="module", params=["forked", "new-process"])
def _start_of_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with workers that fork from the template process, and with workers that are new processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTICSTATE_TEMPLATE", "1" if request.param == "forked" else "0")
        yield


def survived(job: Job, faults: int | None = None, generations: int = 2) -> None:
    job.finish(0)
    job.check_survival(faults)
    assert len(job.events("world_formed")) >= generations, job.events("world_formed")


# ------------------------------------------------------------------------------ deaths one after the other at one job


@pytest.fixture(scope="module")
def struck(_start_of_workers: None, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    return struck_by_all(tmp_path_factory.mktemp("series"))


@pytest.mark.parametrize("death", STRIKES)
def test_the_others_continue(struck: Errors, death: str) -> None:
    struck.check(death)


# ---------------------------------------------------------------------------------------------------- jobs of their own


def test_the_root_and_then_a_receiver_die_in_the_first_sync(tmp_path: Path) -> None:
    """There is no commit yet: both worlds begin with a sync from rank 0."""
    faults = ["kill@sync:rank=0:generation=1", "kill@sync:rank=1:generation=2"]
    with Job(tmp_path, "-np", "4", "--min-np", "1", *FAST, steps=60, fault=faults) as job:
        survived(job, faults=2, generations=3)


def test_an_exception_in_all_workers_at_one_step_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "3", "--min-np", "1", *FAST, steps=300, fault=["raise@20"]) as job:
        job.finish(1)
        assert job.fired() == 3
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
