"""Scripts that catch the errors of collectives: no step that was not trained becomes a commit, whatever they catch."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Job

STEPS = 20
COLLECTIVES = ("backward", "reduce", "late", "subgroup", "objects", "monitored", "thread", "point")
HANDLERS = ("suppress", "repeat", "commits", "gate")


def run(directory: Path, mode: str, *options: str) -> Job:
    command = [sys.executable, str(SCRIPTS / "swallowing.py"), str(directory / "logs"), mode]
    with Job(directory, "-np", "3", "--min-np", "2", *options, command=command) as job:
        job.finish(timeout=90)
    ends = job.log("end")
    assert len(ends) == job.events("world_formed")[-1]["size"], job.output
    assert [(line["missing"], line["trained"]) for line in ends] == [([], STEPS)] * len(ends), job.output
    entered = {line["generation"]: [] for line in job.log("enter")}
    for line in job.log("enter"):
        entered[line["generation"]].append(line["trained"])
    assert all(lists == [list(range(len(lists[0])))] * len(lists) for lists in entered.values()), entered
    return job


@pytest.mark.parametrize("mode", [*COLLECTIVES, *HANDLERS])
def test_no_step_is_committed_whose_collective_has_failed(mode: str, tmp_path: Path) -> None:
    job = run(tmp_path, mode)
    assert len(job.events("world_formed")) > 1
    assert job.log("caught") or mode == "suppress"


@pytest.mark.parametrize("mode", ["backward-seldom", "repeat-seldom"])
def test_no_step_is_recorded_whose_collective_has_failed(mode: str, tmp_path: Path) -> None:
    run(tmp_path, mode)


def test_a_collective_that_was_late_has_failed(tmp_path: Path) -> None:
    job = run(tmp_path, "timeout", "--collective-timeout", "2")
    assert len(job.events("world_formed")) > 1


def test_a_script_that_tries_again_for_ever_is_replaced(tmp_path: Path) -> None:
    """It never comes to the end of a tick, where it would get another error."""
    job = run(tmp_path, "ever", "--regroup-timeout", "8")
    assert "the script has caught the error of a collective, and has gone on without a tick" in job.output
    assert re.search(r"failed \d+ s ago, and the script goes on without a tick\..* after 8 s this worker", job.output)


@pytest.mark.parametrize("mode", ["own", "ended"])
def test_other_errors_and_the_end_of_a_group_are_no_failures(mode: str, tmp_path: Path) -> None:
    job = run(tmp_path, mode)
    assert len(job.events("world_formed")) == 1
