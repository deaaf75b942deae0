"""Scripts in the structure of Horovod's three elastic PyTorch examples, through a kill, a join and a leave."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.kit.job import SCRIPTS, Hosts, Job, Line

SIZES = ("-np", "3", "--min-np", "2", "--max-np", "4")
PACE = ("--join-window", "60", "--min-interrupt-distance", "0.2")
LR, WARMUP_EPOCHS, BATCHES_PER_ALLREDUCE = 0.01, 5, 2  # as in the scripts


class Changes(NamedTuple):
    """The pid of the killed rank, and the generations of the worlds of 3, 3, 4 and 2 ranks."""

    victim: int
    first: int
    whole: int
    joined: int
    left: int


def start(folder: Path, name: str, *arguments: str, options: Sequence[str] = SIZES) -> Job:
    """Start a job of the script ``name``, which trains until ``job.stop_file`` exists."""
    common = ("--log", str(folder / "logs"), "--stop", str(folder / "stop"))
    return Job(folder, *options, *PACE, command=[sys.executable, str(SCRIPTS / name), *common, *arguments])


def trained(job: Job, mark: str, size: int, after: int = 0) -> int:
    """Wait until all ranks of a world of ``size`` have logged ``mark``. Return its generation, later than ``after``."""

    def ranks(generation: int) -> set[int]:
        return {line["rank"] for line in job.log(mark) if line["generation"] == generation}

    def found() -> int:
        worlds = [e["generation"] for e in job.events("world_formed") if e["size"] == size and e["generation"] > after]
        return next((generation for generation in worlds if ranks(generation) == set(range(size))), 0)

    return int(job.wait_for(f"{mark} of a world of {size} after generation {after}", found, timeout=120))


def train_through_changes(job: Job, hosts: Hosts, mark: str, killed: int) -> Changes:
    """Kill a rank, let the host offer one slot more, then two less. ``mark`` is logged in each of the worlds."""
    first = trained(job, mark, 3)
    victim = job.pid_of(killed, first)
    os.kill(victim, signal.SIGKILL)
    job.wait_for_event("worker_exited", signal=signal.SIGKILL, pid=victim)
    job.wait_for_event("world_formed", generation=first + 1)
    whole = trained(job, mark, 3, first)
    hosts.set("localhost:4")
    joined = trained(job, mark, 4, whole)
    hosts.set("localhost:2")
    return Changes(victim, first, whole, joined, trained(job, mark, 2, joined))


def check_changes(job: Job, changes: Changes) -> None:
    """Check that no committed step is lost, that join and leave redo no tick, and that only the victim ends badly."""
    job.check_survival()
    resumed = {event["generation"]: event["ticks_lost"] for event in job.events("training_resumed")}
    assert (resumed[changes.joined], resumed[changes.left]) == (0, 0)
    exits = {event["pid"]: event["exit_code"] for event in job.events("worker_exited")}
    assert {pid for pid, exit_code in exits.items() if exit_code != 0} == {changes.victim}
    members = {g: {line["pid"] for line in job.log("enter") if line["generation"] == g} for g in changes[1:]}
    leavers = members[changes.joined] - members[changes.left]
    assert [exits[pid] for pid in leavers] == [0, 0]
    assert members[changes.left] < members[changes.joined]
    assert {line["size"] for line in job.log("final")} == {2}


def check_counts_up(job: Job, mark: str, name: str, first: int) -> None:
    """Check that the lines ``mark`` have all numbers from ``first`` on, and that the numbers at resets never fall."""
    numbers = {line[name] for line in job.log(mark)}
    assert numbers == set(range(first, max(numbers) + 1))
    begins: dict[int, set[int]] = defaultdict(set)
    for line in job.log("enter"):
        begins[line["generation"]].add(line[name])
    assert all(len(values) == 1 for values in begins.values()), begins
    entered = [min(values) for _, values in sorted(begins.items())]
    assert entered == sorted(entered)


def check_scaled_rates(job: Job) -> None:
    """Check that the learning rate follows the size of the world."""
    lines = [*job.log("enter"), *job.log("commit")]
    assert {line["size"] for line in lines} >= {2, 3, 4}
    for line in lines:
        assert line["lr"] == pytest.approx(LR * line["size"]), line


def check_averages(job: Job) -> list[list[float]]:
    """Check that the averages of each test are those of the ranks' own values. Return them, ordered by step."""
    tests: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in job.log("tested"):
        tests[line["generation"], line["step"]].append(line)
    complete = {step: lines for (_, step), lines in tests.items() if len(lines) == lines[0]["size"]}
    assert max(complete) == job.log("final")[0]["step"]
    for lines in complete.values():
        assert all(line["average"] == lines[0]["average"] for line in lines), lines
        assert lines[0]["average"] == pytest.approx(np.mean([line["own"] for line in lines], axis=0).tolist())
    return [lines[0]["average"] for _, lines in sorted(complete.items())]


def has_learnt(job: Job) -> bool:
    losses = [line["loss"] for line in job.log("epoch")]
    return bool(losses[-1] < losses[0] / 4)


def stop(job: Job) -> None:
    job.stop_file.touch()
    job.finish(0)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.long)])
def test_mnist(tmp_path: Path, backend: str) -> None:
    hosts = Hosts(tmp_path).set("localhost:3")
    options = (*SIZES, *hosts.options, "--backend", backend)
    with start(tmp_path, "horovod_mnist.py", "--gradient-predivide-factor", "2", options=options) as job:
        changes = train_through_changes(job, hosts, "epoch", killed=1)
        job.wait_for("a quarter of the first loss", lambda: has_learnt(job))
        stop(job)
    check_changes(job, changes)
    check_counts_up(job, "epoch", "epoch", 1)
    check_scaled_rates(job)
    (average,) = check_averages(job)
    assert average[1] > 0.8
    assert job.output.count(f"test set: average loss {average[0]:.4f}, accuracy {100 * average[1]:.2f} %") == 1


def test_synthetic_benchmark(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:3")
    options = (*SIZES, *hosts.options)
    with start(tmp_path, "horovod_benchmark.py", "--fp16-allreduce", options=options) as job:
        changes = train_through_changes(job, hosts, "iter", killed=2)
        stop(job)
    check_changes(job, changes)
    check_counts_up(job, "iter", "iter", 0)
    check_scaled_rates(job)
    check_measurements(job)


def check_measurements(job: Job) -> None:
    """Check that all measured times are in the state, and that only rank 0 has printed their mean."""
    root, other = sorted(job.log("tested"), key=lambda line: int(line["rank"]))
    assert len(root["measured"]) == len(other["measured"])
    own = [line["img_sec"] for line in job.log("iter") if line["pid"] == root["pid"]]
    assert [value for value in root["measured"] if value in own] == own
    mean, conf = np.mean(root["measured"]), 1.96 * np.std(root["measured"])
    assert job.output.count(f"img/sec per CPU: {mean:.1f} +-{conf:.1f}\n") == 1
    assert job.output.count(f"total img/sec on 2 CPUs: {2 * mean:.1f} +-{2 * conf:.1f}\n") == 1
    assert job.output.count("total img/sec") == job.output.count("running warm-up") == 1


def test_imagenet(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:3")
    checkpoints = ("--checkpoint-format", str(tmp_path / "checkpoint-{epoch}.pt"))
    with start(tmp_path, "horovod_imagenet.py", *checkpoints, options=(*SIZES, *hosts.options)) as job:
        job.wait_for("a checkpoint", lambda: job.log("saved"))
        changes = train_through_changes(job, hosts, "epoch", killed=0)
        job.wait_for("an epoch after the warm-up", lambda: job.log("epoch")[-1]["epoch"] >= WARMUP_EPOCHS)
        job.wait_for("a quarter of the first loss", lambda: has_learnt(job))
        stop(job)
    check_changes(job, changes)
    check_counts_up(job, "epoch", "epoch", 0)
    check_warm_up(job)
    averages = check_averages(job)
    assert averages[-1][0] < averages[0][0]
    assert averages[-1][1] > 0.8
    check_checkpoints(job, tmp_path)
    check_resumption(job.log("final")[0], tmp_path / "resumed", *checkpoints)


def check_warm_up(job: Job) -> None:
    """Check the learning rate of the last batch of each epoch: it rises with the batches, to that of all ranks."""
    for line in job.log("epoch"):
        others, epoch = line["size"] - 1, line["epoch"] + (line["idx"] + 1) / line["batches"]
        share = epoch / WARMUP_EPOCHS if line["epoch"] < WARMUP_EPOCHS else 1
        assert line["lr"] == pytest.approx(LR * BATCHES_PER_ALLREDUCE * (1 + share * others)), line


def check_checkpoints(job: Job, folder: Path) -> None:
    """Check that rank 0, and no other rank, has saved each epoch."""
    saved = job.log("saved")
    assert {line["rank"] for line in saved} == {0}
    assert len({line["pid"] for line in saved}) == 2, "rank 0 was killed, so another process has continued"
    files = {str(folder / f"checkpoint-{epoch + 1}.pt") for epoch in range(job.log("final")[0]["epoch"])}
    assert {line["path"] for line in saved} == set(map(str, folder.glob("checkpoint-*"))) == files


def check_resumption(final: Line, folder: Path, *checkpoints: str) -> None:
    """Start another job. Check that all its ranks begin with the newest checkpoint, and train an epoch more."""
    folder.mkdir()
    (folder / "stop").touch()
    with start(folder, "horovod_imagenet.py", "--broadcast-epoch", *checkpoints, options=("-np", "2")) as job:
        job.finish(0)
    begins = [(line["epoch"], line["step"], line["digest"]) for line in job.log("enter")]
    assert begins == [(final["epoch"], final["step"], final["digest"])] * 2
    assert [line["epoch"] for line in job.log("final")] == [final["epoch"] + 1] * 2
