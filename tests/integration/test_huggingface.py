"""The Trainer of Transformers, and a loop with Accelerate, through a SIGKILL, a leave and a join in mid-epoch."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.kit import forks
from tests.kit.forks import SCRIPTS
from tests.kit.job import Hosts, Job, Line

WITH_TRAINER = pytest.mark.skipif(find_spec("transformers") is None, reason="Transformers requires Python 3.11")
EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 1e-4
OPTIONS = ("--join-window", "30", "--min-interrupt-distance", "0.2", "--min-np", "1")
PRELOADED = {
    "huggingface_trainer.py": "elasticstate.huggingface.trainer",
    "huggingface_loop.py": "elasticstate.huggingface.accelerator",
}
IMPORTED = (
    "elasticstate.huggingface.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
)
ALONE = """
from elasticstate.huggingface import Accelerator, run

@run
def main(state):
    Accelerator(state)

main()
"""
SAMPLES, STEPS_PER_EPOCH = 253, 22  # the last step of an epoch has one sample


def command(script: str, folder: Path, *arguments: str) -> list[str]:
    files = ["--log", str(folder / "logs"), "--stop", str(folder / "stop")]
    return [sys.executable, str(SCRIPTS / script), *files, *arguments]


def trained(job: Job, size: int, after: int, steps: int = 6) -> int:
    """Wait until a world of ``size``, later than generation ``after``, has trained steps. Return its generation."""

    def found() -> int:
        worlds = [e["generation"] for e in job.events("world_formed") if e["size"] == size and e["generation"] > after]
        lines = [line for line in job.log("trained") if line["generation"] in worlds]
        done = {g: {line["step"] for line in lines if line["generation"] == g} for g in worlds}
        return next((generation for generation, seen in done.items() if len(seen) >= steps), 0)

    return int(job.wait_for(f"steps of {size} workers after generation {after}", found, timeout=120))


def disturb(job: Job, hosts: Hosts, killed: int) -> list[int]:
    """Kill a worker; it is replaced. Let the host offer one slot, then four. Return the generations of these worlds."""
    first = trained(job, 3, 0)
    victim = job.pid_of(killed, first)
    os.kill(victim, signal.SIGKILL)
    job.wait_for_event("worker_exited", signal=signal.SIGKILL, pid=victim)
    whole = trained(job, 3, first)
    hosts.set("localhost:1")
    alone = trained(job, 1, whole)
    hosts.set("localhost:4")
    joined = trained(job, 4, alone)
    job.wait_for("a whole epoch", lambda: job.log("trained")[-1]["epoch"] >= 2)
    job.stop_file.touch()
    job.finish(0)
    assert [e["pid"] for e in job.events("worker_exited") if e["exit_code"] != 0] == [victim]
    return [first, whole, alone, joined]


def check_samples(job: Job, changed: list[int]) -> None:
    """Check that each epoch has used each sample once. For a step that was trained again, the last time counts.

    ``changed``: the generations of worlds, of which at least one must begin inside an epoch.
    """
    last: dict[int, int] = {}
    for line in job.log("trained"):
        last[line["step"]] = max(last.get(line["step"], 0), line["generation"])
    counted = [line for line in job.log("trained") if line["generation"] == last[line["step"]]]
    assert sorted(last) == list(range(len(last)))
    seen = Counter((line["epoch"], sample) for line in counted for sample in line["ids"])
    assert set(seen.values()) == {1}
    epochs = Counter(epoch for epoch, _ in seen)
    newest = max(epochs)
    assert newest >= 1
    assert [epochs[epoch] for epoch in range(newest)] == [SAMPLES] * newest
    assert any(min(step for step in last if last[step] == g) % STEPS_PER_EPOCH for g in changed)


def check_losses(job: Job, alone: list[Line], what: str) -> float:
    """Check that the lines ``what`` are those of one undisturbed process. Return the largest deviation of a loss."""
    found = {line["step"]: line for line in job.log(what)}
    assert [line["step"] for line in alone] == sorted(found)
    for line in alone:
        for name in {"lr", "epoch"} & set(line):
            assert found[line["step"]][name] == pytest.approx(line[name], rel=1e-9), line
    return max(abs(found[line["step"]]["loss"] / line["loss"] - 1) for line in alone)


def imported_by(script: str) -> tuple[str, ...]:
    """Return the modules that take seconds to import."""
    return IMPORTED if "trainer" in script else ()


def undisturbed(script: str, folder: Path, steps: int) -> dict[str, list[Line]]:
    """Run the script in one process without elasticrun. Return the lines of its log by kind."""
    (folder / "logs").mkdir(parents=True)
    _, *arguments = command(script, folder, "--steps", str(steps), "--workers", "3")
    template = forks.template(*imported_by(script))
    status, _, error = forks.Started(template, folder / "alone", arguments, forks.environment()).finish(240)
    assert status == 0, error[-6000:]
    lines: dict[str, list[Line]] = {}
    for line in map(json.loads, (folder / "logs" / "alone.jsonl").read_text().splitlines()):
        lines.setdefault(line["what"], []).append(line)
    return lines


def check_checkpoints(job: Job) -> None:
    """Check that the newest checkpoints are whole, and have the log of all steps."""
    saved = {line["step"] for line in job.log("saved")}
    folders = {int(path.name.split("-")[1]): path for path in (job.logs / "checkpoints").iterdir()}
    assert set(folders) == set(sorted(saved)[-2:])
    for step, folder in folders.items():
        state = json.loads((folder / "trainer_state.json").read_text())
        assert [line["step"] for line in state["log_history"] if "loss" in line] == list(range(1, step + 1))
        load_file(folder / "model.safetensors")
    load_file(job.logs / "model" / "model.safetensors")


def check_curve(folder: Path, steps: int) -> None:
    """Check that TensorBoard has each step once, and nothing else twice."""
    curve = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in curve.Scalars("train/loss")] == list(range(1, steps + 1))
    for tag in curve.Tags()["scalars"]:
        assert len({event.step for event in curve.Scalars(tag)}) == len(curve.Scalars(tag))


@pytest.mark.parametrize(
    ("script", "killed"), [pytest.param("huggingface_trainer.py", 0, marks=WITH_TRAINER), ("huggingface_loop.py", 1)]
)
def test_a_training_survives_a_kill_a_leave_and_a_join_in_mid_epoch(
    tmp_path: Path,
    script: str,
    killed: int,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hosts = Hosts(tmp_path).set("localhost:3")
    options = (*OPTIONS, *hosts.options, "--verify-sync", "--preload", PRELOADED[script])
    train = command(script, tmp_path, "--pace", "0.03", "--commit-every", "3")
    options = ("-np", "3", "--max-np", "4", *options)
    with Job(tmp_path, *options, imported=imported_by(script), command=train) as job:
        generations = disturb(job, hosts, killed)
    assert not re.search("new process|does not import", job.output), "workers fork, with what is preloaded"
    job.check_survival()
    check_samples(job, generations[1:])
    alone = undisturbed(script, tmp_path / "alone", job.log("final")[0]["step"])
    deviation = check_losses(job, alone["loss"], "loss")
    record_property("report", f"{script}: largest deviation of the loss on 3, 2, 3, 1, 4 workers: {deviation:.1e}")
    assert deviation <= TOLERANCE
    assert mean(line["loss"] for line in alone["loss"][-9:]) < 0.9 * mean(line["loss"] for line in alone["loss"][:9])
    if "evaluated" in alone:
        assert check_losses(job, alone["evaluated"], "evaluated") <= TOLERANCE
        check_checkpoints(job)
        check_curve(job.logs / "tensorboard", len(alone["loss"]))


@pytest.mark.parametrize(
    "kind",
    [
        "accelerator",
        pytest.param("bert", marks=[WITH_TRAINER, pytest.mark.long]),
        pytest.param("t5", marks=WITH_TRAINER),
    ],
)
def test_worlds_of_1_2_and_3_have_the_same_result(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    preload = ("--preload", "elasticstate.huggingface.trainer") if kind != "accelerator" else ()
    found = []
    for size in (1, 2, 3):
        (folder := tmp_path / str(size)).mkdir()
        train = [sys.executable, str(SCRIPTS / "huggingface_worlds.py"), kind]
        with Job(folder, "-np", str(size), *preload, imported=IMPORTED if preload else (), command=train) as job:
            job.finish(0)
        (line,) = re.findall(r"result (.*)", job.output)
        found.append([float(number) for number in re.findall(r"[-\d.]+", line)])
    assert len(found[0]) == {"accelerator": 8}.get(kind, 20)
    assert found[1:] == [pytest.approx(found[0], rel=1e-3, abs=2e-4)] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Accelerate finds the world without cpu=True")
def test_ranks_that_would_train_alone_are_an_error(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    with Job(tmp_path, "-np", "2", command=[sys.executable, str(script)]) as job:
        job.finish(3)
    assert "UsageError: The Accelerator is in a world of 1, and elasticstate in a world of 2." in job.output
    assert "use TrainingArguments(use_cpu=True) or Accelerator(cpu=True)" in job.output


@WITH_TRAINER
def test_the_examples_run_in_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runs = {"trainer.py": ["--epochs", "1", "--folder", str(tmp_path / "out")], "accelerate_loop.py": ["--epochs", "3"]}
    for name, arguments in runs.items():
        folder = tmp_path / name
        folder.mkdir()
        preload = ("--preload", "elasticstate.huggingface.trainer") if name == "trainer.py" else ()
        train = [sys.executable, str(EXAMPLES / name), *arguments]
        with Job(folder, "-np", "2", *preload, imported=imported_by(name), command=train) as job:
            job.finish(0)
        assert re.search(r"20 steps: mean loss [34]\.|3 epochs: training accuracy 0\.[89]", job.output), job.output
    assert (tmp_path / "out" / "checkpoint-20" / "model.safetensors").exists()
