"""Sinks next to files that an earlier rank 0 has left, in the formats of the libraries themselves."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from pathlib import Path
from random import Random

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elasticstate.errors import UsageError
from elasticstate.loggers import Point, ProgressBar, Sink, TensorBoard, WandB
from elasticstate.loggers.sinks import TransactionLog, required

BEGINNING = """
import pathlib, sys, wandb
from elasticstate.loggers import Point, WandB
folder = pathlib.Path(sys.argv[1])
settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
"""
SINK = """
rows = [Point(step, {"loss": step / 8}, 0.0) for step in (1, 2, 3, 4)]
sink = WandB(str(folder), id="run", settings=settings)
"""


def points(*steps: int) -> list[Point]:
    return [Point(step, {"loss": step / 8, "lr": 0.5}, 100.0 + step) for step in steps]


def test_a_new_writer_skips_the_scalars_that_the_last_one_has_written(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    first.open(1)
    first.write(points(1, 2, 3))
    (file,) = tmp_path.iterdir()
    with open(file, "r+b") as torn:  # a part of the last event
        torn.truncate(file.stat().st_size - 5)
    second = TensorBoard(tmp_path)
    second.open(2)
    second.write(points(2, 3, 4))
    second.close()
    first.close()
    curve = EventAccumulator(str(tmp_path)).Reload()
    for tag in ("loss", "lr"):
        assert [event.step for event in curve.Scalars(tag)] == [1, 2, 3, 4]
    assert [event.value for event in curve.Scalars("loss")] == [step / 8 for step in (1, 2, 3, 4)]
    assert [event.wall_time for event in curve.Scalars("loss")] == [101, 102, 103, 104]


def test_the_events_of_another_job_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = TensorBoard(tmp_path)
    other.open(1)
    other.write(points(1))
    other.close()
    monkeypatch.setattr("elasticstate.loggers.sinks.job_name", lambda: "mine")
    sink = TensorBoard(tmp_path)
    sink.open(1)
    sink.write(points(1))
    sink.close()
    assert len(list(tmp_path.glob("*.mine"))) == 1


def test_an_offline_run_of_wandb_continues_in_another_file(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        for steps, first, all_there in (((1, 2, 3), 1, 0), ((2, 3), 2, 3), ((2, 3, 4, 5), 2, 3)):
            sink = WandB(str(folder), id="run", settings=settings)
            sink.open(first)
            assert sink.durable(0) == (all_there or -1)
            sink.write([Point(step, {"loss": step / 8}, 0.0) for step in steps])
            sink.close()
        """,
    )
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-run.wandb"))
    assert [list(TransactionLog(path).steps()) for path in files] == [[1, 2, 3], [4, 5]]


def test_rows_that_an_earlier_rank_0_writes_too_late_do_not_count(tmp_path: Path) -> None:
    """The process of wandb outlives a killed worker, and then writes what it has."""
    second = """
sink.open(1)
sink.write(rows)
sink.close()
"""
    first = f"""
import os, subprocess
sink.open(1)
sink.write(rows[:3])
assert sink.durable(3) == -1
mine = {{name: value for name, value in os.environ.items() if not name.startswith("WANDB")}}
subprocess.run([sys.executable, "-c", {BEGINNING + SINK + second!r}, str(folder)], env=mine, check=True)
sink._run.finish()
"""
    run(tmp_path, SINK + first)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-run.wandb"))
    assert len(files) == 2
    assert [step for path in files for step in TransactionLog(path).steps()] == [1, 2, 3, 4]


def test_each_record_of_a_growing_file_of_wandb_is_read_once(tmp_path: Path) -> None:
    """The rows are longer than a block of the file. The reader sees the file in prefixes of any length."""
    run(
        tmp_path,
        """
        run = wandb.init(dir=folder, mode="offline", settings=settings)
        for step in range(12):
            run.log({"text": f"{step:05}" * 3000}, step=step)
        run.finish()
        """,
    )
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    whole, seed = file.read_bytes(), Random(0)
    assert len(whole) > 5 * 32 * 1024
    growing = tmp_path / "growing"
    reader = TransactionLog(growing)
    assert list(reader.steps()) == []
    found = []
    for end in [*sorted(seed.sample(range(len(whole)), 40)), len(whole)]:
        growing.write_bytes(whole[:end])
        found += [(row["_step"], row["text"]) for row in reader.rows()]
    assert found == [(step, f"{step:05}" * 3000) for step in range(12)]


def run(folder: Path, program: str) -> None:
    """Run a program in a process of its own: wandb leaves threads in it."""
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + textwrap.dedent(program), str(folder)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_progress_bar_begins_at_the_first_step_that_it_shows() -> None:
    output = io.StringIO()
    sink = ProgressBar(total=10, file=output, mininterval=0)
    for point in points(7, 8, 8):
        sink.show(point)
    sink.close()
    sink.close()
    lines = [line for line in output.getvalue().split("\r") if line]
    assert "6/10" in lines[0]
    assert "8/10" in lines[-1]
    assert "loss=1" in lines[-1]


def test_bad_input_is_named() -> None:
    with pytest.raises(UsageError, match=r"WandB\(mode=...\): remove it"):
        WandB(mode="online")
    with pytest.raises(UsageError, match=r"Mine needs the package some-thing\. Run: pip install some-thing"):
        required("no_such_module", "some-thing", "Mine")


def test_a_sink_of_ones_own_needs_only_write() -> None:
    class Mine(Sink):
        pass

    sink = Mine()
    sink.open(1)
    sink.write(points(1))
    sink.show(*points(1))
    assert sink.durable(1) == 1
    sink.close()
