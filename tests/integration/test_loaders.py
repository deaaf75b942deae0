"""Loaders with a state of their own in jobs with failures, joins and planned changes; data sets of different length."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from job import SCRIPTS, Hosts, Job

OPTIONS = ("--failure-grace", "0.5", "--join-window", "30", "--min-interrupt-distance", "0.2")


def command(directory: Path, kind: str, **options: object) -> list[str]:
    train = [sys.executable, str(SCRIPTS / "loaders.py"), "--log", str(directory / "logs"), "--kind", kind]
    train += ["--until", str(directory / "stop")]
    return train + [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def steps(job: Job, generation: int) -> None:
    """Wait until the world of this generation has trained five steps."""

    def found() -> bool:
        return len({line["step"] for line in job.log("trained") if line["generation"] == generation}) >= 5

    job.wait_for(f"steps in generation {generation}", found)


def trained(job: Job) -> list[dict[int, list[int]]]:
    """Return the samples of each step by rank. For a step that was trained again, the last time counts."""
    found: dict[int, dict[int, tuple[int, list[int]]]] = defaultdict(dict)
    last: dict[int, int] = defaultdict(int)
    for line in job.log("trained"):
        last[line["step"]] = max(last[line["step"]], line["generation"])
    for line in job.log("trained"):
        if line["generation"] == last[line["step"]]:
            found[line["step"]][line["rank"]] = line["ids"]
    assert sorted(found) == list(range(len(found)))
    return [dict(found[step]) for step in sorted(found)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("map", {}), ("map", {"workers": 1}), ("stream", {}), ("stream", {"workers": 1}), ("nodes", {})],
    ids=["map", "map_in_a_process", "stream", "stream_in_a_process", "nodes"],
)
def test_survivors_and_newcomers_go_on_at_the_same_sample(
    tmp_path: Path, kind: str, options: dict[str, object]
) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    train = command(tmp_path, kind, **options)
    with Job(tmp_path, "-np", "2", "--min-np", "1", *hosts.options, *OPTIONS, command=train) as job:
        steps(job, 1)
        os.kill(job.pid_of(1, 1), signal.SIGKILL)
        job.wait_for_event("world_formed", generation=2, size=1)
        job.wait_for_event("world_formed", generation=3, size=2)
        steps(job, 3)
        hosts.set("localhost:1")  # a planned change
        job.wait_for_event("world_formed", generation=4, size=1)
        steps(job, 4)
        hosts.set("localhost:2")
        job.wait_for_event("world_formed", generation=5, size=2)
        steps(job, 5)
        (tmp_path / "stop").touch()
        job.finish(0)
        found = trained(job)
    if kind == "stream":
        samples = sorted(i for ranks in found for ids in ranks.values() for i in ids)
        assert samples == list(range(len(samples)))
    else:
        assert [set(map(tuple, ranks.values())) for ranks in found] == [
            {tuple(range(4 * step, 4 * step + 4))} for step in range(len(found))
        ]


def test_a_newcomer_with_a_longer_data_set_is_refused_before_the_others_stop_for_it(tmp_path: Path) -> None:
    length = tmp_path / "length"
    length.write_text("100000")
    train = command(tmp_path, "elastic", length=length)
    with Job(tmp_path, "-np", "2", "--min-np", "1", *OPTIONS, command=train) as job:
        steps(job, 1)
        length.write_text("100004")
        os.kill(job.pid_of(1, 1), signal.SIGKILL)
        message = "The data set has 100004 samples, but epoch 0 began with 100000"
        job.wait_for("the error of the new worker", lambda: message in job.output)
        length.write_text("100000")
        job.wait_for_event("world_formed", size=2, generation=3)
        steps(job, 3)
        (tmp_path / "stop").touch()
        job.finish(0)
        samples = sorted(i for ranks in trained(job) for ids in ranks.values() for i in ids)
    assert samples == list(range(len(samples)))


def test_a_restarted_job_with_a_longer_data_set_keeps_its_commit(tmp_path: Path) -> None:
    length = tmp_path / "length"
    length.write_text("100000")
    train = command(tmp_path, "elastic", length=length)
    with Job(tmp_path, "-np", "2", *OPTIONS, command=train) as job:
        steps(job, 1)
        length.write_text("100004")
        job.kill(0, 1)
        message = "The data set has 100004 samples, but epoch 0 began with 100000"
        job.wait_for("the error of a new worker", lambda: message in job.output)
        length.write_text("100000")
        job.wait_for_event("world_formed", size=2, generation=2)
        steps(job, 2)
        (tmp_path / "stop").touch()
        job.finish(0)
        samples = sorted(i for ranks in trained(job) for ids in ranks.values() for i in ids)
    assert samples == list(range(len(samples)))
