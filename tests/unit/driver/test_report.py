"""Lines for people, and the content of the event file."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import pytest

from elasticstate.core.figures import JobFigures, Losses, Times
from elasticstate.core.ids import WorkerId
from elasticstate.core.types import RootCause
from elasticstate.driver.job import Outcome
from elasticstate.driver.report import Report
from elasticstate.errors import OptionError
from elasticstate.failures import NO_WORLD_HINT, WorkerFailure

STARTED = {"generation": 0, "np": 4, "min_np": 2, "max_np": None}


def exited(worker: str, rank: int | None, exit_code: int | None, signal: int | None) -> dict[str, object]:
    host, slot = worker.partition("#")[0].split(":")
    place = {"generation": 3, "worker": worker, "host": host, "slot": int(slot), "rank": rank}
    return {**place, "exit_code": exit_code, "signal": signal, "error": "boom", "time_ns": 7}


def formed(generation: int, size: int, hosts: int, joined: list[str], left: list[str]) -> dict[str, object]:
    return {"generation": generation, "size": size, "hosts": hosts, "joined": joined, "left": left}


@pytest.fixture
def open_report() -> Iterator[Callable[..., Report]]:
    reports = []

    def opened(events_file: str | None = None, verbose: bool = False) -> Report:
        reports.append(Report("j", events_file, verbose))
        return reports[-1]

    yield opened
    for report in reports:
        asyncio.run(report.close(60))


def logged(report: Report, capfd: pytest.CaptureFixture[str]) -> list[str]:
    (terminal,) = report.writers["stderr"]
    asyncio.run(terminal.flushed())
    captured = capfd.readouterr()
    assert captured.out == ""
    return [line.removeprefix("elasticrun: ") for line in captured.err.splitlines()]


def test_the_terminal_says_that_memory_was_used_up(
    open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]
) -> None:
    report = open_report()
    killed = "out of memory: its memory cgroup counted 1 OOM kill(s) while the worker ran"
    for worker, code, signal in (("b:1#1", None, 9), ("b:2#1", 1, None)):
        report.event("worker_exited", {**exited(worker, 3, code, signal), "error": f"its stderr\n{killed}"})
    assert logged(report, capfd) == [f"b:1 (rank 3) ended: SIGKILL: {killed}", "b:2 (rank 3) ended: exit code 1"]


def test_a_new_worker_of_a_running_job_that_expects_a_world_is_told_what_to_change_once(
    open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]
) -> None:
    report = open_report()
    failed = {**exited("b:1#1", None, 1, None), "error": f"KeyError: 'RANK'\n{NO_WORLD_HINT}"}
    report.event("worker_exited", failed)  # before the first world: the root cause says it
    report.event("world_formed", formed(1, 4, 2, ["a:0#1"], []))
    report.event("worker_exited", failed)
    report.event("worker_exited", failed)
    ends = [line for line in logged(report, capfd) if "generation" not in line]
    advice = [f"  {line}" for line in NO_WORLD_HINT.splitlines()]
    assert ends == ["b:1 ended: exit code 1", "b:1 ended: exit code 1:", *advice, "b:1 ended: exit code 1"]


def test_a_recovery_is_one_line(open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]) -> None:
    report = open_report()
    report.event("job_started", STARTED)
    report.event("world_formed", formed(1, 4, 2, ["a:0#1"], []))
    report.event("worker_exited", exited("b:1#1", 3, None, 9))
    report.event("world_formed", formed(4, 3, 2, [], ["b:1#1"]))
    report.event("training_resumed", {"generation": 4, **Losses(0.0912).fields()})
    assert logged(report, capfd) == [
        "job j started: 4 workers (2 to any number)",
        "generation 1: 4 workers on 2 hosts",
        "b:1 (rank 3) ended: SIGKILL",
        "generation 4: 3 workers on 2 hosts; lost: b:1 (SIGKILL); training resumed after 0.09 s, 0 commits lost, "
        "0 ticks redone",
    ]


def test_a_worker_that_has_drained_before_the_next_world_has_left_and_is_not_lost(
    open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]
) -> None:
    report = open_report()
    report.event("world_formed", formed(1, 4, 2, ["a:0#1"], []))
    report.event("worker_exited", {**exited("b:1#1", 3, 0, None), "expected": True})
    report.event("worker_exited", {**exited("b:0#1", 2, None, 15), "expected": True})  # without run
    report.event("worker_exited", {**exited("a:1#1", 1, 0, None), "expected": False})
    report.event("world_formed", formed(2, 1, 1, [], ["a:1#1", "b:0#1", "b:1#1"]))
    report.event("training_resumed", {"generation": 2, **Losses(0.1).fields()})
    assert logged(report, capfd)[1] == (
        "generation 2: 1 worker on 1 host; lost: a:1 (exit code 0); left: b:0, b:1; training resumed after 0.10 s, "
        "0 commits lost, 0 ticks redone"
    )


def test_an_event_has_the_time_of_the_fact(open_report: Callable[..., Report], tmp_path: Path) -> None:
    report = open_report(str(tmp_path / "events"))
    began = time.time()
    report.event("warning", {"generation": 1, "text": "now"})
    ended = time.time()
    report.event("world_formed", formed(1, 4, 2, [], []), time.monotonic() - 100)
    asyncio.run(report.close(60))
    now, earlier = (json.loads(line)["time"] for line in (tmp_path / "events").read_text().splitlines())
    assert began - 1e-6 <= now <= ended + 1e-6
    assert now - 100 - 1e-6 <= earlier <= time.time() - 100 + 1e-6


def test_planned_changes_and_what_they_cost(
    open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]
) -> None:
    report = open_report(None, False)
    report.event("world_formed", formed(2, 1, 1, ["c:0#1"], ["a:0#1"]))
    report.event("training_resumed", {"generation": 2, **Losses(1.0, 1, 3).fields()})
    bounds = frozenset({"downtime_s", "commits_lost", "ticks_lost"})
    report.event("training_resumed", {"generation": 2, **Losses(0.5, 0, 0, bounds).fields()})
    assert logged(report, capfd) == [
        "generation 2: 1 worker on 1 host; left: a:0; joined: c:0; training resumed after 1.00 s, "
        "1 commit lost, 3 ticks redone",
        "generation 2; training resumed after at least 0.50 s, at least 0 commits lost, at least 0 ticks redone",
    ]


def test_a_standstill_and_its_end_are_logged(
    open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]
) -> None:
    report = open_report(None, False)
    report.event("no_tick", {"generation": 1, "seconds": 60.2, "text": "no tick for 60 s: rank 0 is at train.py:14"})
    report.event("no_tick_ended", {"generation": 1, "seconds": 65.0, "goes_on": True, "reason": "ticks go on"})
    report.event("no_tick_ended", {"generation": 1, "seconds": 65.0, "goes_on": False, "reason": "it has ended"})
    assert logged(report, capfd) == [
        "warning: no tick for 60 s: rank 0 is at train.py:14",
        "ticks go on after 65 s without a tick",
    ]


def test_a_world_that_never_trained_is_logged(
    open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]
) -> None:
    report = open_report()
    report.event("world_formed", formed(2, 2, 1, [], []))
    report.event("world_formed", formed(3, 1, 1, [], []))
    assert logged(report, capfd) == ["generation 2: 2 workers on 1 host"]
    report.summary(JobFigures(3, 2, Losses(2.0, 1), Times(boot=12.34), has_ticked=False), Outcome(1, "failed"))
    assert logged(report, capfd) == [
        "generation 3: 1 worker on 1 host",
        "job j failed after 12.3 s: 3 generations, 2 failures, downtime 2.00 s, 1 commit lost, 0 ticks redone",
    ]


def test_a_world_that_is_not_expected_to_tick_soon_is_logged_before_it_ends(
    open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]
) -> None:
    """Plain workers have no ticks, and so no costs that their line could wait for. A first tick may take long."""
    report = open_report()
    report.event("world_formed", {**formed(2, 2, 1, [], []), "plain": True})
    assert logged(report, capfd) == ["generation 2: 2 workers on 1 host"]
    report.event("world_formed", formed(3, 1, 1, [], []))
    report.look(report.due_at - 0.001)
    assert logged(report, capfd) == []
    report.look(report.due_at)
    assert logged(report, capfd) == ["generation 3: 1 worker on 1 host"]
    report.look(report.due_at)
    report.event("training_resumed", {"generation": 3, **Losses(7.0).fields()})
    report.event("world_formed", formed(4, 2, 1, [], []))
    report.event("training_resumed", {"generation": 4, **Losses(1.0).fields()})
    assert report.due_at == inf
    assert logged(report, capfd) == [
        "generation 3; training resumed after 7.00 s, 0 commits lost, 0 ticks redone",
        "generation 4: 2 workers on 1 host; training resumed after 1.00 s, 0 commits lost, 0 ticks redone",
    ]


@pytest.mark.parametrize("several", [True, False])
def test_workers_that_have_run_by_themselves_are_told_of(
    several: bool, open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]
) -> None:
    report = open_report()
    figures = JobFigures(0, 0, Losses(), Times(boot=1.0), has_ticked=False)
    report.summary(figures, Outcome(0, "succeeded"), should_train=several)
    (line,) = logged(report, capfd)
    assert line.startswith("job j succeeded after 1.0 s")
    assert ("Each worker ran by itself" in line) == several


def test_the_summary_covers_all_drivers(
    open_report: Callable[..., Report], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = open_report(str(tmp_path / "events"), False)
    times = Times(goodput=2.0, boot=0.8, regroup=0.9, redone_ticks=0.2, sync=0.1)
    report.summary(JobFigures(2, 1, Losses(None, 0, 7), times, has_ticked=True), Outcome(0, "succeeded"), driver=3)
    assert logged(report, capfd) == [
        "job j succeeded after 4.0 s: 2 generations, 1 failure, downtime unknown (no ticks), 0 commits lost, "
        "7 ticks redone, goodput 50.0%, badput: regroup 22.5%, boot 20.0%, redone ticks 5.0%; 3 drivers"
    ]
    asyncio.run(report.close(60))
    event = json.loads((tmp_path / "events").read_text())
    figures = {
        "failures": 1,
        "downtime_s": None,
        "commits_lost": 0,
        "ticks_lost": 7,
        "lower_bounds": [],
        "goodput": 0.5,
        "wall_s": 4.0,
        "goodput_s": 2.0,
        "badput_s": {"boot": 0.8, "sync": 0.1, "regroup": 0.9, "redone_ticks": 0.2},
    }
    assert {**figures, "driver": 3}.items() <= event.items()


def test_the_failures_of_workers_are_kept(
    open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]
) -> None:
    report = open_report(None, False)
    report.expect_end(WorkerId("a", 0, 1))
    report.event("worker_exited", exited("a:0#1", None, None, 15))
    report.event("worker_exited", exited("a:1#1", 1, 0, None))
    report.event("worker_exited", exited("b:1#1", 3, 5, None))
    failure = WorkerFailure("b:1 ended: exit code 5", "b", 1, 3, 3, 5, None, "boom", 7)
    assert report.failures == [failure]


def test_an_expected_end_is_not_logged(open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]) -> None:
    report = open_report()
    report.expect_end(WorkerId("a", 0, 1))
    report.event("worker_exited", exited("a:0#1", None, None, 15))
    report.event("worker_exited", exited("a:1#1", 1, 0, None))
    assert logged(report, capfd) == []


def test_the_root_cause_has_all_details(open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]) -> None:
    report = open_report()
    cause = RootCause("b:1#2 exited with 1", WorkerId("b", 1, 2), 3, 4, exit_code=1, error="Traceback:\n  boom\n")
    report.root_cause(cause)
    assert logged(report, capfd) == [
        "root cause: b:1#2 exited with 1",
        "  rank 3, generation 4",
        "  Traceback:",
        "    boom",
    ]


def test_verbose_logs_every_event_and_each_new_reason(
    open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]
) -> None:
    report = open_report(verbose=True)
    report.event("hold", {"generation": 1, "cause": "a host joined"})
    for reason in ("waits", "waits", "", "continues"):
        report.reason(reason)
    assert logged(report, capfd) == ["hold generation=1 cause=a host joined", "reason: waits", "reason: continues"]


def test_the_event_file_has_a_line_at_once_for_each_event(open_report: Callable[..., Report], tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text('{"event": "earlier"}\n')
    report = open_report(str(path))
    report.event("hold", {"generation": 1, "cause": "x"})
    asyncio.run(report.writers[f"--events-file {path}"][0].flushed())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"event": "earlier"}
    assert list(lines[1]) == ["time", "event", "job", "generation", "cause"]
    assert isinstance(lines[1]["time"], float)


def test_events_are_kept_while_their_disk_is_full_and_nothing_ends(
    open_report: Callable[..., Report], capfd: pytest.CaptureFixture[str]
) -> None:
    report = open_report("/dev/full")
    for _ in range(3):
        report.event("hold", {"generation": 1, "cause": "x" * 10_000})
    (events,) = report.writers["--events-file /dev/full"]
    asyncio.run(events.flushed())
    assert events.trouble() == "No space left on device"
    assert events.dropped_bytes == 0
    asyncio.run(report.close(60))
    assert events.dropped_bytes > 30_000


def test_an_event_file_that_cannot_be_written_is_a_bad_option() -> None:
    with pytest.raises(OptionError, match="--events-file: '/nowhere/x': cannot be written"):
        Report("j", "/nowhere/x", verbose=False)
