"""Workers are killed at each point of a step, in jobs that seldom commit: no tick is repeated.

The control is the same job with a commit at each tick, under the same kills: it passes through the same worlds. The
final weights, learning rates and optimizer states of both jobs must be equal, bit by bit.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Job

EVERY = 7
KILLS = (
    "1:forward:4:1",
    "2:all_reduce:3:0",
    "3:before_step:3:1",
    "4:in_step:3:0",
    "5:after_step:2:1",
    "6:record:4:0",
    f"7:commit:{EVERY}:1",
)
STEPS = 40
OPTIONS = (
    "--tick-records",
    "--join-window",
    "60",
    "--reset-limit",
    "1000",
    "--cooldown-range",
    "1",
    "1",
)


def run(directory: Path, program: str, every: int, kills: tuple[str, ...], *options: str, size: int = 2) -> Job:
    directory.mkdir()
    command = [sys.executable, str(SCRIPTS / "ticks.py"), "--log", str(directory / "logs"), "--program", program]
    command += [
        "--steps",
        str(STEPS),
        "--commit-every",
        str(every),
        *(part for kill in kills for part in ("--kill", kill)),
    ]
    with Job(directory, "-np", str(size), *OPTIONS, *options, command=command) as job:
        job.finish(timeout=180)
    struck = [f"{line['generation']}:{line['point']}" for line in job.log("kill")]
    assert struck == [":".join(kill.split(":")[:2]) for kill in kills], "each kill has struck, at its point"
    deaths = [event["signal"] for event in job.events("worker_exited") if event["exit_code"] != 0]
    assert deaths == [signal.SIGKILL] * len(kills)
    assert len({line["digest"] for line in job.log("final")}) == 1
    assert len(job.log("final")) == size
    return job


def entered(job: Job) -> list[tuple[int, int, str]]:
    """Return generation, step and state of all members at their entries."""
    return sorted({(line["generation"], line["step"], line["digest"]) for line in job.log("enter")})[1:]


def test_a_closure_that_failed_after_the_first_writes_goes_back_to_the_last_commit(tmp_path: Path) -> None:
    """LBFGS evaluates its closure twice. A death in the first evaluation repeats nothing, one in the second does."""
    kills = ("1:forward:4:1", "2:second_pass:5:0", "3:after_step:3:1")
    job = run(tmp_path / "job", "closure", EVERY, kills)
    control = run(tmp_path / "control", "closure", 1, kills)
    assert [event["ticks_lost"] for event in job.events("training_resumed")] == [0, 4, 0]
    assert [event["ticks_lost"] for event in control.events("training_resumed")] == [0, 0, 0]
    resumed = [step for _, step, _ in entered(job)]
    assert resumed[0] == 3


@pytest.mark.parametrize(
    ("program", "backend"),
    [
        ("scaled", "gloo"),
        pytest.param("scaled", "mpi", marks=pytest.mark.long),
        pytest.param("several", "gloo", marks=pytest.mark.long),
        ("several", "mpi"),
    ],
)
def test_no_tick_is_repeated(tmp_path: Path, program: str, backend: str) -> None:
    options = ("--backend", backend)
    job = run(tmp_path / "job", program, EVERY, KILLS, *options)
    control = run(tmp_path / "control", program, 1, KILLS, *options)
    resumed = job.events("training_resumed")
    assert [event["ticks_lost"] for event in resumed] == [0] * len(KILLS)
    assert all(event["lower_bounds"] == [] for event in resumed)
    assert entered(job)[-len(KILLS) :] == entered(control)[-len(KILLS) :]
    assert job.log("final")[0]["digest"] == control.log("final")[0]["digest"]
