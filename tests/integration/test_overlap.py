"""Jobs whose tensors are on a device that copies slowly (scripts/slow_device.py), so that faults strike in mid-copy."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.kit.job import Hosts, Job
from tests.kit.series import Errors, Series, faults_file, one_after_the_other

FAST = ("--join-window", "30", "--min-interrupt-distance", "0.5")
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


STRIKES = {
    "one is killed": ["kill@step:rank=0:generation={now}"],
    "one raises": ["raise@step:rank=1:generation={now}"],
    "one is killed in backward": ["kill@backward:rank=1:generation={now}"],
    "a second one fails in the recovery": ["kill@step:rank=2:generation={now}", "kill@leave:rank=1:generation={now}"],
}


@pytest.fixture(scope="module")
def struck(runtime_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Let failures strike one after the other at one job of four workers."""
    folder = tmp_path_factory.mktemp("series")
    options = ("-np", "4", "--min-np", "1", *FAST, "--cooldown-range", "0", "0")
    script = {"steps": 10, "until": folder / "stop", "slow_device": PACE_S, "faults_file": faults_file(folder)}
    with Job(folder, *options, **script) as job:
        series = Series(job, 4)

        def one(fault: str) -> None:
            series.strike(*STRIKES[fault], deaths=len(STRIKES[fault]))
            if fault == list(STRIKES)[-1]:
                job.stop_file.touch()
                job.finish()
                job.check_survival(series.fired)

        return one_after_the_other(STRIKES, one)


@pytest.mark.parametrize("fault", STRIKES)
def test_failures_in_mid_copy(struck: Errors, fault: str) -> None:
    struck.check(fault)


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
