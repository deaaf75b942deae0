"""Hanging workers are detected in time and killed, their stacks are in the log, and the other workers train on."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from job import Job

TWO = ("-np", "2", "--min-np", "1")


def let_it_end(job: Job, stop: Path) -> None:
    """End the job as soon as the worker that hung is killed. The other worker trains until then."""
    job.wait_for_event("world_formed", generation=2)
    job.wait_for_event("worker_exited", signal=signal.SIGKILL)
    stop.touch()


def check_that_the_other_went_on(job: Job, within_s: float, since: float) -> None:
    """Check that one worker was detected in time and killed, that the other trained on, and that stacks were logged."""
    (found,) = job.events("worker_unresponsive")
    assert found["time"] - since < within_s
    assert job.events("worker_exited")[0]["signal"] == signal.SIGKILL
    second = next(event for event in job.events("world_formed") if event["generation"] == 2)
    assert second["size"] == 1, "the survivor did not wait for anybody"
    assert second["time"] - found["time"] < 2.0
    assert re.search(r"\[localhost:\d\] (Current thread|Thread) 0x\w+ .*most recent call first", job.output)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_worker_is_found_and_the_others_train_on(rank: int, tmp_path: Path) -> None:
    with Job(tmp_path, *TWO, "--heartbeat-timeout", "2", steps=20, until=tmp_path / "stop") as job:
        job.wait_for_step(10)
        since = time.time()
        os.kill(job.pid_of(rank), signal.SIGSTOP)
        let_it_end(job, tmp_path / "stop")
        job.finish()
    check_that_the_other_went_on(job, 2.0 + 1.5, since)
    assert "no heartbeat for --heartbeat-timeout of 2 s" in job.events("worker_unresponsive")[0]["reason"]
    assert "train.py" in job.output, "the stacks name the script"


@pytest.mark.parametrize("kind", ["gil", "spin", "deadlock"])
def test_a_worker_that_hangs_is_found_and_the_others_train_on(kind: str, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with Job(tmp_path, *TWO, "--hang-timeout", "3", steps=20, until=stop, fault=[f"{kind}@10:rank=1"]) as job:
        job.wait_for("the fault", job.fired)
        since = time.time()
        let_it_end(job, stop)
        job.finish()
    check_that_the_other_went_on(job, 3.0 + 2.0 + 1.5, since)
    assert "no tick for --hang-timeout of 3 s" in job.events("worker_unresponsive")[0]["reason"]
    assert re.search(r'File ".*faults.py", line \d+ in (_fire|hold_the_gil_for_ever)', job.output)
    (hung,) = [line for line in job.log("enter") if line["generation"] == 1 and line["rank"] == 1]
    assert job.events("worker_exited")[0]["pid"] == hung["pid"], "and not the one that waited for it"


def test_slow_workers_are_not_killed(tmp_path: Path) -> None:
    """No tick for three heartbeat time-outs, half of them with the GIL held. The hang time-out is longer."""
    faults = ["busy@10:rank=0", "busy@10:rank=1"]
    with Job(tmp_path, *TWO, "--heartbeat-timeout", "2", "--hang-timeout", "30", steps=20, fault=faults) as job:
        job.finish()
        assert job.fired() == 2
    assert not job.events("worker_unresponsive")
    assert len(job.events("world_formed")) == 1


def test_a_script_that_says_it_gets_on_does_not_hang(tmp_path: Path) -> None:
    with Job(tmp_path, *TWO, "--hang-timeout", "2", steps=20, evaluate=6) as job:
        job.finish()
    assert not job.events("worker_unresponsive")
