"""A rank that is slower than the others is named, and no other; with --straggler-action drain its worker leaves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Job, Line

EVEN, IN_TURN = 600, 45
OPTIONS = ("-np", "3", "--min-np", "2", "--straggler-action", "drain")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    script = [str(SCRIPTS / "stragglers.py"), "--folder", str(tmp_path), "--even", str(EVEN)]
    command = [sys.executable, *script, "--in-turn", str(IN_TURN)]
    with Job(tmp_path, *OPTIONS, command=command) as job:
        agent = job.wait_for_event("agent_joined")["pid"]
        with suppress(PermissionError):  # as the workers do: other tests on their cores would delay the reports
            for pid in (job.process.pid, agent):
                os.setpriority(os.PRIO_PROCESS, pid, -10)
        yield job


def named(job: Job, slot: int) -> Line:
    """Slow down a slot until it is named. Check the number of slow ticks before that, and return the event.

    Ten slow ticks, and those until the next report of the agent: within 1.25 s on an idle machine, which are ten more.
    Other load may delay the report by as many again.
    """
    before, begun = len(job.events("straggler")), len(steps(job, slot))
    (job.directory / "slow").write_text(str(slot))
    event = job.wait_for_event("straggler", before + 1)
    slow = [line for line in steps(job, slot)[begun:] if line["is_slow"] and line["time"] < event["time"]]
    completed = len(slow) - 1  # a line is the begin of a tick
    assert event["slot"] == slot
    assert 1.2 <= event["factor"] <= 1.45
    assert 5 < completed <= 30
    return event


def steps(job: Job, slot: int) -> list[Line]:
    return [line for line in job.log("step") if line["slot"] == slot]


def test_a_slow_rank_is_named_and_drained_and_no_other_one_is(job: Job) -> None:
    job.wait_for("long ticks", lambda: len(steps(job, 0)) >= 12, timeout=120)
    assert job.events("straggler") == [], f"after {EVEN} ticks without a slow rank, and {IN_TURN} with all of them"

    first = named(job, 1)
    assert (first["host"], first["rank"]) == ("localhost", 1)
    resumed = job.wait_for_event("training_resumed")
    assert resumed["ticks_lost"] == 0
    (end,) = job.events("end")
    assert isinstance(end["at"], int)
    assert end["cause"].startswith("localhost:1#1 drains: straggler: 1.")
    assert job.wait_for_event("worker_exited", slot=1)["exit_code"] == 0
    assert job.wait_for_event("straggler_ended")["reason"] == "generation 1 has ended"

    trained = len(steps(job, 2))
    job.wait_for("ticks behind the first ones of a world", lambda: len(steps(job, 2)) >= trained + 5)
    second = named(job, 2)
    assert second["rank"] == 1, "of two"
    (job.directory / "slow").unlink()
    assert job.wait_for_event("straggler_ended", 2)["reason"] == "recovered"

    (job.directory / "stop").touch()
    job.finish(0)
    assert len(job.events("straggler")) == 2
    assert len(job.events("world_formed")) == 2, "the world of two is not below --min-np, and slot 1 stays empty"
    assert "elasticrun: straggler: localhost:1 (rank 1) took 1." in job.output
