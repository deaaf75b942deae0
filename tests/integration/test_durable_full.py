"""Durable copies on a disk that is full: when the job starts, for a while, and when it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elasticstate.durable.stored_copies import MANIFEST
from tests.kit.job import Job, Line

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted by root")

INTERVAL_S = 1.0
OPTIONS = ("-np", "1", "--durable-interval", str(INTERVAL_S), "--durable-keep", "2", "--driver-timeout", "3")
SLACK_S = 3.0  # a process has to start
SCRIPT = {"step_seconds": 0.02}


class SmallDisk:
    """A disk with space for five copies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(path)], check=True)

    def fill(self) -> None:
        with open(self.path / "filler", "ab", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(1 << 12))

    def free(self) -> None:
        (self.path / "filler").unlink()

    def copies(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("commit-*"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    path = tmp_path / "disk"
    path.mkdir()
    yield SmallDisk(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def copies(job: Job, state: str) -> list[Line]:
    return [event for event in job.events("durable_copy") if event["state"] == state]


def seconds_until(job: Job, what: str, condition: Callable[[], object]) -> float:
    begun = time.monotonic()
    job.wait_for(what, condition)
    return time.monotonic() - begun


def test_copies_resume_after_a_full_disk_and_the_end_says_what_is_not_saved(tmp_path: Path, disk: SmallDisk) -> None:
    disk.fill()
    with Job(tmp_path, *OPTIONS, "--durable-dir", str(disk.path), **SCRIPT, until=tmp_path / "never") as job:
        job.wait_for("two failures", lambda: len(copies(job, "failed")) >= 2)
        assert {event["kind"] for event in copies(job, "failed")} == {"full"}
        disk.free()
        assert seconds_until(job, "a copy", lambda: copies(job, "saved")) < 2 * INTERVAL_S + SLACK_S

        failed, saved = len(copies(job, "failed")), len(copies(job, "saved"))
        disk.fill()
        job.wait_for("failures", lambda: len(copies(job, "failed")) >= failed + 2)
        assert all((disk.path / copy / MANIFEST).exists() for copy in disk.copies()[:-1]), "failed ones are removed"
        disk.free()
        assert seconds_until(job, "a copy", lambda: len(copies(job, "saved")) > saved) < 2 * INTERVAL_S + SLACK_S

        disk.fill()
        step = max(int(line["step"]) for line in job.log("commit"))
        job.wait_for_step(step + 5)
        newest = copies(job, "saved")[-1]
        job.process.send_signal(signal.SIGTERM)
        job.finish(status=128 + signal.SIGTERM)
    commit = re.escape(str(tuple(newest["commit"])))
    assert re.search(
        rf"the last commit of the job, (\(1, \d+\)), is not saved: .*No space left.*\. The newest copy, "
        rf"{newest['folder']}, is \d+ s old and has commit {commit}: a job that resumes begins there",
        job.output,
    )
    assert re.search(r"was stopped by SIGTERM .*; the last commit, \(1, \d+\), is not saved", job.output), job.output


def test_the_last_commit_is_saved_when_the_disk_has_space_again(tmp_path: Path, disk: SmallDisk) -> None:
    disk.fill()
    options = (*OPTIONS, "--driver-timeout", "60", "--durable-dir", str(disk.path))
    with Job(tmp_path, *options, **SCRIPT, steps=20) as job:
        job.wait_for("the first attempt", lambda: "is not saved yet" in job.output)
        disk.free()
        job.finish()
        assert len(copies(job, "saved")) == 1
        assert "the last commit, " not in job.output
