"""Ends of jobs and departures of workers: signals to the driver and to workers, hangs, usage errors."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.kit.forks import SCRIPTS, Started, Template, environment
from tests.kit.job import Job
from tests.kit.series import Series

FAST = ("--join-window", "30", "--min-interrupt-distance", "0.2")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_mid_training_ends_the_job_and_leaves_nothing(tmp_path: Path, number: int, status: int) -> None:
    with Job(tmp_path, "-np", "2", *FAST, "--stop-timeout", "20", steps=100000) as job:
        job.wait_for_step(5)
        started = [int(line["pid"]) for line in job.log("enter")]
        job.process.send_signal(number)
        job.finish(status, timeout=15)  # the workers exit on request, so the driver does not wait for the stop time-out
        assert not [pid for pid in started if psutil.pid_exists(pid)]


STOPPED = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import elasticstate as elastic

kind, directory = sys.argv[1:]
state = elastic.TorchState(model=torch.nn.Linear(2, 2), step=0)
stop = False

def handler(*_):
    global stop
    stop = True
    open(f"{directory}/signal-{os.environ['LOCAL_RANK']}", "w").close()

if kind != "inside":
    signal.signal(signal.SIGTERM, handler)

@elastic.run
def train(state):
    if kind == "inside":
        signal.signal(signal.SIGTERM, handler)
    while True:
        time.sleep(0.01)
        flag = torch.tensor(float(stop))
        dist.all_reduce(flag)
        state.step += 1
        state.commit()
        if state.step == 5:
            open(f"{directory}/trains-{elastic.rank()}", "w").close()
        if flag and kind != "deaf":
            everyone = torch.ones(1)
            dist.all_reduce(everyone)
            with open(f"{directory}/saved-{elastic.rank()}", "w") as file:
                print(state.step, int(everyone), file=file)
            if kind == "exit":
                dist.barrier()
                sys.exit()
            return

train(state)
open(f"{directory}/after-{elastic.rank()}", "w").close()
"""


def stopped(tmp_path: Path, kind: str, *options: str) -> Job:
    """Start a job of the script above, and send SIGTERM to elasticrun when it trains."""
    path = tmp_path / "script.py"
    path.write_text(STOPPED)
    command = [sys.executable, str(path), kind, str(tmp_path)]
    job = Job(tmp_path, "-np", "2", *FAST, *options, command=command)
    job.wait_for("training on both ranks", lambda: len(list(tmp_path.glob("trains-*"))) == 2)
    job.process.send_signal(signal.SIGTERM)
    return job


@pytest.mark.parametrize("kind", ["before", "inside", "exit"])
def test_a_script_that_handles_sigterm_saves_on_all_ranks_in_a_world_that_works(tmp_path: Path, kind: str) -> None:
    with stopped(tmp_path, kind, "--stop-timeout", "40") as job:
        job.finish(143, timeout=35)
        assert len(list(tmp_path.glob("signal-*"))) == 2
        (saved,) = {path.read_text() for path in tmp_path.glob("saved-*")}
        assert len(list(tmp_path.glob("saved-*"))) == 2
        assert saved.split()[1] == "2"
        assert len(list(tmp_path.glob("after-*"))) == (0 if kind == "exit" else 2)
        assert len(job.events("world_formed")) == 1
        assert "killed" not in job.output


def test_a_script_that_handles_sigterm_and_does_not_end_is_killed_after_the_stop_timeout(tmp_path: Path) -> None:
    with stopped(tmp_path, "deaf", "--stop-timeout", "2") as job:
        job.finish(143, timeout=30)
        assert len(list(tmp_path.glob("signal-*"))) == 2
        assert not list(tmp_path.glob("after-*"))


def test_a_second_signal_kills_a_script_that_handles_the_first_one(tmp_path: Path) -> None:
    with stopped(tmp_path, "deaf", "--stop-timeout", "600") as job:
        job.wait_for("signals to both workers", lambda: len(list(tmp_path.glob("signal-*"))) == 2)
        job.process.send_signal(signal.SIGTERM)
        job.finish(143, timeout=30)


def test_the_last_commit_before_a_stop_is_saved_for_the_next_job(tmp_path: Path) -> None:
    """The durable copy is made after the workers have stopped, and has the step that they saved themselves."""
    durable = ("--durable-dir", str(tmp_path / "durable"), "--durable-interval", "500")
    with stopped(tmp_path, "before", "--stop-timeout", "40", *durable) as job:
        job.finish(143, timeout=40)
    step = (tmp_path / "saved-0").read_text().split()[0]
    assert [event["commit"] for event in job.events("durable_copy")][-1] == [1, int(step)]


AFTER_THE_GATE = """
import os, signal, sys, time
import elasticstate as elastic

@elastic.run
def train(state):
    state.commit()

train(elastic.ObjectState())
if elastic.rank() == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    print("evaluation done", flush=True)
"""


def test_a_preemption_signal_after_train_waits_for_the_end_of_the_script(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(AFTER_THE_GATE)
    with Job(tmp_path, "-np", "2", *FAST, command=[sys.executable, str(path)]) as job:
        job.finish(0)
        assert "evaluation done" in job.output


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


@pytest.mark.parametrize(
    ("number", "tracebacks", "template"),
    [
        (signal.SIGTERM, 0, "--preload="),
        (signal.SIGINT, 1, "--preload="),
        pytest.param(signal.SIGTERM, 0, "--preload=off", marks=pytest.mark.long),
        (signal.SIGINT, 1, "--preload=off"),
    ],
)
def test_further_signals_to_a_worker_that_ends_print_no_traceback(
    tmp_path: Path, number: signal.Signals, tracebacks: int, template: str
) -> None:
    """The first SIGINT raises KeyboardInterrupt, perhaps within the handler of another error."""
    options = ("-np", "2", "--min-np", "1", template, *FAST)
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", commit_every=50) as job:
        job.wait_for("two workers that train", lambda: len(job.log("enter")) == 2)
        pid = job.pid_of(1)
        os.kill(pid, number)
        if tracebacks:
            job.wait_for("the traceback", lambda: "KeyboardInterrupt" in job.output)
        with suppress(ProcessLookupError):
            while not job.events("worker_exited"):
                os.kill(pid, number)
                time.sleep(0.003)
        job.wait_for_event("worker_exited")
        job.stop_file.touch()
        job.finish(0)
    assert job.output.count("] KeyboardInterrupt\n") == tracebacks
    assert ("Traceback" in job.output) == bool(tracebacks)
    assert "Exception ignored" not in job.output


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
        (NO_STATE, "UsageError: train() is decorated with @elasticstate.run, so one of its arguments must be a State"),
        (NO_WORLD, "NotInWorldError: there is no world yet"),
    ],
)
def test_misuse_is_an_error_that_says_what_to_do(template: Template, tmp_path: Path, script: str, said: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    status, _, error = Started(template, tmp_path / "script", [path]).finish(60)
    assert status == 1
    assert said in error


def test_plain_python_trains_in_a_world_of_one(template: Template, tmp_path: Path) -> None:
    command = [SCRIPTS / "train.py", "--log", tmp_path, "--steps", "20"]
    variables = {**environment(), "ELASTICSTATE_WORKER": "localhost:0:1"}
    status, _, error = Started(template, tmp_path / "output", command, variables).finish(60)
    assert status == 0, error
    assert '"step": 20' in (tmp_path / "localhost-0-1.jsonl").read_text()
