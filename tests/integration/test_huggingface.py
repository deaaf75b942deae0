"""The Trainer of Transformers, and a loop with Accelerate, through a SIGKILL, a leave and a join in mid-epoch."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
from job import PACKAGE, SCRIPTS, Hosts, Job

TOLERANCE = 1e-4
OPTIONS = ("--failure-grace", "0.5", "--join-window", "30", "--min-interrupt-distance", "0.2", "--min-np", "1")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


def command(script: str, folder: Path, *arguments: str) -> list[str]:
    files = ["--log", str(folder / "logs"), "--stop", str(folder / "stop")]
    return [sys.executable, str(SCRIPTS / script), *files, *arguments]


def trained(job: Job, size: int, after: int, steps: int = 6) -> int:
    """Wait until a world of ``size``, later than generation ``after``, has trained some steps. Return its generation."""

    def found() -> int:
        worlds = [e["generation"] for e in job.events("world_formed") if e["size"] == size and e["generation"] > after]
        lines = [line for line in job.log("trained") if line["generation"] in worlds]
        done = {g: {line["step"] for line in lines if line["generation"] == g} for g in worlds}
        return next((generation for generation, seen in done.items() if len(seen) >= steps), 0)

    return int(job.wait_for(f"steps of {size} workers after generation {after}", found, timeout=120))


def disturb(job: Job, hosts: Hosts) -> list[int]:
    """Kill a worker; it is replaced. Let the host offer one slot, then four. Return the generations of these worlds."""
    first = trained(job, 3, 0)
    victim = job.pid_of(1, first)
    os.kill(victim, signal.SIGKILL)
    job.wait_for_event("worker_exited", signal=signal.SIGKILL, pid=victim)
    whole = trained(job, 3, first)
    hosts.set("localhost:1")
    alone = trained(job, 1, whole)
    hosts.set("localhost:4")
    joined = trained(job, 4, alone)
    job.wait_for("a second epoch", lambda: job.log("trained")[-1]["epoch"] >= 2)
    job.stop_file.touch()
    job.finish(0)
    assert [e["pid"] for e in job.events("worker_exited") if e["exit_code"] != 0] == [victim]
    return [first, whole, alone, joined]


def check_samples(job: Job, samples: int) -> None:
    """Check that each epoch has used each sample once. For a step that was trained again, the last time counts."""
    lines = job.log("trained")
    last: dict[int, int] = {}
    for line in lines:
        last[line["step"]] = max(last.get(line["step"], 0), line["generation"])
    counted = [line for line in lines if line["generation"] == last[line["step"]]]
    seen = Counter((line["epoch"], sample) for line in counted for sample in line["ids"])
    newest = max(line["epoch"] for line in lines)
    assert newest >= 1, "a whole epoch was trained"
    assert set(seen.values()) == {1}
    assert sum(epoch < newest for epoch, _ in seen) == newest * samples
    begins = {g: min(line["step"] for line in counted if line["generation"] == g) for g in set(last.values())}
    positions = [sum(seen_epoch == e for seen_epoch, _ in seen) for e in range(newest + 1)]
    assert positions[:-1] == [samples] * newest
    assert len(begins) >= 4


def check_losses(job: Job, alone: list[dict[str, float]]) -> float:
    """Check that each step's loss is that of one undisturbed process. Return the largest deviation."""
    found = {line["step"]: line for line in job.log("loss")}
    expected = {int(line["step"]): line for line in alone}
    assert sorted(found) == sorted(expected) == list(range(1, len(found) + 1))
    for step, line in expected.items():
        assert found[step]["lr"] == pytest.approx(line["lr"], rel=1e-9), step
        assert found[step]["epoch"] == pytest.approx(line["epoch"], rel=1e-9), step
    losses = [line["loss"] for line in alone]
    assert mean(losses[-10:]) < 0.9 * mean(losses[:10]), "it learns"
    return max(abs(found[step]["loss"] / expected[step]["loss"] - 1) for step in found)


def undisturbed(script: str, folder: Path, steps: int) -> list[dict[str, float]]:
    """Run the script in one process without elasticrun. Return its lines of losses."""
    (folder / "logs").mkdir(parents=True)
    arguments = command(script, folder, "--steps", str(steps), "--workers", "3")
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{PACKAGE}"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
    lines = map(json.loads, (folder / "logs" / "alone.jsonl").read_text().splitlines())
    return [line for line in lines if line["what"] == "loss"]


@pytest.mark.parametrize("script", ["huggingface_trainer.py", "huggingface_loop.py"])
def test_a_training_survives_a_kill_a_leave_and_a_join_in_mid_epoch(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hosts = Hosts(tmp_path).set("localhost:3")
    options = (*OPTIONS, *hosts.options, "--preload", "elasticstate.huggingface.trainer")
    train = command(script, tmp_path, "--pace", "0.03", "--commit-every", "3")
    with Job(tmp_path, "-np", "3", "--max-np", "4", *options, command=train) as job:
        disturb(job, hosts)
        job.check_survival()
        check_samples(job, 253)
        steps = {line["step"] for line in job.log("final")}
        assert len(steps) == 1
    alone = undisturbed(script, tmp_path / "alone", steps.pop())
    deviation = check_losses(job, alone)
    print("deviation", deviation)
    assert not math.isnan(deviation)
    assert deviation <= TOLERANCE
