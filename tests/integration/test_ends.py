"""Ends of jobs and departures of workers: signals to the driver and to workers, hangs, usage errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from forks import PACKAGE, SCRIPTS, Started, Template
from job import Job
from series import Series

FAST = ("--failure-grace", "0.5", "--join-window", "30", "--min-interrupt-distance", "0.2")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_mid_training_ends_the_job_and_leaves_nothing(tmp_path: Path, number: int, status: int) -> None:
    with Job(tmp_path, "-np", "2", *FAST, "--stop-timeout", "20", steps=100000) as job:
        job.wait_for_step(5)
        started = [int(line["pid"]) for line in job.log("enter")]
        job.process.send_signal(number)
        job.finish(status, timeout=15)  # the workers exit on request, so the driver does not wait for the stop time-out
        assert not [pid for pid in started if psutil.pid_exists(pid)]


def test_a_job_does_not_outlive_its_killed_driver(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "2", *FAST, "--driver-timeout", "1", steps=100000) as job:
        job.wait_for_step(5)
        processes = psutil.Process(job.process.pid).children(recursive=True)
        assert len(processes) >= 3
        at_the_kill = job.log("commit")[-1]["step"]
        job.process.kill()
        job.process.wait()
        _, alive = psutil.wait_procs(processes, timeout=20)
        assert not alive
        assert job.log("commit")[-1]["step"] > at_the_kill, "training goes on while the driver is gone"


def test_a_stopped_worker_is_found_by_its_heartbeat(tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "2", *FAST, "--heartbeat-timeout", "2", "--cooldown-range", "0", "0")
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop") as job:
        series = Series(job, 3)
        for rank in (0, 1):
            series.wait_until_whole()
            pid = job.pid_of(rank)
            recovery = series.strike(deaths=1, act=lambda pid=pid: os.kill(pid, signal.SIGSTOP))
            assert [(e["rank"], e["signal"]) for e in recovery.exits] == [(rank, signal.SIGKILL)]
            assert len(job.events("worker_unresponsive")) == rank + 1
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()


def test_a_worker_with_notice_drains_and_loses_nothing(tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "2", *FAST)
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", commit_every=50) as job:
        job.wait_for("three workers that train", lambda: len(job.log("enter")) == 3)
        os.kill(job.pid_of(1), signal.SIGTERM)
        left = job.wait_for_event("worker_exited")
        assert (left["exit_code"], left["rank"]) == (0, 1)
        resumed = job.wait_for_event("training_resumed")
        assert resumed["ticks_lost"] == 0
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()


SECOND_CALL = """
import elasticstate as elastic
state = elastic.ObjectState(step=0)
@elastic.run
def train(state):
    return 1
train(state)
train(state)
"""
OWN_GROUP = """
import torch.distributed as dist
import elasticstate as elastic
@elastic.run
def train(state):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=0, world_size=1)
train(elastic.ObjectState(step=0))
"""
NO_STATE = """
import elasticstate as elastic
@elastic.run
def train(model):
    pass
train(object())
"""
NO_WORLD = """
import elasticstate as elastic
print(elastic.local_rank(), elastic.device())
elastic.rank()
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            SECOND_CALL,
            "UsageError: train(): this process has called a function decorated with @elasticstate.run before",
        ),
        (OWN_GROUP, "UsageError: init_process_group() was called inside a function"),
        (NO_STATE, "UsageError: train() is decorated with @elasticstate.run, so its first argument must be a State"),
        (NO_WORLD, "NotInWorldError: there is no world yet"),
    ],
)
def test_misuse_is_an_error_that_says_what_to_do(template: Template, tmp_path: Path, script: str, said: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    status, _, error = Started(template, tmp_path / "script", [path]).finish(60)
    assert status == 1
    assert said in error


def test_plain_python_trains_in_a_world_of_one(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "ELASTICSTATE_WORKER": "localhost:0:1",
        "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{PACKAGE}",
    }
    command = [sys.executable, str(SCRIPTS / "train.py"), "--log", str(tmp_path), "--steps", "20"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '"step": 20' in (tmp_path / "localhost-0-1.jsonl").read_text()
