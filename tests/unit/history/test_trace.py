"""The trace of hand-written events: lanes, spans, ranks and counters."""

from __future__ import annotations

import sys
from pathlib import Path

from elasticstate.history.event_files import read_events
from elasticstate.history.trace import ChromeTrace
from tests.kit.chrome_format import Event, checked, lanes
from tests.kit.events import BEGAN, EventLines, big_job, killed_and_restarted


def traced(lines: EventLines) -> list[Event]:
    made = ChromeTrace()
    made.add(str(lines.path), read_events(str(lines.path)))
    path = lines.path.with_suffix(".json")
    path.write_bytes(made.data())
    return checked(path)


def spans(events: list[Event], process: str, thread: str) -> list[tuple[str, float, float]]:
    """Return the spans of a lane: name, begin and end in seconds."""
    found = lanes(events)[process, thread]
    return [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in found]


def marks(events: list[Event]) -> list[tuple[float, str]]:
    return [(e["ts"] / 1e6, e["name"]) for e in events if e["ph"] == "i"]


def test_each_worker_has_its_spans(tmp_path: Path) -> None:
    events = traced(killed_and_restarted(tmp_path / "e"))
    assert spans(events, "host a", "slot 0") == [
        ("a:0#1", 0.2, 20),
        ("boot", 0.2, 1),
        ("ready, waits for a world", 1, 2),
        ("training in generation 1, rank 0", 2, 10),
        ("leaves the failed generation", 10, 10.2),
        ("training in generation 2, rank 0", 10.2, 12.5),
        ("world formation", 10.2, 10.5),
        ("ready, waits for a world", 12.5, 12.6),
        ("training in generation 3, rank 0", 12.6, 20),
        ("world formation", 12.6, 13),
    ]
    assert spans(events, "host a", "slot 1") == [
        ("a:1#1", 0.2, 10),
        ("boot", 0.2, 2),
        ("training in generation 1, rank 1", 2, 10),
        ("exited: SIGKILL", 10, 11),
        ("a:1#2", 11, 20),
        ("boot", 11, 12),
        ("ready, waits for a world", 12, 12.6),
        ("training in generation 3, rank 1", 12.6, 20),
        ("world formation", 12.6, 13),
        ("sync", 12.7, 12.8),
    ]


def test_the_job_has_its_lanes(tmp_path: Path) -> None:
    events = traced(killed_and_restarted(tmp_path / "e"))
    assert spans(events, "job job-1", "generations") == [
        ("generation 1: 2 workers", 2, 10.2),
        ("generation 2: 1 worker", 10.2, 12.6),
        ("generation 3: 2 workers", 12.6, 20.1),
    ]
    assert spans(events, "job job-1", "downtime") == [("downtime", 10, 10.5), ("downtime", 12.5, 13)]
    assert spans(events, "job job-1", "regroups") == [
        ("regroup: wait for all members", 10, 10.2),
        ("world formation, sync, first tick", 10.2, 10.5),
        ("hold: a:1#2 joins", 12, 12.1),
        ("regroup: wait for all members", 12.1, 12.6),
        ("world formation, sync, first tick", 12.6, 13),
    ]
    assert marks(events) == [
        (10, "generation 1 failed: a:1#1 was killed by SIGKILL"),
        (12.1, "generation 2 interrupted: a:1#2 joins"),
        (20.1, "job succeeded"),
        (0.1, "host a added"),
        (0.1, "agent of a joined"),
        (10, "a:1 (rank 1) failed: SIGKILL"),
    ]


def test_the_counters_follow_the_world(tmp_path: Path) -> None:
    events = traced(killed_and_restarted(tmp_path / "e"))
    counters = [(e["ts"] / 1e6, e["name"], *e["args"].values()) for e in events if e["ph"] == "C"]
    sizes = [(2, 2), (10.2, 1), (12.6, 2), (20.1, 0)]
    assert counters == [*((at, "world size", size) for at, size in sizes), (20.1, "goodput", 0.8)]


def test_goodput_is_known_after_each_generation_that_has_an_account(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "e").start()
    lines.add(2, "generation_finished", wall_s=2.0, goodput_s=0.0, badput_s={"boot": 2.0}, redone_earlier_s=0.0)
    lines.add(10, "generation_finished", wall_s=8.0, goodput_s=6.0, badput_s={"regroup": 2.0}, redone_earlier_s=1.0)
    goodput = [e["args"]["share"] for e in traced(lines) if e["ph"] == "C" and e["name"] == "goodput"]
    assert goodput == [0.0, 0.5]


def test_ranks_are_those_of_the_core(tmp_path: Path) -> None:
    """Hosts are ordered by their oldest worker, the workers of a host by age."""
    lines = EventLines(tmp_path / "e").start().host(0, "b", 2).host(0, "a", 1)
    first = ["b:1#1", "a:0#1"]
    for worker in first:
        lines.worker(1, "started", worker)
    for worker in first:
        lines.worker(2, "ready", worker)
    lines.world(3, 2, first, hosts=2)
    lines.worker(4, "started", "b:0#1").worker(5, "ready", "b:0#1").end(6, "b:0#1 joins", 9)
    lines.world(7, 3, ["b:0#1"], hosts=2).end(8, "a:0#1 drains", 9).world(9, 2, left=["a:0#1"])
    events = traced(lines)

    def names(process: str, thread: str) -> list[str]:
        return [name for name, _, _ in spans(events, process, thread) if name.startswith("training")]

    assert names("host b", "slot 1") == [f"training in generation {g}, rank 0" for g in (1, 2, 3)]
    assert names("host b", "slot 0") == ["training in generation 2, rank 1", "training in generation 3, rank 1"]
    assert names("host a", "slot 0") == ["training in generation 1, rank 1", "training in generation 2, rank 2"]


def test_a_file_that_begins_in_the_middle_of_a_job_has_spans_without_ranks(tmp_path: Path) -> None:
    whole = killed_and_restarted(tmp_path / "whole").path.read_text().splitlines(keepends=True)
    lines = EventLines(tmp_path / "e")
    lines.path.write_text("".join(whole[9:]))  # after the first world
    names = [name for name, _, _ in spans(traced(lines), "host a", "slot 0")]
    assert names[:2] == ["a:0#1", "ready, waits for a world"]
    assert [name for name in names if "rank" in name] == []


def test_a_file_of_a_running_job_ends_all_spans(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "e").start().host(0, "a", 1).worker(1, "started", "a:0#1")
    lines.worker(2, "ready", "a:0#1").world(3, 1, ["a:0#1"]).add(9, "warning", text="still here")
    events = traced(lines)
    assert spans(events, "host a", "slot 0")[-1] == ("training in generation 1, rank 0", 3, 9)
    assert lanes(events)["host a", "slot 0"][0]["args"] == {"end": "the file ends"}


def test_a_reattached_driver_continues_the_lanes(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "e").start().host(0, "a", 1).worker(1, "started", "a:0#1")
    lines.worker(2, "ready", "a:0#1").world(3, 1, ["a:0#1"]).add(4, "hold", cause="x")
    lines.add(30, "driver_restarted", epoch=2, back=["a"], lost=[])
    lines.exited(40, "a:0#1", 0, code=0).finished(40.5, driver=2)
    events = traced(lines)
    assert spans(events, "job job-1", "drivers") == [("no event until driver 2 reattached", 4, 30)]
    assert spans(events, "host a", "slot 0")[-1] == ("training in generation 1, rank 0", 3, 40)
    assert (30, "driver 2 reattached") in marks(events)


def test_a_second_run_of_a_job_in_the_same_file_has_processes_of_its_own(tmp_path: Path) -> None:
    killed_and_restarted(tmp_path / "e")
    lines = EventLines(tmp_path / "e", began=BEGAN + 100)
    lines.start().host(0, "a", 1).worker(1, "started", "a:0#1").exited(2, "a:0#1", None, code=1).finished(3, "failed")
    events = traced(lines)
    jobs = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert jobs == ["job job-1", "host a", "job job-1", "host a"]
    assert min(e["ts"] for e in events if e["pid"] == 3 and e["ph"] != "M") == 103e6


def test_drains_and_cooldowns_of_several_hosts_overlap_in_lanes_of_their_own(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "e").start()
    for host in "abc":
        lines.host(0, host, 1)
    for at, host in enumerate("abc"):
        lines.add(1 + at, "host_draining", host=host, reason="SIGTERM to the agent")
    for at, host in enumerate("abc"):
        lines.add(5 + at, "host_cooldown", host=host, seconds=3.0 * (1 + at), reason="preemption notice")
    lines.add(30, "stall", call="allreduce x", seconds=20.0, waiting=[0], missing=[1], who="b:0 (never called)")
    lines.add(40, "stall_ended", call="allreduce x", seconds=30.0, reason="the call has ended")
    events = traced(lines)
    assert [spans(events, "job job-1", lane) for lane in ("drains", "drains 2", "drains 3")] == [
        [("drain of a", 1, 5)],
        [("drain of b", 2, 6)],
        [("drain of c", 3, 7)],
    ]
    assert spans(events, "job job-1", "cooldowns") == [("cooldown of a", 5, 8)]
    assert spans(events, "job job-1", "cooldowns 3") == [("cooldown of c", 7, 16)]
    assert spans(events, "job job-1", "stalls") == [("stall: allreduce x", 10, 40)]


def test_a_cut_link_and_its_end_are_marked(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "e").start().host(0, "b", 1).add(5, "link_cut", host="b", peer="c")
    events = traced(lines.add(9, "link_restored", host="b", peer="c", seconds=4.0))
    assert (5, "host b gets no answer from host c") in marks(events)
    assert (9, "host b reaches host c again") in marks(events)


def test_a_clock_that_is_set_back_gives_no_negative_span(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "e").start().host(0, "a", 1).worker(10, "started", "a:0#1")
    lines.worker(4, "ready", "a:0#1").world(5, 1, ["a:0#1"]).resumed(3, 2.0).end(2, "x").exited(1, "a:0#1", 0, code=1)
    lines.finished(0.5)
    assert spans(traced(lines), "host a", "slot 0")[0][0] == "a:0#1"


def test_the_work_grows_with_the_number_of_events(tmp_path: Path) -> None:
    """Count the calls of functions per event: with more worlds and workers they stay the same."""

    def calls_per_event(workers: int, worlds: int) -> float:
        path = big_job(tmp_path / f"{workers}-{worlds}", workers, worlds)
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            made = ChromeTrace()
            made.add(str(path), read_events(str(path)))
            made.data()
        finally:
            sys.setprofile(None)
        return calls / path.read_text().count("\n")

    assert calls_per_event(400, 20) < 1.2 * calls_per_event(40, 5)
