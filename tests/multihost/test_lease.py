"""Ticks without a collective: only the lease prevents two worlds from making progress at the same time.

Local SGD has a collective in each tick, though not in each step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit.job import Job, Line
from tests.kit.network import Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SCRIPT = Path(__file__).parent / "scripts" / "alone.py"
LOCAL_SGD = Path(__file__).parents[1] / "integration" / "scripts" / "local_sgd.py"
LEASE_S = 3.0
OPTIONS = (
    *("-np", "2", "--min-np", "1", "-H", "a:1,b:1", "--heartbeat-timeout", "2", "--min-interrupt-distance", "0.1"),
    *("--cooldown-range", "0.2", "0.4", "--orphan-timeout", "60", "--join-window", "30"),
)
LEASE = ("--lease", f"{LEASE_S:g}")


def commits(job: Job, generation: int, host: str) -> list[Line]:
    lines = job.log_of(host)
    return [line for line in lines if line["what"] == "commit" and line["generation"] == generation]


def test_a_host_out_of_touch_stands_still_before_another_world_is_made(tmp_path: Path) -> None:
    with Network(tmp_path, "a", "b") as network:
        command = [sys.executable, str(SCRIPT), "--log", str(tmp_path / "logs"), "--until", str(tmp_path / "stop")]
        with Job(tmp_path, *OPTIONS, *LEASE, command=command, within=network["d"].storage.enter()) as job:
            job.wait_for("ticks on both", lambda: commits(job, 1, "a") and commits(job, 1, "b"))
            network["b"].part_from(network["d"])
            lost = job.wait_for_event("agent_lost", host="b")
            job.wait_for("the world of a alone", lambda: commits(job, 2, "a"))
            formed = job.wait_for_event("world_formed", size=1)
            assert formed["time"] - lost["time"] >= 1.25 * LEASE_S
            last = commits(job, 1, "b")[-1]
            assert last["time"] < formed["time"], "b has made ticks beside the other world"
            assert last["time"] > lost["time"], "without a collective it has gone on for a while"
            assert network["b"].dropped() > 0
            network["b"].mend()
            job.wait_for_event("world_formed", count=2, size=2)
            job.wait_for("ticks of b again", lambda: commits(job, 3, "b"))
            job.stop_file.touch()
            job.finish(0)
            assert len({line["pid"] for line in job.log_of("b")}) == 1, "the same process"


def test_a_host_out_of_touch_makes_no_more_than_the_inner_steps_of_local_sgd(tmp_path: Path) -> None:
    every = 20
    with Network(tmp_path, "a", "b") as network:
        command = [sys.executable, str(LOCAL_SGD), "--log", str(tmp_path / "logs"), "--until", str(tmp_path / "stop")]
        command += ["--every", str(every)]
        with Job(tmp_path, *OPTIONS, command=command, within=network["d"].storage.enter()) as job:
            job.wait_for("outer steps of both", lambda: commits(job, 1, "a") and commits(job, 1, "b"))
            network["b"].part_from(network["d"])
            job.wait_for_event("agent_lost", host="b")
            job.wait_for("two outer steps of a alone", lambda: len(commits(job, 2, "a")) >= 2)
            lone = [line["step"] for line in job.log_of("b") if line["what"] == "trained"]
            shared = [line["step"] for line in job.log_of("b") if line["what"] == "commit"]
            assert lone[-1] <= shared[-1] + every, "b has trained on beside the other world"
            assert shared[-1] <= commits(job, 1, "a")[-1]["step"] + every, "b has made an outer step alone"
            assert network["b"].dropped() > 0
            network["b"].mend()
            job.wait_for_event("world_formed", count=2, size=2)
            job.wait_for("outer steps of b again", lambda: commits(job, 3, "b"))
            job.stop_file.touch()
            job.finish(0)
            assert len({line["pid"] for line in job.log_of("b")}) == 1, "the same process"
            finals = job.log("final")
            assert [line["outer"] for line in finals] == [finals[0]["outer"]] * 2
