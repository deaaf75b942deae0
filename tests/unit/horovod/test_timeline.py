"""The timeline: errors, the course over several worlds, and a file that a kill has cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import elasticstate.horovod as hvd
from elasticstate import NotInWorldError, UsageError, present_world
from elasticstate.horovod import timeline
from elasticstate.horovod.timeline import TraceFile


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def bars_of(path: Path, generation: int = 1) -> list[str]:
    return [event["name"] for event in events_of(path) if event["ph"] == "X" and event["pid"] == generation]


def test_a_timeline_needs_init(fresh: None, tmp_path: Path) -> None:
    with pytest.raises(NotInWorldError, match="init"):
        hvd.start_timeline(str(tmp_path / "trace"))


def test_a_second_start_and_a_second_stop_are_errors(alone: None, tmp_path: Path) -> None:
    hvd.start_timeline(str(tmp_path / "trace"))
    for again in ("trace", "other"):
        with pytest.raises(UsageError, match=f"a timeline is started already: {tmp_path / 'trace'}"):
            hvd.start_timeline(str(tmp_path / again))
    hvd.stop_timeline()
    with pytest.raises(UsageError, match="no timeline is started"):
        hvd.stop_timeline()


def test_calls_between_start_and_stop_are_recorded(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hvd.allreduce(torch.ones(1), name="before")
    hvd.start_timeline("trace")
    monkeypatch.chdir("/")
    hvd.allreduce(torch.ones(1), name="inside")
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(1), name="after")
    assert bars_of(tmp_path / "trace") == ["ALLREDUCE"]
    text = (tmp_path / "trace").read_text()
    assert "inside" in text
    assert "before" not in text
    assert "after" not in text


def test_the_same_file_continues_in_the_next_world_and_after_a_stop(
    next_world: Callable[[], None], tmp_path: Path
) -> None:
    path = str(tmp_path / "trace")
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(1))
    next_world()
    hvd.start_timeline(path)
    with pytest.raises(UsageError, match="started already"):
        hvd.start_timeline(path)
    hvd.broadcast(torch.ones(1), 0)
    hvd.stop_timeline()
    hvd.start_timeline(path)
    hvd.allgather(torch.ones(1))
    hvd.stop_timeline()
    assert bars_of(tmp_path / "trace", 1) == ["ALLREDUCE"]
    assert bars_of(tmp_path / "trace", 2) == ["BROADCAST", "ALLGATHER"]


def test_only_rank_0_writes(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline.extension, "world_rank", lambda: 1)
    hvd.start_timeline(str(tmp_path / "trace"))
    hvd.allreduce(torch.ones(1))
    hvd.stop_timeline()
    assert not (tmp_path / "trace").exists()
    assert present_world.rank() == 0


def test_calls_in_progress_have_rows_of_their_own(alone: None, tmp_path: Path) -> None:
    hvd.start_timeline(str(tmp_path / "trace"))
    handles = [hvd.allreduce_async(torch.ones(1), name="x") for _ in range(2)]
    for handle in handles:
        hvd.synchronize(handle)
    hvd.allreduce(torch.ones(1), name="x")
    hvd.stop_timeline()
    events = events_of(tmp_path / "trace")
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [rows[e["tid"]] for e in events if e["ph"] == "X"] == ["x", "x (2)", "x"]


def test_the_variable_starts_a_timeline_and_dynamic_does_not(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    hvd.init()
    assert timeline.present() is None
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "trace"))
    hvd.init()
    hvd.init()
    assert timeline.present() is not None


def write(path: Path, job: str, *names: str) -> None:
    trace = TraceFile(str(path), job)
    for name in names:
        trace.put({"name": name})
    trace.close()


def names_in(path: Path) -> list[str]:
    return [event["name"] for event in events_of(path)]


def test_a_file_of_another_job_is_replaced_and_one_of_this_job_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, "first", "a", "b")
    write(path, "second", "c")
    write(path, "second", "d")
    assert names_in(path) == ["job", "c", "d"]


def test_a_file_that_was_cut_anywhere_continues_with_its_whole_events(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, "job", "a", "text with ,\n and ]", "c")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        write(path, "job", "new")
        names = names_in(path)
        assert names[0] == "job"
        assert names[-1] == "new"
        kept = names[1:-1]
        assert kept == ["a", "text with ,\n and ]", "c"][: len(kept)]
    assert kept == ["a", "text with ,\n and ]", "c"], "the last cut left only the bracket out"


def test_an_open_file_is_an_array_without_its_bracket(tmp_path: Path) -> None:
    trace = TraceFile(str(tmp_path / "trace"), "job")
    assert json.loads((tmp_path / "trace").read_text() + "]")[0]["args"] == {"job": "job"}
    trace.close()
