"""Hanging workers are detected in time and killed, their stacks are in the log, and the other workers train on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.job import Job, Line
from tests.kit.series import Errors, Recovery, Series, faults_file, one_after_the_other

TWO = ("-np", "2", "--min-np", "1")


# ------------------------------------------------------------------------------- hangs one after the other at one job


def one_hangs(
    series: Series, within_s: float, *faults: str, act: Callable[[], object] | None = None
) -> tuple[Line, Recovery]:
    """Check that the worker is detected in time and killed, that the other trains on, and that its stacks are logged.

    Return the event of the detection, and the recovery.
    """
    job = series.job
    series.wait_until_whole()
    seen, printed, since = len(job.events()), len(job.output), time.time()
    recovery = series.strike(*faults, deaths=1, act=act)
    (found,) = [event for event in job.events()[seen:] if event["event"] == "worker_unresponsive"]
    assert found["time"] - since < within_s
    assert recovery.exits[0]["signal"] == signal.SIGKILL
    second = recovery.worlds[0]
    assert (second["generation"], second["size"]) == (recovery.generation + 1, 1), "the survivor waited for nobody"
    assert second["time"] - found["time"] < 2.0
    stacks = job.output[printed:]
    assert re.search(r"\[localhost:\d\] (Current thread|Thread) 0x\w+ .*most recent call first", stacks)
    assert "train.py" in stacks, "the stacks name the script"
    return found, recovery


def one_is_stopped(series: Series, rank: int) -> None:
    def stop() -> None:
        os.kill(series.job.pid_of(rank), signal.SIGSTOP)

    found, _ = one_hangs(series, 2.0 + 1.5, act=stop)
    assert "no heartbeat for --heartbeat-timeout of 2 s" in found["reason"]


def one_does_not_return(series: Series, kind: str) -> None:
    job, now, printed = series.job, series.wait_until_whole(), len(series.job.output)
    # In the second step of a world, DDP broadcasts its buckets. From the third on, a step only reduces.
    job.wait_for("three steps", lambda: sum(line["generation"] == now for line in job.log("commit")) >= 2 * 3)
    known = len(job.events("hang"))
    found, recovery = one_hangs(series, 3.0 + 2.0 + 1.5, f"{kind}@step:rank=1:generation={{now}}")
    assert "no tick for --hang-timeout of 3 s" in found["reason"]
    assert re.search(r'File ".*faults.py", line \d+ in (fire|hold_the_gil_for_ever)', job.output[printed:])
    (hung,) = [line for line in job.log("enter") if line["generation"] == now and line["rank"] == 1]
    assert recovery.exits[0]["pid"] == hung["pid"], "and not the one that waited for it"
    (report,) = job.events("hang")[known:]
    assert (report["ended"], report["call"], report["entered"]) == (now, "all_reduce(Float[161])", [0]), report
    if kind == "gil":  # no thread of that worker can run Python
        assert (report["missing"], report["silent"], report["stacks"]) == ([], [1], {})
    else:
        assert (report["missing"], report["silent"]) == ([1], [])
        assert re.search(r'File ".*faults.py", line \d+, in fire', report["stacks"]["1"])
    who = "no report from rank 1" if kind == "gil" else "and not by rank 1"
    assert re.search(rf"all_reduce\(Float\[161\]\) .* was entered by rank 0,? {who}", job.output[printed:])


STRIKES: dict[str, Callable[[Series], None]] = {
    "rank 0 is stopped": lambda series: one_is_stopped(series, 0),
    "rank 1 is stopped": lambda series: one_is_stopped(series, 1),
    "gil": lambda series: one_does_not_return(series, "gil"),
    "spin": lambda series: one_does_not_return(series, "spin"),
    "deadlock": lambda series: one_does_not_return(series, "deadlock"),
}


@pytest.fixture(scope="module")
def struck(runtime_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    folder = tmp_path_factory.mktemp("series")
    options = (*TWO, "--heartbeat-timeout", "2", "--hang-timeout", "3", "--cooldown-range", "0", "0")
    script = {"steps": 20, "until": folder / "stop", "faults_file": faults_file(folder)}
    with Job(folder, *options, "--min-interrupt-distance", "0.5", **script) as job:
        series = Series(job, 2)

        def one(fault: str) -> None:
            STRIKES[fault](series)
            if fault == list(STRIKES)[-1]:
                job.stop_file.touch()
                job.finish()

        return one_after_the_other(STRIKES, one)


@pytest.mark.parametrize("fault", STRIKES)
def test_a_worker_that_hangs_is_found_and_the_other_trains_on(struck: Errors, fault: str) -> None:
    struck.check(fault)


# ---------------------------------------------------------------------------------------------------- jobs of their own


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
