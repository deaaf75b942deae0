"""A worker that joins a world before it makes a state: its allowed operations, and the failures that it survives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Job

OPTIONS = ("-np", "2")


def command(log: Path, dies: str, *more: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "ahead.py"), "--log", str(log), "--dies", dies, *more]


def entered(job: Job, incarnation: int, slot: int = 1) -> list[int]:
    lines = job.log("enter")
    return [line["step"] for line in lines if (line["slot"], line["incarnation"]) == (slot, incarnation)]


@pytest.mark.parametrize("dies", ["at the top", "with all"])
def test_a_job_goes_on_wherever_a_worker_dies(tmp_path: Path, dies: str) -> None:
    with Job(tmp_path, *OPTIONS, command=command(tmp_path / "logs", dies)) as job:
        job.finish(0)
        assert len(job.log("dies")) == (2 if dies == "with all" else 1)
        assert [line["weight"] for line in job.log("final")] == pytest.approx([20, 20])
        second = entered(job, 2)
        if dies == "at the top":
            assert entered(job, 1) == []
            assert second[0] == 0
        else:
            assert second[0] >= 9, "from its own memory"
        assert [line["generation"] for line in job.log("top") if line["incarnation"] == 1] == [1, 1]


def test_commits_that_were_told_of_and_are_damaged_are_made_up_for(tmp_path: Path) -> None:
    with Job(tmp_path, *OPTIONS, command=command(tmp_path / "logs", "in training", "--damages")) as job:
        job.finish(0)
        assert job.output.count("discarded damaged commit") == 2
        generations = [line["generation"] for line in job.log("enter") if line["incarnation"] == 2]
        assert generations[0] > 2, "not in the world that was told of them"
        assert [line["weight"] for line in job.log("final")] == pytest.approx([20, 20])


def test_a_newcomer_may_not_call_collectives_at_the_top(tmp_path: Path) -> None:
    with Job(tmp_path, *OPTIONS, command=command(tmp_path / "logs", "in training", "--collective")) as job:
        job.finish(3)
        assert len(job.log("dies")) == 1
        assert "UsageError: A new worker called a collective before the function decorated with run" in job.output
