"""Real deaths, joins and leaves in the middle of epochs. Every sample counts exactly once in each epoch."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Hosts, Job

SAMPLES = 301
CHANGES = 10
OPTIONS = ("--join-window", "30", "--min-interrupt-distance", "0.2")


def trained_once(job: Job) -> int:
    """Check all epochs. Return their number. For a step that was trained again, the last time counts."""
    lines = job.log("trained")
    last = {line["step"]: 0 for line in lines}
    for line in lines:
        last[line["step"]] = max(last[line["step"]], line["generation"])
    counted = [line for line in lines if line["generation"] == last[line["step"]]]
    seen = Counter((line["epoch"], sample) for line in counted for sample in line["ids"])
    epochs = 1 + max(line["epoch"] for line in lines)
    wrong = [(epoch, i, seen[epoch, i]) for epoch in range(epochs) for i in range(SAMPLES) if seen[epoch, i] != 1]
    assert not wrong, f"(epoch, sample, how often): {wrong[:20]}"
    assert len(seen) == epochs * SAMPLES
    return epochs


def mid_epoch(job: Job, generation: int) -> None:
    """Wait until the world of this generation has trained five steps."""

    def found() -> bool:
        steps = {line["step"] for line in job.log("trained") if line["generation"] == generation}
        return len(steps) >= 5

    job.wait_for(f"steps in generation {generation}", found)


@pytest.mark.parametrize(
    "script",
    [
        ["--batch-size", "3"],
        ["--batch-size", "4", "--num-workers", "2", "--commit-every", "3"],
        ["--global-batch-size", "10", "--micro-batch-size", "2", "--commit-every", "2"],
    ],
    ids=["every_rank_3", "fetched_by_two_processes", "global_batch"],
)
def test_every_sample_counts_once_in_each_epoch_of_a_job_with_many_changes(tmp_path: Path, script: list[str]) -> None:
    hosts, stop = Hosts(tmp_path).set("localhost:3"), tmp_path / "stop"
    train = [sys.executable, str(SCRIPTS / "samples.py"), "--log", str(tmp_path / "logs"), "--samples", str(SAMPLES)]
    train += ["--until", str(stop), *script]
    with Job(tmp_path, "-np", "3", "--min-np", "1", *hosts.options, *OPTIONS, command=train) as job:
        job.wait_for_event("world_formed", size=3)
        turns = 0
        while (generation := job.events("world_formed")[-1]["generation"]) <= CHANGES:
            mid_epoch(job, generation)
            if turns % 2 == 0:
                os.kill(job.pid_of(turns % 3, generation), signal.SIGKILL)
            else:
                hosts.set("localhost:2")
            job.wait_for_event("world_formed", generation=generation + 1, size=2)
            hosts.set("localhost:3")
            job.wait_for_event("world_formed", generation=generation + 2, size=3)
            turns += 1
        stop.touch()
        job.finish(0)
        assert sum(event["signal"] == signal.SIGKILL for event in job.events("worker_exited")) >= CHANGES // 4
        assert len(job.events("world_formed")) > CHANGES
        assert trained_once(job) >= 2


@pytest.mark.parametrize("counter", [[], ["--counter"]], ids=["epochs", "counter"])
@pytest.mark.parametrize(
    ("place", "commits", "lines"),
    [
        ("loop", "every_batch", ["0: 5", "1: 0", "2: 5"]),  # the code after the loop is not in the commit
        ("loop", "not_the_last", ["0: 5", "1: 1", "2: 5"]),
        ("commit", "every_batch", ["0: 5", "1: 5", "2: 5"]),
        ("commit", "none", ["0: 5", "1: 5", "2: 5"]),
    ],
)
def test_the_code_after_each_epoch_counts_once(
    tmp_path: Path, place: str, commits: str, lines: list[str], counter: list[str]
) -> None:
    script = [sys.executable, str(SCRIPTS / "epoch_end.py"), "--place", place, "--commits", commits, *counter]
    with Job(tmp_path, "-np", "2", "--min-np", "1", command=script) as job:
        job.finish(0)
    found = re.findall(r"epoch (\d: \d) batches of (\d)", job.output)
    assert found == [(line, "5") for line in lines]
    assert "ends [(0, 5), (1, 5), (2, 5)], 3 steps of the scheduler" in job.output
    assert ("the loop over epoch 1 has no batches left" in job.output) == (lines[1] == "1: 0")
