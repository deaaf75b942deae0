"""Preemption notices: the host drains by one interrupt, loses no tick, and then enters its preemption cooldown."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit.job import Hosts, Job, Line

TWO = ("localhost", "127.0.0.2")
THREE = (*TWO, "127.0.0.3")
FAST = ("--min-np", "1", "--min-interrupt-distance", "0.2")


def notice_command(directory: Path) -> tuple[str, str]:
    """Return the options for a command that announces the preemption of each host for which a file exists."""
    given = f'test -e "{directory}/notice-$ELASTICSTATE_HOST" && echo "spot instance: terminate at noon"'
    return "--preemption-command", f"sh -c '{given}'"


def all_train(job: Job, number: int) -> None:
    job.wait_for(f"{number} workers that train", lambda: len(job.log("enter")) == number)


def agent_of(job: Job, host: str) -> int:
    return int(next(event["pid"] for event in job.events("agent_joined") if event["host"] == host))


def drained(job: Job, hosts: Sequence[str], *leavers: str) -> Line:
    """Check the only end of generation 1: planned, all workers leave at its tick, and the drained ones exit with 0."""
    resumed = job.wait_for_event("training_resumed")
    assert resumed["ticks_lost"] == 0
    (end,) = job.events("end")
    assert isinstance(end["at"], int)
    formed = job.events("world_formed")
    assert [world["size"] for world in formed] == [len(hosts), len(hosts) - len(leavers)]
    assert {worker.partition(":")[0] for worker in formed[1]["left"]} == set(leavers)
    assert {line["step"] for line in job.log("enter") if line["generation"] == 2} == {end["at"]}
    for host in leavers:
        assert job.wait_for_event("worker_exited", host=host)["exit_code"] == 0
    return end


def ends_well(job: Job) -> None:
    job.stop_file.touch()
    job.finish(0)
    job.check_survival()
    assert job.events("agent_lost") == []


def test_a_notice_command_drains_its_host_and_discovery_may_name_it_anew(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set(*TWO)
    options = ("-np", "2", *FAST, *hosts.options, *notice_command(tmp_path))
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", commit_every=50) as job:
        all_train(job, 2)
        (tmp_path / "notice-127.0.0.2").touch()
        end = drained(job, TWO, "127.0.0.2")
        reason = "spot instance: terminate at noon"
        assert job.wait_for_event("host_draining")["reason"] == reason
        assert end["cause"] == f"127.0.0.2:0#1 drains: preemption notice: {reason}"
        is_in_preemption_cooldown = job.wait_for_event("host_cooldown", host="127.0.0.2", seconds=600.0)
        later = is_in_preemption_cooldown["time"] + 2.5  # without the cooldown, its agent would join within a second
        job.wait_for("training to go on", lambda: any(line["time"] > later for line in job.log("commit")))
        assert len(job.events("agent_joined")) == 2, "the host is not used, although discovery names it"
        (tmp_path / "notice-127.0.0.2").unlink()
        hosts.set("localhost")
        job.wait_for_event("host_removed")
        hosts.set(*TWO)
        job.wait_for_event("world_formed", size=2, generation=3)
        ends_well(job)
    assert f"elasticrun: host 127.0.0.2 drains: preemption notice: {reason}" in job.output


@pytest.mark.parametrize("by_command", [False, True], ids=["signal", "command"])
def test_hosts_with_notice_within_a_second_cost_one_interrupt(tmp_path: Path, by_command: bool) -> None:
    options = ("-np", "3", *FAST, "-H", ",".join(THREE), *notice_command(tmp_path))
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", commit_every=50) as job:
        all_train(job, 3)
        for host in THREE[1:]:
            if by_command:  # it runs at nearly the same time on both hosts
                (tmp_path / f"notice-{host}").touch()
            else:
                os.kill(agent_of(job, host), signal.SIGTERM)
                job.wait_for_event("host_draining", host=host)
                time.sleep(0.3)
        end = drained(job, THREE, *THREE[1:])
        first, second = job.events("host_draining")
        assert second["time"] - first["time"] < 1.0 < end["time"] - first["time"]
        ends_well(job)


def test_a_worker_with_notice_by_another_signal_drains(tmp_path: Path) -> None:
    options = ("-np", "2", *FAST, "-H", ",".join(TWO), "--preemption-signals", "SIGUSR1,XCPU")
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", commit_every=50) as job:
        all_train(job, 2)
        os.kill(job.pid_of(1), signal.SIGXCPU)
        end = drained(job, TWO, TWO[1])
        assert end["cause"] == "127.0.0.2:0#1 drains: preemption notice: SIGXCPU to the worker"
        ends_well(job)
