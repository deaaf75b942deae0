"""Ranks with different numbers of batches in torch's join context, while workers die, join and leave."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Hosts, Job

OPTIONS = ("--min-interrupt-distance", "0.2", "--min-np", "2", "--join-window", "30")


def start(folder: Path, hosts: Hosts, *batches: int, throw: bool = False, step_s: float = 0.02, epochs: int = 1) -> Job:
    script = [sys.executable, str(SCRIPTS / "uneven.py"), "--log", str(folder / "logs")]
    script += ["--step-seconds", str(step_s), "--epochs", str(epochs)]
    script += ["--batches", *map(str, batches), *["--throw"][: int(throw)]]
    return Job(folder, "-np", "3", *OPTIONS, *hosts.options, command=script)


def out(job: Job, rank: int) -> bool:
    return any(line["rank"] == rank for line in job.log("out"))


def check(job: Job, steps: int) -> None:
    """Check that all ranks end with the state of those with most inputs, and that no commit sealed by all is lost."""
    job.finish(0)
    finals = job.log("final")
    assert {line["step"] for line in finals} == {steps}
    assert len({line["digest"] for line in finals}) == 1
    by_generation: dict[int, set[tuple[int, str]]] = {}
    for line in job.log("enter"):
        by_generation.setdefault(line["generation"], set()).add((line["step"], line["digest"]))
    assert all(len(states) == 1 for states in by_generation.values()), "all begin from the same state"


def test_ranks_that_are_out_of_inputs_get_the_state_of_the_last_one(tmp_path: Path) -> None:
    with start(tmp_path, Hosts(tmp_path).set("localhost:3"), 5, 40, 20, epochs=2) as job:
        check(job, 80)
        assert len(job.events("world_formed")) == 1
        joined = [line for line in job.log("joined") if line["step"] == 40]
        assert len({line["digest"] for line in joined}) == 1, "the optimizer's state, too"
        assert len(joined) == 3
        assert len({line["drawn"] for line in job.log("joined")}) == 6, "no rank draws the same numbers again"


@pytest.mark.parametrize("victim", [0, 1], ids=["joined", "training"])
def test_a_worker_dies_while_another_is_out_of_inputs(tmp_path: Path, victim: int) -> None:
    """Rank 0 is out of inputs after 5 batches."""
    with start(tmp_path, Hosts(tmp_path).set("localhost:3"), 5, 150, 150) as job:
        job.wait_for("rank 0 without inputs", lambda: out(job, 0) and any(c["step"] > 20 for c in job.log("commit")))
        os.kill(job.pid_of(victim, 1), signal.SIGKILL)
        assert job.wait_for_event("worker_exited", signal=9)["rank"] == victim
        job.wait_for_event("world_formed", size=2)
        check(job, 150)
        begin = min(line["step"] for line in job.log("enter") if line["generation"] == 2)
        committed = max(line["step"] for line in job.log("commit") if line["generation"] == 1)
        assert begin >= committed - 1, "whoever trains has the state, not who is out of inputs"


def test_a_newcomer_joins_while_a_rank_is_out_of_inputs(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:3")
    with start(tmp_path, hosts, 5, 400, 400, step_s=0.06) as job:
        job.wait_for("rank 0 without inputs", lambda: out(job, 0))
        hosts.set("localhost:4")
        job.wait_for_event("world_formed", size=4)
        hosts.set("localhost:3")
        job.wait_for_event("world_formed", 2, size=3)
        check(job, 400)
        for generation in (1, 2):
            before = max(line["step"] for line in job.log("commit") if line["generation"] == generation)
            begins = {line["step"] for line in job.log("enter") if line["generation"] == generation + 1}
            assert begins == {before + 1}, "nothing is lost: the commit at which all were interrupted is not in the log"


def test_early_termination_throws_on_all_ranks(tmp_path: Path) -> None:
    with start(tmp_path, Hosts(tmp_path).set("localhost:3"), 5, 40, 40, throw=True) as job:
        job.finish(3)
        thrown = job.log("thrown")
        assert {line["rank"] for line in thrown} == {0, 1, 2}
        assert {line["step"] for line in thrown} == {5}
        assert "exhausted" in job.output.splitlines()[-1]
