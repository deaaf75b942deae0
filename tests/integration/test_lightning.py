"""PyTorch Lightning: kill, join and leave in the middle of epochs. Each sample is used once in each epoch."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.kit import forks
from tests.kit.forks import PACKAGE, SCRIPTS, Started, environment
from tests.kit.job import Hosts, Job, Line

SAMPLES = 700
EPOCH = 70  # batches of 10 samples
TOLERANCE = 1e-4
OPTIONS = ("--min-np", "1", "--join-window", "60", "--min-interrupt-distance", "0.2")
OPTIONS += ("--verify-sync", "--preload", "lightning.pytorch")
IMPORTED = ("lightning.pytorch", "sklearn.datasets")  # take three seconds
EXAMPLE = PACKAGE / "examples" / "lightning_digits.py"
GUIDE = PACKAGE / "docs" / "guides" / "lightning.md"
SCRIPT = [sys.executable, str(SCRIPTS / "lightning_digits.py")]
Place = tuple[int, int]  # epoch and batch in it


def command(folder: Path, *arguments: str) -> list[str]:
    return [*SCRIPT, "--log", str(folder / "logs"), "--samples", str(SAMPLES), *arguments]


def through_changes(folder: Path, *arguments: str, options: tuple[str, ...] = OPTIONS) -> Job:
    """Return an ended job that has survived a kill, a join and a leave, each in the middle of an epoch."""
    hosts = Hosts(folder).set("localhost:2")
    script = command(folder, "--until", str(folder / "stop"), "--step-seconds", "0.01", *arguments)
    with Job(folder, "-np", "2", *options, *hosts.options, imported=IMPORTED, command=script) as job:
        mid_epoch(job, 1, size=2)
        victim = job.pid_of(0, 1)
        os.kill(victim, signal.SIGKILL)
        job.wait_for_event("worker_exited", signal=signal.SIGKILL, pid=victim)
        job.wait_for_event("world_formed", generation=2, size=1)
        mid_epoch(job, 3, size=2)
        hosts.set("localhost:3")
        mid_epoch(job, 4, size=3)
        hosts.set("localhost:1")
        mid_epoch(job, 5, size=1)
        job.stop_file.touch()
        job.finish(0)
    return job


def mid_epoch(job: Job, generation: int, size: int) -> None:
    """Wait until the world has trained five steps, and is far from the end of an epoch."""
    job.wait_for_event("world_formed", generation=generation, size=size)

    def found() -> bool:
        lines = [line for line in job.log("trained") if line["generation"] == generation]
        return len({line["step"] for line in lines}) >= 5 and 5 <= lines[-1]["batch"] <= EPOCH // 3

    job.wait_for(f"steps in generation {generation}", found)


def place(line: Line) -> Place:
    return line["epoch"], line["batch"]


def begins(lines: list[Line]) -> dict[int, Place]:
    """Return the first batch of each generation."""
    found: dict[int, Place] = {}
    for line in lines:
        found[line["generation"]] = min(place(line), found.get(line["generation"], place(line)))
    return found


def counted(lines: list[Line]) -> list[Line]:
    """Return the lines that count: those before the batch with which a later world began."""
    first = begins(lines)
    end = {g: min((p for later, p in first.items() if later > g), default=(1_000_000, 0)) for g in first}
    return [line for line in lines if place(line) < end[line["generation"]]]


def check_samples(lines: list[Line]) -> int:
    """Check that each epoch used each sample once. Return the number of epochs."""
    seen = Counter((line["epoch"], sample) for line in lines for sample in line["ids"])
    epochs = 1 + max(int(line["epoch"]) for line in lines)
    wrong = [(epoch, i, seen[epoch, i]) for epoch in range(epochs) for i in range(SAMPLES) if seen[epoch, i] != 1]
    assert not wrong, f"(epoch, sample, how often): {wrong[:20]}"
    assert len(seen) == epochs * SAMPLES
    assert epochs >= 2
    return epochs


def check_worlds(job: Job) -> None:
    """Check that the members of each world begin equal to the last bit, and in the middle of an epoch."""
    assert not re.search("new process|does not import", job.output), "workers fork, with what is preloaded"
    job.check_survival()
    assert [event["size"] for event in job.events("world_formed")] == [2, 1, 2, 3, 1]
    first = begins(job.log("trained"))
    assert sum(first[generation][1] > 0 for generation in (2, 3, 4, 5)) >= 3, first  # one may hit the end by chance
    redone = {event["generation"]: event["ticks_lost"] for event in job.events("training_resumed")}
    assert (redone[3], redone[4], redone[5]) == (0, 0, 0), "joins and leaves redo nothing"
    assert redone[2] <= 1, "a failure redoes the batch in which it happened, also between two commits"


def check_random_numbers(lines: list[Line]) -> None:
    """Check that no worker draws a number twice, though the script sets a seed and Lightning sets it in each world."""
    drawn = Counter((line["pid"], line["random"]) for line in lines)
    assert max(drawn.values()) == 1


def check_files(folder: Path, final: Line) -> None:
    """Check that checkpoints stay in one directory, and that the steps in the logs are those of the training."""
    files = list(folder.rglob("*.ckpt"))
    assert {path.parent for path in files} == {folder / "csv" / "version_0" / "checkpoints"}
    assert Path(final["best"]) in files
    steps: list[int] = []
    for path in folder.rglob("metrics.csv"):
        with path.open() as file:
            steps += [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    assert max(steps) == final["step"] - 1
    curve = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in curve.Scalars("loss")] == list(range(final["step"]))


def losses(lines: list[Line]) -> dict[Place, float]:
    """Return the mean loss over the samples of each batch."""
    sums: dict[Place, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in lines:
        found = sums[place(line)]
        found[0] += line["loss"]
        found[1] += len(line["ids"])
    return {key: total / count for key, (total, count) in sums.items()}


def undisturbed(folder: Path, epochs: int, *arguments: str) -> list[Line]:
    """Return the lines that the script logs when it trains alone, without elasticrun."""
    (folder / "logs").mkdir(parents=True)
    _, *script = command(folder, "--epochs", str(epochs), *arguments)
    status, _, error = Started(forks.template(*IMPORTED), folder / "alone", script, environment()).finish(120)
    assert status == 0, error[-3000:]
    return [json.loads(line) for line in (folder / "logs" / "alone.jsonl").read_text().splitlines()]


def test_a_job_with_changes_gives_the_losses_of_an_undisturbed_run(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    script = ["--global-batch-size", "10"]
    job = through_changes(tmp_path, *script)
    check_worlds(job)
    lines, final = counted(job.log("trained")), job.log("final")[0]
    epochs = check_samples(lines)
    check_random_numbers(lines)
    check_files(tmp_path, final)
    assert {line["epoch"] for line in job.log("validated")} == set(range(epochs))

    alone = undisturbed(tmp_path / "alone", epochs, *script)
    found, expected = losses(lines), losses([line for line in alone if line["what"] == "trained"])
    assert sorted(found) == sorted(expected)
    deviation = max(abs(found[key] / expected[key] - 1) for key in expected)
    record_property("report", f"largest deviation of the loss in {len(expected)} steps of Lightning: {deviation:.1e}")
    assert deviation <= TOLERANCE
    same = ("step", "lr", "epoch", "epochs", "waited")  # progress, schedulers, and the states of two callbacks
    assert [final[name] for name in same] == [alone[-1][name] for name in same]


def test_epochs_change_their_length_and_ticks_wait_for_the_optimizers_step(tmp_path: Path) -> None:
    batches = ("--batch-size", "5", "--accumulate", "2")
    job = through_changes(tmp_path, *batches, "--commit-every", "1000", options=(*OPTIONS, "--tick-records"))
    check_worlds(job)
    lines = counted(job.log("trained"))
    epochs = check_samples(lines)
    check_random_numbers(lines)
    check_files(tmp_path, job.log("final")[0])
    assert {line["epoch"] for line in job.log("validated")} == set(range(epochs))
    assert all(batch % 2 == 0 for _, batch in begins(job.log("trained")).values()), "no world begins within a step"


def test_the_example_learns_in_two_workers(tmp_path: Path) -> None:
    arguments = ["-np", "2", "--preload", "lightning.pytorch", sys.executable, str(EXAMPLE), "--epochs", "3"]
    process = forks.elasticrun(arguments, tmp_path, imported=IMPORTED)
    printed, error = process.communicate(timeout=240)
    assert process.returncode == 0, error[-3000:]
    (accuracy,) = re.findall(r"accuracy (\d\.\d+)", printed)  # of rank 0 alone
    assert float(accuracy) > 0.8


def test_the_guide_shows_all_changed_lines() -> None:
    """The diff in the guide, applied backwards, makes the example a plain script of Lightning."""
    diff = GUIDE.read_text(encoding="utf-8").split("```diff\n")[1].split("```")[0].splitlines()
    added = [line[1:] for line in diff if line.startswith("+")]
    assert len(added) <= 6
    plain: list[str] = []
    shown = [line for line in diff if not line.startswith("-")]
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        if not shown or line != shown[0][1:]:
            plain.append(line)
            continue
        if not shown.pop(0).startswith("+"):
            plain.append(line.strip())
    assert not shown, f"not in the example, or not in this order: {shown[0]}"
    plain += [line[1:] for line in diff if line.startswith("-")]
    text = "\n".join(plain)
    compile(text, "plain", "exec")
    assert not re.search("elastic", text.split('"""')[2])


@pytest.mark.parametrize(
    ("place", "rank"),
    [
        pytest.param("validation", (), id="validation-all"),
        pytest.param("validation", ("--rank", "0"), id="validation-one", marks=pytest.mark.long),
        pytest.param("saved", (), id="saved-all", marks=pytest.mark.long),
        pytest.param("saved", ("--rank", "0"), id="saved-one"),
    ],
)
def test_checkpoint_files_of_an_attempt_that_was_given_up_are_removed(
    tmp_path: Path, place: str, rank: tuple[str, ...]
) -> None:
    files = tmp_path / "files"
    script = [sys.executable, str(SCRIPTS / "lightning_checkpoints.py"), "--files", str(files), "--place", place, *rank]
    with Job(tmp_path, "-np", "2", *OPTIONS, imported=IMPORTED, command=script) as job:
        job.finish(0)
    killed = [e["rank"] for e in job.events("worker_exited") if e["signal"] and e["generation"] == 1]
    assert sorted(killed) == ([0] if rank else [0, 1])
    expected = {"step=12.ckpt", "last.ckpt"} if place == "saved" else {f"step={n}.ckpt" for n in range(2, 13, 2)}
    assert {path.name for path in files.iterdir()} == expected
