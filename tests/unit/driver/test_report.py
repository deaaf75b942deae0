"""What a person reads, and what the event file holds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from elasticstate.core.types import RootCause, WorkerId
from elasticstate.driver.report import Report
from elasticstate.errors import OptionError
from elasticstate.failures import WorkerFailure

STARTED = {"generation": 0, "np": 4, "min_np": 2, "max_np": None}


def exited(worker: str, rank: int | None, exit_code: int | None, signal: int | None) -> dict[str, object]:
    host, slot = worker.partition("#")[0].split(":")
    place = {"generation": 3, "worker": worker, "host": host, "slot": int(slot), "rank": rank}
    return {**place, "exit_code": exit_code, "signal": signal, "error": "boom", "time_ns": 7}


def formed(generation: int, size: int, hosts: int, joined: list[str], left: list[str]) -> dict[str, object]:
    return {"generation": generation, "size": size, "hosts": hosts, "joined": joined, "left": left}


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [line.removeprefix("elasticrun: ") for line in captured.err.splitlines()]


def test_a_recovery_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("j", None, verbose=False)
    report.event("job_started", STARTED)
    report.event("world_formed", formed(1, 4, 2, ["a:0#1"], []))
    report.event("worker_exited", exited("b:1#1", 3, None, 9))
    report.event("world_formed", formed(4, 3, 2, [], ["b:1#1"]))
    report.event("training_resumed", {"generation": 4, "downtime_s": 0.0912, "ticks_lost": 0})
    assert said(capsys) == [
        "job j: 4 workers (2 to any number)",
        "generation 1: 4 workers on 2 hosts",
        "b:1 (rank 3) ended: SIGKILL",
        "generation 4: 3 workers on 2 hosts; lost b:1 (SIGKILL); back in 0.09 s, 0 commits lost",
    ]


def test_an_event_has_the_time_at_which_it_was(tmp_path: Path) -> None:
    report = Report("j", str(tmp_path / "events"), verbose=False)
    began = time.time()
    report.event("warning", {"generation": 1, "text": "now"})
    ended = time.time()
    report.event("world_formed", formed(1, 4, 2, [], []), time.monotonic() - 100)
    report.close()
    now, earlier = (json.loads(line)["time"] for line in (tmp_path / "events").read_text().splitlines())
    assert began - 1e-6 <= now <= ended + 1e-6
    assert now - 100 - 1e-6 <= earlier <= time.time() - 100 + 1e-6


def test_planned_changes_and_ticks_to_do_again(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("j", None, verbose=False)
    report.event("world_formed", formed(2, 1, 1, ["c:0#1"], ["a:0#1"]))
    report.event("training_resumed", {"generation": 2, "downtime_s": 1.0, "ticks_lost": 3})
    assert said(capsys) == [
        "generation 2: 1 worker on 1 host; without a:0; with c:0; back in 1.00 s, 0 commits lost, 3 ticks to do again"
    ]


def test_a_world_that_never_trained_is_not_kept_from_people(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("j", None, verbose=False)
    report.event("world_formed", formed(2, 2, 1, [], []))
    report.event("world_formed", formed(3, 1, 1, [], []))
    assert said(capsys) == ["generation 2: 2 workers on 1 host"]
    fields = {"generation": 3, "status": "failed", "generations": 3, "downtime_s": 2.0, "goodput": None}
    report.summary(fields, "failed", 12.34)
    assert said(capsys) == [
        "generation 3: 1 worker on 1 host",
        "job j failed after 12.3 s: 3 generations, downtime 2.00 s",
    ]


def test_the_failures_of_workers_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("j", None, verbose=False)
    report.sent_away(WorkerId("a", 0, 1))
    report.event("worker_exited", exited("a:0#1", None, None, 15))
    report.event("worker_exited", exited("a:1#1", 1, 0, None))
    report.event("worker_exited", exited("b:1#1", 3, 5, None))
    failure = WorkerFailure("b:1 ended: exit code 5", "b", 1, 3, 3, 5, None, "boom", 7)
    assert report.failures == [failure]


def test_who_was_sent_away_is_no_news(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("j", None, verbose=False)
    report.sent_away(WorkerId("a", 0, 1))
    report.event("worker_exited", exited("a:0#1", None, None, 15))
    report.event("worker_exited", exited("a:1#1", 1, 0, None))
    assert said(capsys) == []


def test_the_root_cause_tells_all(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("j", None, verbose=False)
    cause = RootCause("b:1#2 exited with 1", WorkerId("b", 1, 2), 3, 4, exit_code=1, error="Traceback:\n  boom\n")
    report.root_cause(cause)
    assert said(capsys) == [
        "root cause: b:1#2 exited with 1",
        "  worker b:1 on host b, rank 3, generation 4, exit code 1",
        "  Traceback:",
        "    boom",
    ]


def test_verbose_says_every_event_and_each_new_reason(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("j", None, verbose=True)
    report.event("hold", {"generation": 1, "cause": "a host joined"})
    for reason in ("waits", "waits", "", "goes on"):
        report.reason(reason)
    assert said(capsys) == ["hold generation=1 cause=a host joined", "because waits", "because goes on"]


def test_the_event_file_has_a_line_at_once_for_each_event(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text('{"event": "earlier"}\n')
    report = Report("j", str(path), verbose=False)
    report.event("hold", {"generation": 1, "cause": "x"})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"event": "earlier"}
    assert list(lines[1]) == ["time", "event", "job", "generation", "cause"]
    assert isinstance(lines[1]["time"], float)
    report.close()


def test_a_full_disk_is_told_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("j", "/dev/full", verbose=False)
    for _ in range(3):
        report.event("hold", {"generation": 1, "cause": "x" * 10_000})
    report.close()
    said = capsys.readouterr().err
    assert said.count("warning: --events-file: '/dev/full': No space left on device: the job goes on without it") == 1


def test_an_event_file_that_cannot_be_written_is_a_bad_option() -> None:
    with pytest.raises(OptionError, match="--events-file: '/nowhere/x': takes a path to write to"):
        Report("j", "/nowhere/x", verbose=False)
