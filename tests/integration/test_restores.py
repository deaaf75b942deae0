"""Scripts that call ``state.restore()``: all ranks go back to the same commit, even if one commit is damaged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Job


def run(directory: Path, damaged: str, *options: str) -> Job:
    command = [sys.executable, str(SCRIPTS / "restoring.py"), str(directory / "logs"), damaged]
    with Job(directory, "-np", "2", *options, command=command) as job:
        job.finish(timeout=90)
    for what in ("enter", "end"):
        for generation in {line["generation"] for line in job.log(what)}:
            lines = [line for line in job.log(what) if line["generation"] == generation]
            assert len(lines) == 2, job.output
            assert len({(line["step"], line["weights"]) for line in lines}) == 1, lines
    return job


@pytest.mark.parametrize(("damaged", "step"), [("0", 6), ("1", 6), ("0,1", 5)])
def test_if_a_commit_is_damaged_the_world_forms_again_from_one_commit(damaged: str, step: int, tmp_path: Path) -> None:
    job = run(tmp_path, damaged)
    assert [line["generation"] for line in job.log("enter")] == [1, 1, 2, 2]
    assert {line["step"] for line in job.log("enter") if line["generation"] == 2} == {step}


@pytest.mark.parametrize(("damaged", "step"), [("none", 6), ("none-between", 6)])
def test_else_all_restore_the_newest_commit_and_go_on(damaged: str, step: int, tmp_path: Path) -> None:
    job = run(tmp_path, damaged)
    assert len(job.events("world_formed")) == 1
    assert [line["step"] for line in job.log("restored")] == [step, step]


def test_a_rank_that_restores_alone_waits_and_its_line_is_named(tmp_path: Path) -> None:
    job = run(tmp_path, "alone", "--hang-timeout", "3")
    assert len(job.events("hang")) == 1
    assert job.log("restored") == []
    assert "state.restore()" in job.output
    assert [line["generation"] for line in job.log("enter")] == [1, 1, 2, 2]
