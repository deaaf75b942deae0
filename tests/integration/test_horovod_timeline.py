"""The timeline of elasticstate.horovod in real jobs: the recorded calls are those that the script has made."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kit.job import SCRIPTS, Job

OPTIONS = ("--min-np", "2", "--join-window", "60")
Event = dict[str, Any]


def start(directory: Path, ranks: int, *arguments: object, options: tuple[str, ...] = ()) -> Job:
    script = [sys.executable, str(SCRIPTS / "horovod_timeline.py"), "--log", str(directory / "logs")]
    return Job(directory, "-np", str(ranks), *OPTIONS, *options, command=[*script, *map(str, arguments)])


def events_of(path: Path, is_closed: bool = True) -> list[Event]:
    """Return the events of a trace; without the closing bracket if its writer has not ended, or was killed."""
    text = path.read_text()
    assert text.endswith("\n]\n") == is_closed
    found: list[Event] = json.loads(text if is_closed else text + "]")
    return found


def rows_of(events: list[Event], generation: int) -> dict[int, str]:
    named = [e for e in events if e["name"] == "thread_name" and e["pid"] == generation]
    return {e["tid"]: e["args"]["name"] for e in named}


def bars_of(events: list[Event], generation: int) -> Counter[tuple[str, str, int | None, str | None]]:
    """Count the bars of a generation by name, row, bytes and dtype."""
    rows = rows_of(events, generation)
    bars = [e for e in events if e["ph"] == "X" and e["pid"] == generation]
    assert all(e["dur"] >= 0 and e["ts"] > 0 for e in bars)
    return Counter((e["name"], rows[e["tid"]], e["args"].get("bytes"), e["args"].get("dtype")) for e in bars)


def expected(steps: range, size: int) -> Counter[tuple[str, str, int | None, str | None]]:
    """Count the bars of the script's steps; only the sizes of pickles are left out."""
    each: list[tuple[str, str, int, str]] = [
        ("ALLREDUCE", "allreduce", 16, "float64"),
        ("ALLREDUCE", "allreduce (2)", 16, "float64"),
        ("ALLGATHER", "rows", 24, "int32"),
        ("BROADCAST", "from 0", 20, "float32"),
        ("ALLTOALL", "shares", 24 * size, "float32"),
        ("REDUCESCATTER", "parts", 4 * size, "float32"),
        ("ALLREDUCE", "gradients 0", 288, "float32"),
    ]
    found: Counter[tuple[str, str, int | None, str | None]] = Counter()
    for step in steps:
        found.update([("ALLREDUCE", f"sum {step}", 16, "float32"), *each])
        found.update(
            [("NEGOTIATE_ALLREDUCE", row, None, None) for row in (f"sum {step}", "allreduce", "allreduce (2)")]
        )
        names = ("allgather rows", "broadcast from 0", "alltoall shares", "reducescatter parts", "step gradients")
        words = [name.split(" ", 1) for name in (*names, "broadcast_object object")]
        words += [["allgather_object", "allgather_object"], ["barrier", "barrier"]]
        found.update([(f"NEGOTIATE_{operation.upper()}", row, None, None) for operation, row in words])
    return found


def without_objects(bars: Counter[Any]) -> Counter[Any]:
    return Counter(
        {bar: count for bar, count in bars.items() if bar[0] not in ("BROADCAST_OBJECT", "ALLGATHER_OBJECT")}
    )


def has_bars(trace: Path, bars: Counter[Any]) -> bool:
    """Return True if an open trace has these bars in generation 1. It may be read in the middle of a write."""
    try:
        return without_objects(bars_of(events_of(trace, is_closed=False), 1)) == bars
    except json.JSONDecodeError:
        return False


@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (3, "gloo"), (3, "mpi")])
def test_the_calls_of_rank_0_are_those_of_the_script(tmp_path: Path, ranks: int, backend: str) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("left over from another job")
    with start(tmp_path, ranks, "--timeline", trace, options=("--backend", backend)) as job:
        job.finish(0)
        events = events_of(trace)
        assert without_objects(bars_of(events, 1)) == expected(range(5), ranks)
        objects = [e for e in events if e["name"] in ("BROADCAST_OBJECT", "ALLGATHER_OBJECT")]
        assert len(objects) == 10
        assert all(e["args"]["bytes"] > 0 for e in objects)
        (title,) = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        assert title == f"generation 1: rank 0 of {ranks} on localhost"
        assert [e["name"] for e in events if e["ph"] == "i"] == [f"tick {n}" for n in range(1, 5)]


def test_the_worker_that_becomes_rank_0_continues_the_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with start(tmp_path, 3, "--timeline", trace, "--kill", "--in-train") as job:
        job.wait_for("rank 0 before its death", lambda: (job.logs / "waits").exists())
        job.wait_for("the bars of three steps", lambda: has_bars(trace, expected(range(3), 3)))
        (job.logs / "go").touch()
        job.finish(0)
        assert job.wait_for_event("worker_exited", signal=9)["rank"] == 0
        events = events_of(trace)
        assert without_objects(bars_of(events, 1)) == expected(range(3), 3)
        last_generation = max(line["generation"] for line in job.log("step"))
        assert last_generation > 1
        for generation in range(2, last_generation + 1):
            lines = [line for line in job.log("step") if line["generation"] == generation and line["rank"] == 0]
            wanted = Counter[Any]()
            for line in lines:
                wanted += expected(range(line["step"], line["step"] + 1), line["size"])
            assert lines
            assert without_objects(bars_of(events, generation)) >= wanted
        assert max(line["step"] for line in job.log("step")) == 4
        titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        assert [title.split(":")[0] for title in titles] == [f"generation {n}" for n in range(1, last_generation + 1)]


def test_options_of_elasticrun_start_the_timeline(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with start(tmp_path, 2, options=("--timeline-filename", str(trace), "--timeline-mark-cycles")) as job:
        job.finish(0)
        events = events_of(trace)
        assert without_objects(bars_of(events, 1)) == expected(range(5), 2)
        assert any(e["ph"] == "i" for e in events)


def test_horovods_variable_names_a_directory_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "none" / "trace.json"))
    with start(tmp_path, 2) as job:
        job.finish(3)
        assert f"there is no directory {tmp_path / 'none'}" in job.output
