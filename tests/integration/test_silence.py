"""A hang with default options, and a job that never commits, are not silent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Job

TWO = ("-np", "2", "--min-np", "1")


def silent(folder: Path, kind: str) -> Job:
    name = ("--job-name", f"silent-{kind}")
    return Job(folder, *TWO, *name, command=[sys.executable, str(SCRIPTS / "silent.py"), kind, str(folder)])


def status_of(kind: str) -> str:
    command = [sys.executable, "-m", "elasticstate", "status", f"silent-{kind}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def goodput(status: str) -> float:
    (share,) = re.findall(r"goodput (\d+\.\d)%", status)
    return float(share)


def test_a_hang_is_reported_with_the_lines_of_code_and_counts_as_no_goodput(tmp_path: Path) -> None:
    """Default options, so this takes a minute. Two jobs hang at once: one goes on, the other does not."""
    (tmp_path / "barrier").mkdir()
    (tmp_path / "loop").mkdir()
    with silent(tmp_path / "barrier", "barrier") as job, silent(tmp_path / "loop", "loop") as other:
        job.wait_for("the report", lambda: job.events("no_tick"), 120)
        (event,) = job.events("no_tick")
        assert event["ticks"] == 6
        assert event["seconds"] >= 60
        line = rf"{SCRIPTS}/silent.py:\d+ in"
        assert re.fullmatch(rf"{line} hang: dist\.barrier\(\)", event["lines"]["0"])
        assert re.fullmatch(rf"{line} train: dist\.all_reduce\(torch\.ones\(3\)\)", event["lines"]["1"])
        text = r"elasticrun: warning: no tick for 6\d s, after 6 ticks of generation 1: rank 0 is at /"
        job.wait_for("the warning", lambda: re.search(text, job.output), 20)
        assert "is barrier on rank 0 and all_reduce on rank 1" in job.output
        status = status_of("barrier")
        assert re.search(r"^job \S+: RUNNING\(1\) for [\d.]+ s; no tick for 6\d s$", status, re.MULTILINE)
        assert re.search(r"^  no tick for 6\d s: rank 0 is at ", status, re.MULTILINE)
        assert goodput(status) < 20
        assert not job.events("end")

        other.wait_for("the report", lambda: other.events("no_tick"), 60)
        (event,) = other.events("no_tick")
        assert (event["entered"], event["missing"], list(event["stacks"])) == ([0], [1], ["0", "1"])
        assert re.fullmatch(rf"{line} hang: time\.sleep\(0\.1\)", event["lines"]["1"])
        (tmp_path / "loop" / "go on").touch()
        other.finish()
        (ended,) = other.events("no_tick_ended")
        assert (ended["reason"], ended["goes_on"]) == ("ticks go on", True)
        assert re.search(r"elasticrun: ticks go on after \d\d s without a tick", other.output)
        (finished,) = other.events("job_finished")
        assert abs(finished["goodput_s"] + sum(finished["badput_s"].values()) - finished["wall_s"]) < 1e-3


@pytest.mark.parametrize("kind", ["ticks", "nothing"])
def test_work_that_no_commit_holds_is_named_when_a_failure_loses_it(tmp_path: Path, kind: str) -> None:
    with silent(tmp_path, kind) as job:
        job.finish()
    (finished,) = job.events("job_finished")
    assert len(re.findall(r"starts at step (\d+)", job.output)) == job.output.count("starts at step 0") >= 3
    assert 1.4 < finished["uncommitted_s"] < finished["wall_s"], "30 steps of 0.05 s at least"
    assert re.search(r"s of training lost because nothing was committed", job.output)
    if kind == "nothing":
        assert finished["lower_bounds"] == ["ticks_lost"]
        assert "warning: generation 2 begins from scratch: generation 1 made no tick and no commit" in job.output
        assert "an unknown number of steps redone" in job.output
    else:
        (resumed,) = job.events("training_resumed")
        assert (resumed["ticks_lost"], resumed["lower_bounds"]) == (29, [])
        assert re.search(r"training resumed after [\d.]+ s, 0 commits lost, 29 ticks redone, \d", job.output)
