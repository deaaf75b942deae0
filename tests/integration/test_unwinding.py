"""Scripts that change values, catch the interrupt or go on, while the interrupt of a planned change leaves them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Hosts, Job

CHANGES = ("finally", "numpy", "random", "collective", "weights", "generator", "cycle", "again")
CATCHES = ("swallowed", "return")


def run(directory: Path, mode: str, *more: str) -> Job:
    """Run a job that one worker joins."""
    directory.mkdir(exist_ok=True)
    hosts = Hosts(directory).set("localhost:2")
    command = [sys.executable, str(SCRIPTS / "unwinding.py"), str(directory / "logs"), mode]
    options = ("-np", "2", "--min-np", "2", "--max-np", "3", "--join-window", "0.1", "--min-interrupt-distance", "0.2")
    with Job(directory, *options, "--verify-sync", *hosts.options, *more, command=command) as job:
        job.wait_for("steps", lambda: len(job.log("enter")) == 2)
        hosts.set("localhost:3")
        job.finish(timeout=90)
    return job


def joined(directory: Path, mode: str) -> Job:
    """Run a job that one worker joins. Check that all members begin the second world with the same state."""
    job = run(directory, mode)
    entered = [line for line in job.log("enter") if line["generation"] == 2]
    assert len(entered) == 3, job.output
    assert len({line["digest"] for line in entered}) == 1, entered
    ends = job.log("end")
    assert len(ends) == 3
    assert len({line["digest"] for line in ends}) == 1
    assert not job.events("generation_failed")
    return job


@pytest.mark.parametrize("mode", CHANGES)
def test_all_begin_with_the_commit_whatever_the_script_changes_afterwards(mode: str, tmp_path: Path) -> None:
    job = joined(tmp_path, mode)
    assert job.output.count("was changed after commit (1, ") == 2


@pytest.mark.parametrize("mode", CATCHES)
def test_an_interrupt_that_the_script_catches_is_raised_again(mode: str, tmp_path: Path) -> None:
    job = joined(tmp_path, mode)
    assert job.log("caught")
    assert job.output.count("the script has caught the exception that ends generation 1") == 2


def test_a_worker_whose_script_always_catches_the_interrupt_is_replaced(tmp_path: Path) -> None:
    job = run(tmp_path, "always", "--regroup-timeout", "2")
    assert job.output.count("this worker is restarted: the script has caught the end of its world") == 2
    for generation in {line["generation"] for line in job.log("enter")}:
        assert len({line["digest"] for line in job.log("enter") if line["generation"] == generation}) == 1


def test_a_script_that_changes_nothing_restores_nothing(tmp_path: Path) -> None:
    assert "was changed after" not in joined(tmp_path, "nothing").output


@pytest.mark.parametrize("mode", ["finally", "numpy", "collective", "weights", "generator", "cycle", "again", *CATCHES])
def test_between_two_commits_all_begin_with_the_same_state(mode: str, tmp_path: Path) -> None:
    """The changes that the script makes while the interrupt leaves it are saved then."""
    joined(tmp_path, f"{mode}-between_commits")
