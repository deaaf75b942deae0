"""Jobs whose tensors are on a device that copies slowly (scripts/slow_device.py), so that faults strike in mid-copy."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from job import Hosts, Job

FAST = ("--failure-grace", "0.5", "--join-window", "30", "--min-interrupt-distance", "0.5")
STEPS = 60
PACE_S = 0.004  # per tensor, of eight: a commit takes as long as several steps


def weights(job: Job) -> set[str]:
    return {line["digest"] for line in job.log("final")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the final weights of an undisturbed job without such a device."""
    with Job(tmp_path_factory.mktemp("undisturbed"), "-np", "2", steps=STEPS) as job:
        job.finish()
        return weights(job)


def test_all_are_killed_in_mid_copy_and_the_weights_are_those_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: set[str]
) -> None:
    faults = [f"kill@{step}:rank={rank}" for step in (9, 18, 31) for rank in (0, 1)]
    options = ("-np", "2", "--join-window", "60")
    with Job(tmp_path, *options, steps=STEPS, slow_device=PACE_S, fault=faults) as job:
        job.finish(timeout=120)
    assert weights(job) == undisturbed
    begun = [line["step"] for line in job.log("enter") if line["generation"] > 1]
    assert 0 not in begun, "each time from memory"
    assert {8, 17, 30} & set(begun), "the commit that was on its way was none"


@pytest.mark.parametrize("fault", ["kill@20:rank=0", "raise@20:rank=1", "kill@backward:step=20:rank=1"])
def test_one_fails_in_mid_copy(fault: str, tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "3", "--min-np", "2", *FAST, steps=40, slow_device=PACE_S, fault=[fault]) as job:
        job.finish()
        job.check_survival(1)
        assert len(job.events("world_formed")) >= 2


@pytest.mark.parametrize("commit_every", [1, 7], ids=["commit_tick", "check_only_tick"])
def test_a_planned_change_in_mid_copy_loses_nothing(commit_every: int, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    options = ("-np", "2", "--min-np", "1", *hosts.options, *FAST)
    script = {"steps": 20, "until": tmp_path / "stop", "slow_device": PACE_S, "commit_every": commit_every}
    with Job(tmp_path, *options, **script) as job:
        job.wait_for_step(7)
        hosts.set("localhost:3")
        job.wait_for_event("world_formed", size=3)
        job.wait_for_event("training_resumed")
        os.kill(job.pid_of(1), signal.SIGTERM)  # drains the worker
        job.wait_for_event("training_resumed", 2)
        job.stop_file.touch()
        job.finish()
        job.check_survival()
        assert [event["ticks_lost"] for event in job.events("training_resumed")][:2] == [0, 0]


def test_a_second_failure_in_the_recovery_from_the_first(tmp_path: Path) -> None:
    faults = ["kill@20:rank=2", "kill@leave:rank=1:generation=1"]
    with Job(tmp_path, "-np", "4", "--min-np", "1", *FAST, steps=40, slow_device=PACE_S, fault=faults) as job:
        job.finish()
        job.check_survival(2)
