"""TensorBoard, Weights & Biases and a progress bar through a SIGKILL of rank 0 and a leave of rank 0's host."""

from __future__ import annotations

import re
import signal
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from elasticstate.loggers.sinks import TransactionLog
from tests.kit.forks import SCRIPTS, Started, Template, environment
from tests.kit.job import Hosts, Job

KILL_AT = 37  # after an exchange at 30 and a commit at 35
OPTIONS = ("-np", "3", "--min-np", "1", "--join-window", "30", "--min-interrupt-distance", "0.2")
OPTIONS += ("--preload", "wandb,torch.utils.tensorboard")
Curve = list[tuple[int, float]]


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "logged.py"), "--folder", str(folder), *arguments]


def trained(job: Job, generation: int, steps: int) -> None:
    """Wait until all that is logged at ``steps`` steps of a generation, and at earlier ones, is written."""
    job.wait_for(
        f"{steps} steps of generation {generation}",
        lambda: len({line["step"] for line in job.log("trained") if line["generation"] == generation}) >= steps,
    )


def tensorboard(folder: Path) -> Curve:
    """Return the curve of the loss as TensorBoard shows it. Check that no event is repeated in the files."""
    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    curve = [(event.step, event.value) for event in shown.Scalars("loss/train")]
    files = [EventFileLoader(str(path)).Load() for path in sorted(folder.iterdir())]
    events = [(v.tag, event.step) for file in files for event in file for v in event.summary.value]
    assert len(events) == len(set(events)) == 2 * len(curve)
    return curve


def weights_and_biases(folder: Path) -> Curve:
    """Return the curve of the loss in all files of the run, in the order in which they were begun."""
    files = sorted(folder.glob("wandb/offline-run-*/run-one-run.wandb"))
    assert sorted(folder.glob("wandb/offline-run-*/*.wandb")) == files
    rows = [row for path in files for row in TransactionLog(path).rows()]
    return [(row["_step"], row["loss/train"]) for row in rows]


def undisturbed(template: Template, folder: Path, steps: int) -> tuple[Curve, Curve]:
    (folder / "logs").mkdir(parents=True)
    _, *arguments = command(folder, "--steps", str(steps))
    status, _, error = Started(template, folder / "alone", arguments, environment()).finish(120)
    assert status == 0, error[-3000:]
    return tensorboard(folder / "tensorboard"), weights_and_biases(folder / "wandb")


def test_a_change_of_rank_0_leaves_one_curve_and_one_bar(template: Template, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2", "127.0.0.2:1")
    script = command(tmp_path, "--kill-at", str(KILL_AT), "--pace", "0.02")
    with Job(tmp_path, *OPTIONS, *hosts.options, command=script) as job:
        killed = job.wait_for("a killed rank 0", lambda: job.log("killed"))[0]
        job.wait_for_event("worker_exited", signal=signal.SIGKILL, pid=killed["pid"])
        whole = job.wait_for_event("world_formed", count=2, size=3)["generation"]
        trained(job, whole, 25)
        hosts.set("127.0.0.2:1")
        left = job.wait_for_event("world_formed", size=1)["generation"]
        trained(job, left, 25)
        job.stop_file.touch()
        job.finish(0)
    ranks_0 = {line["generation"]: line["pid"] for line in job.log("enter") if line["rank"] == 0}
    assert len(set(ranks_0.values())) == 3, ranks_0
    steps = job.log("end")[-1]["step"]
    assert killed["step"] == KILL_AT
    assert steps > KILL_AT + 50

    curves = tensorboard(tmp_path / "tensorboard"), weights_and_biases(tmp_path / "wandb")
    expected = undisturbed(template, tmp_path / "alone", steps)
    for curve, smooth in zip(curves, expected, strict=True):
        assert [step for step, _ in curve] == list(range(1, steps + 1))
        assert curve == [(step, pytest.approx(loss, rel=1e-4, abs=1e-9)) for step, loss in smooth]
    check_bar(job.output, steps, len(set(ranks_0.values())))


def check_bar(output: str, steps: int, ranks_0: int) -> None:
    """Check that one worker after the other shows the bar, and that its count grows except for repeated steps.

    The last line of a worker has no end, so elasticrun shows it when the process has ended.
    """
    shown = [(slot, int(count)) for slot, count in re.findall(r"\[([^\]]+:\d)\][^\n\r]*?(\d+)/1000 ", output)]
    last = {slot: number for number, (slot, _) in enumerate(shown)}
    lines = [line for number, line in enumerate(shown) if number != last[line[0]]]
    changes = [slot for (slot, _), before in zip(lines, [("", 0), *lines], strict=False) if slot != before[0]]
    assert len(changes) == len(set(changes)) == ranks_0, changes
    counts = [count for _, count in lines]
    assert max(count for _, count in shown) == steps
    falls = [before - after for before, after in pairwise(counts) if after < before]
    assert all(fall <= 2 for fall in falls), falls
