"""Loaders with a state of their own in jobs with failures, joins and planned changes; data sets of different length."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Hosts, Job

OPTIONS = ("--join-window", "30", "--min-interrupt-distance", "0.2")


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


NAMES = """
import os, time, torch, elasticstate
from torch.utils.data import DataLoader

@elasticstate.run
def train(state):
    loader = DataLoader(list(range(10_000)), num_workers=1, multiprocessing_context="spawn")
    for batch in (batches := iter(loader)):
        state.step += 1
        state.commit()
        if state.step == 5:
            names = [queue._sem._semlock.name.replace("/", "sem.") for queue in batches._index_queues]
            print("rank", elasticstate.rank(), "is", os.getpid(), "and has", *names, flush=True)
        if elasticstate.generation() == 1:
            torch.distributed.barrier()
            time.sleep(0.01)
        elif state.step % 20 == 0:
            return

if __name__ == "__main__":
    train(elasticstate.TorchState(model=torch.nn.Linear(1, 1), step=0))
"""


def test_the_semaphores_of_the_loaders_of_a_killed_worker_are_removed(tmp_path: Path) -> None:
    script = tmp_path / "names.py"
    script.write_text(NAMES)
    with Job(tmp_path, "-np", "2", command=[sys.executable, str(script)]) as job:

        def names(rank: int) -> list[Path]:
            found = re.findall(rf"rank {rank} is \d+ and has (.+)", job.output)
            return [Path("/dev/shm", name) for name in found[0].split()] if found else []

        files = job.wait_for("names", lambda: names(1) if names(0) else None)
        assert all(file.exists() for file in files)
        (pid,) = re.findall(r"rank 1 is (\d+) and", job.output)
        os.kill(int(pid), signal.SIGKILL)
        job.wait_for_event("worker_exited", worker="localhost:1#1")
        assert not [file for file in files if file.exists()]
        job.finish()
    (killed,) = (event for event in job.events("worker_exited") if event["signal"])
    assert "resource_tracker" not in killed["error"]
    assert not [file for file in names(0) if file.exists()]
