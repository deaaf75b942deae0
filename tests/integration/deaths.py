"""Deaths of workers that strike one after the other at one job of four workers (series.py)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from job import Job
from series import Errors, Series, faults_file, one_after_the_other

FAST = ("--failure-grace", "0.5", "--join-window", "30", "--min-interrupt-distance", "0.5")
FIRST = "kill@step:rank=2:generation={now}"
SECOND = (
    "kill@init:rank=1:generation={next}",
    "kill@store:rank=1:generation={next}",
    "kill@store:rank=0:generation={next}",
    "kill@init:rank=0:generation={next}",
    "kill@new_group:rank=1:generation={next}",
    "kill@callback:rank=1:generation={next}",
    "kill@leave:rank=1:generation={now}",
    "kill@leave:rank=0:generation={now}",
    "segv@step:rank=1:generation={next}",
)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def one_is_killed(series: Series, rank: int) -> None:
    recovery = series.strike(deaths=1, act=lambda: kill(series.job.pid_of(rank)))
    (exited,) = recovery.exits
    assert (exited["signal"], exited["rank"]) == (signal.SIGKILL, rank)
    assert recovery.resumed[0]["ticks_lost"] <= 1


def a_second_dies(series: Series, fault: str) -> None:
    recovery = series.strike(FIRST, fault, deaths=2)
    expected = {signal.SIGKILL, signal.SIGSEGV} if fault.startswith("segv") else {signal.SIGKILL}
    assert {exited["signal"] for exited in recovery.exits} == expected


def a_second_dies_twenty_milliseconds_later(series: Series) -> None:
    first, second = series.job.pid_of(1), series.job.pid_of(2)

    def both() -> None:
        kill(first)
        threading.Event().wait(0.02)  # the fault itself: a second death during the recovery
        kill(second)

    recovery = series.strike(deaths=2, act=both)
    assert {exited["signal"] for exited in recovery.exits} == {signal.SIGKILL}


def an_exception_in_one_worker(series: Series) -> None:
    (exited,) = series.strike("raise@step:rank=1:generation={now}", deaths=1).exits
    assert (exited["exit_code"], exited["rank"]) == (1, 1)


def an_exit(series: Series, status: int) -> None:
    (exited,) = series.strike(f"exit{status}@step:rank=1:generation={{now}}", deaths=1).exits
    assert exited["exit_code"] == status


def three_are_killed(series: Series) -> None:
    def three() -> None:
        for pid in [series.job.pid_of(rank) for rank in (0, 1, 2)]:
            kill(pid)

    recovery = series.strike(deaths=3, act=three)
    assert {exited["signal"] for exited in recovery.exits} == {signal.SIGKILL}


def one_dies_in_the_gate(series: Series) -> None:
    """End the series: the world in which it happens is the last but one."""
    job, now = series.job, series.wait_until_whole()
    series.arm("kill@gate:rank=1:generation={now}")
    job.stop_file.touch()
    job.finish(0)
    assert job.fired() == series.fired
    (step,) = {line["step"] for line in job.log("gate") if line["generation"] == now}
    again = [line for line in job.log("enter") if line["generation"] > now]
    assert again
    assert all(line["step"] == step for line in again)


STRIKES: dict[str, Callable[[Series], None]] = {
    "one is killed from outside: middle": lambda series: one_is_killed(series, 1),
    "one is killed from outside: rank 0": lambda series: one_is_killed(series, 0),
    **{
        f"a second dies while the world regroups: {fault}": lambda series, fault=fault: a_second_dies(series, fault)
        for fault in SECOND
    },
    "a second dies 20 ms after the first": a_second_dies_twenty_milliseconds_later,
    "an exception in one worker restarts its slot alone": an_exception_in_one_worker,
    "a worker exits with 0 in mid-training": lambda series: an_exit(series, 0),
    "a worker exits with 3 in mid-training": lambda series: an_exit(series, 3),
    "three of four are killed at once": three_are_killed,
    "one dies while others wait in the exit gate": one_dies_in_the_gate,
}


def struck_by_all(folder: Path) -> Errors:
    """Let all deaths strike at one job. The check of the whole job is a part of the last one."""
    options = ("-np", "4", "--min-np", "1", *FAST, "--cooldown-range", "0", "0")
    script = {"steps": 10, "step_seconds": 0.05, "until": folder / "stop", "faults_file": faults_file(folder)}
    with Job(folder, *options, **script, callback=True) as job:
        series = Series(job, 4)

        def one(fault: str) -> None:
            STRIKES[fault](series)
            if fault == list(STRIKES)[-1]:
                job.check_survival(series.fired)

        return one_after_the_other(STRIKES, one)
