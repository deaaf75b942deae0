"""Jobs whose workers fail before any worker was READY: the output has each error once, and the root cause last."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.elasticrun import running

NEEDS_MOUNTS = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts need root and unshare"
)


def test_a_command_that_fails_at_once_ends_the_job_with_its_error_once_per_worker_and_last(tmp_path: Path) -> None:
    script = "raise KeyError('the cause')"
    with running(tmp_path, "-np", "2", sys.executable, "-c", script) as job:
        status, _, stderr = job.end()
    assert status == 3
    first, _, last = stderr.partition("elasticrun: root cause: ")
    assert first.count("KeyError: 'the cause'") == len(job.events("worker_started"))
    lines = last.splitlines()
    assert lines[0].startswith("every worker failed before the first world; first failure: localhost:")
    assert lines[1] == "elasticrun:   Traceback (most recent call last):"
    assert lines[-1] == "elasticrun:   KeyError: 'the cause'"
    assert last.count("KeyError: 'the cause'") == last.count("exited with 1") == 1
    assert job.events("root_cause")[0]["exit_code"] == 1


def test_a_command_that_is_not_found_ends_the_job_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "1", "no-such-command") as job:
        status, _, stderr = job.end()
    assert status == 3
    assert [event["worker"] for event in job.events("worker_started")] == ["localhost:0#1"]
    assert stderr.partition("elasticrun: root cause: ")[2].splitlines() == [
        "every worker failed before the first world; first failure: localhost:0#1 exited with 127",
        "elasticrun:   elasticstate: cannot run 'no-such-command': No such file or directory",
    ]


def test_all_workers_restart_when_one_fails_while_another_boots(tmp_path: Path) -> None:
    script = "case $ELASTICSTATE_WORKER in localhost:0:*) exec sleep 60;; esac; echo 'the cause' >&2; exit 7"
    with running(tmp_path, "-np", "2", "sh", "-c", script) as job:
        status, _, stderr = job.end()
    assert status == 3
    started = [event["worker"] for event in job.events("worker_started")]
    assert started[2:] == [f"localhost:{slot}#{number}" for number in (2, 3) for slot in (0, 1)]
    assert stderr.partition("elasticrun: root cause: ")[2].splitlines() == [
        "1 slot failed 3 times in a row before the first world; first failure: localhost:1#1 exited with 7",
        "elasticrun:   the cause",
    ]


@NEEDS_MOUNTS
def test_a_worker_that_cannot_be_started_is_retried_and_the_reason_is_in_one_line(tmp_path: Path) -> None:
    """The commit directory is full: the agent cannot make the pages of the workers."""
    elasticrun = f"{sys.executable} -m elasticstate -np 2 --commit-dir . sleep 60"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size=4k none . && cd . && exec {elasticrun}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    cause = done.stderr.partition("elasticrun: root cause: ")[2].splitlines()
    assert len(cause) == 1, done.stderr
    assert "slot failed 3 times in a row" in cause[0].replace("slots", "slot")
    assert "could not be started: cannot allocate" in cause[0]
