"""``elasticrun verify``: a job's events hold, and each check finds an event file that breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from elasticstate.cli import main
from elasticstate.core import types as t
from elasticstate.core.step import new_membership, step
from tests.kit.policy import policy_of
from tests.kit.simulation.verified import Verified
from tests.kit.transcripts import parse_event

Line = dict[str, Any]
Edit = Callable[[list[Line]], object]

# Three workers on two hosts; one joins; b is lost, and is back after its cooldown; all pass the exit gate.
STORY = """
0.0 hosts a:2 b:1 + agent-joined a + agent-joined b
1.0 ready a:0#1 + ready a:1#1 + ready b:0#1
2.0 first a:0#1 in=1 train=0.2 sync=0.1
3.0 hosts a:3 b:1
4.0 ready a:2#1
4.1 answer a:0#1 in=1 ticks=9 to=1 + answer a:1#1 in=1 ticks=9 to=1 + answer b:0#1 in=1 ticks=9 to=1
4.2 ready a:0#1 in=1 commit=1.10 ticks=10
4.2 ready a:1#1 in=1 commit=1.10 ticks=10 + ready b:0#1 in=1 commit=1.10 ticks=10
5.0 first a:0#1 in=2 train=0.2 sync=0.1
9.0 agent-lost b sent no heartbeat
9.2 ready a:0#1 in=2 commit=2.7 ticks=9 + ready a:1#1 in=2 commit=2.7 ticks=9 + ready a:2#1 in=2 commit=2.7 ticks=9
9.5 first a:0#1 in=3 train=0.2 sync=0.1
80.0 agent-joined b
81.0 ready b:0#2
81.1 answer a:0#1 in=3 ticks=8 to=2 + answer a:1#1 in=3 ticks=8 to=2 + answer a:2#1 in=3 gate ticks=8 to=2
90.0 gate a:0#1 in=3 + gate a:1#1 in=3 + gate a:2#1 in=3
91.0 exit a:0#1 code=0 + exit a:1#1 code=0 + exit a:2#1 code=0 + exit b:0#2 code=0
"""


@cache
def recorded(story: str = STORY, **changes: Any) -> str:
    """Return the event file of the story, as the core writes it."""
    times = {"cooldown_range_s": (60.0, 60.0), "join_window_s": 0.0}
    policy = policy_of(**{"np": 3, "min_np": 2, "max_np": 4, **times, **changes})
    m, written = new_membership(policy), Verified(policy)
    for line in story.strip().splitlines():
        at, _, events = line.partition(" ")
        event = t.Several(tuple(parse_event(each.split()) for each in events.split(" + ")))
        m, effects, _ = step(m, event, float(at))
        for effect in effects:
            written.see(float(at), effect, m)
    return "".join(json.dumps(line) + "\n" for line in written.lines)


def story() -> list[Line]:
    return [json.loads(line) for line in recorded().splitlines()]


def put(number: int, **fields: object) -> Edit:
    """Return an edit that changes fields of a line."""
    return lambda lines: lines[number - 1].update(fields)


def drop(number: int) -> Edit:
    return lambda lines: lines.pop(number - 1)


def insert(number: int, event: str, **fields: object) -> Edit:
    """Return an edit that adds an event before a line, of the same time and generation."""
    return lambda lines: lines.insert(number - 1, {**COMMON, **lines[number - 1], "event": event, **fields})


def again(number: int, before: int) -> Edit:
    """Return an edit that repeats a line before another one."""
    return lambda lines: lines.insert(before - 1, {**lines[number - 1], "generation": lines[before - 1]["generation"]})


def verified(path: Path, lines: list[Line], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit status and the output for an event file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = main(["verify", str(path)])
    return status, capsys.readouterr().out.replace(f"{path}:", "F:").splitlines()


COMMON = {"worker": "b:0#1", "host": "b", "slot": 0}
LOST = {"downtime_s": 0.8, "commits_lost": 0, "ticks_lost": 0, "lower_bounds": []}
DRIVER = {"epoch": 2, "back": ["a", "b"], "lost": []}
DIFFER = {"commit": [2, 1], "ranks": [1], "hosts": ["a"], "groups": [[0, 2, 3], [1]], "text": "rank 1 differs"}
COPY = {"state": "saved", "folder": "f", "failures": 0, "bytes": 1, "seconds": 0.1}

# One edit for each check: the edit, the line, and what is wrong.
EDITS: dict[str, tuple[list[Edit], str]] = {
    "an event after the last": ([again(44, 44)], "F:45: job_finished after job_finished"),
    "a generation is left out": ([put(22, generation=3)], "F:22: world_formed of generation 3, and not 2"),
    "a world comes twice": ([again(22, 23)], "F:23: world_formed of generation 2, and not 3"),
    "an event of another generation": ([put(15, generation=0)], "F:15: worker_ready of generation 0, and not 1"),
    "a driver does not count up": ([insert(15, "driver_restarted", **DRIVER | {"epoch": 1})], "F:15: driver 1 after"),
    "a driver goes back": ([insert(23, "driver_restarted", **DRIVER, generation=1)], "F:23: driver 2 is in generation"),
    "the last driver is older": ([insert(44, "driver_restarted", **DRIVER)], "F:45: driver 1 after driver 2"),
    "a wrong number of generations": ([put(44, generations=4)], "F:44: 4 generations, and not 3"),
    "a failure is not counted": ([put(44, failures=0)], "F:44: 0 failures, after those of the generations [2]"),
    "a failure is counted twice": ([put(44, failures=3)], "F:44: 3 failures"),
    "seconds without a cause": ([put(12, wall_s=1.1)], "F:12: wall_s is 1.1, but goodput and badput are 1.000000"),
    "a negative time": ([put(12, goodput_s=-0.5, wall_s=0.5)], "F:12: a part of the time is -0.5"),
    "a generation's time is not in the job's": (
        [put(12, wall_s=2.0, badput_s={"boot": 2.0})],
        "F:44: wall_s is 91.0, and 92.000000 in all generations together",
    ),
    "a second account": ([again(12, 12)], "F:13: a second account of generation 0"),
    "no account": ([drop(21)], "F:21: no generation_finished of generation 1"),
    "lost ticks are not in the job's": ([put(44, ticks_lost=1)], "F:44: ticks_lost is 1, after 2 in training_resumed"),
    "training is resumed twice": ([again(23, 24)], "F:24: training is resumed a second time in generation 2"),
    "a planned change loses commits": ([put(23, commits_lost=1)], "F:23: planned changes lost 1 commits"),
    "lost commits are not in the job's": ([put(33, commits_lost=1)], "F:44: commits_lost is 0, after 1 in training"),
    "an older durable copy": (
        [insert(23, "durable_copy", **COPY, commit=[1, 9]), insert(23, "durable_copy", **COPY, commit=[1, 10])],
        "F:24: a durable copy of commit [1, 9] after that of [1, 10]",
    ),
    "an older replication": (
        [insert(23, "replication", commit=[1, 9]), insert(23, "replication", commit=[1, 10])],
        "F:24: a replication of commit [1, 9] after that of [1, 10]",
    ),
    "a divergence of another generation": (
        [insert(23, "divergence", **DIFFER | {"commit": [1, 1]})],
        "F:23: a divergence in commit [1, 1] of another generation",
    ),
    "a second divergence": (
        [insert(23, "divergence", **DIFFER), insert(23, "divergence", **DIFFER)],
        "F:24: a second divergence in generation 2",
    ),
    "a divergence of equal ranks": (
        [insert(23, "divergence", **DIFFER | {"groups": [[0, 1]]})],
        "F:23: the groups [[0, 1]] differ",
    ),
    "the majority differs": (
        [insert(23, "divergence", **DIFFER | {"ranks": [0, 2, 3]})],
        "F:23: ranks [0, 2, 3] differ, and not [1]",
    ),
    "a rank that is no member differs": (
        [insert(23, "divergence", **DIFFER | {"ranks": [4], "groups": [[0, 1], [4]]})],
        "F:23: rank 4 differs, but is no member",
    ),
    "a value differs without a divergence": (
        [insert(23, "divergent_value", commit=[2, 1], value="weight")],
        "F:23: weight differs, but no divergence of generation 2",
    ),
    "two workers in a slot": ([put(35, worker="a:1#2", host="a", slot=1)], "F:35: a:1#2 starts, but a:1#1 has not"),
    "an incarnation comes again": ([put(35, worker="b:0#1")], "F:35: b:0#1 starts after b:0#1"),
    "no agent": ([drop(34)], "F:34: b:0#2 starts on a host without an agent"),
    "a start while the host drains": (
        [insert(35, "host_draining", reason="notice")],
        "F:36: b:0#2 starts on a host that drains or was removed",
    ),
    "a start in a cooldown": (
        [put(34, time=50.0), put(35, time=50.0)],
        "F:35: b:0#2 starts 19.00 s before its host's cooldown ends, and 3 members train",
    ),
    "READY twice": ([again(15, 16)], "F:16: a:2#1 is ready, but was ready"),
    "READY without a start": ([drop(14)], "F:14: a:2#1 is ready, but was not started"),
    "READY after an exit": ([put(25, signal=9), again(20, 28)], "F:28: b:0#1 is ready, but was exited"),
    "READY from a lost host": ([again(20, 28)], "F:28: b:0#1 is ready, but its host, with which it was lost, is not"),
    "unresponsive after an exit": (
        [put(25, signal=9), insert(28, "worker_unresponsive", reason="r", **COMMON)],
        "F:28: b:0#1 is unresponsive, but was exited",
    ),
    "a second exit": ([again(39, 40)], "F:40: a:0#1 is exited, but was exited"),
    "a rank that another worker has": ([put(40, rank=0)], "F:40: a:1#1 had rank 0, and not 1, which its age gives"),
    "a hold in a hold": ([again(16, 17)], "F:17: a hold in a hold, or after the end"),
    "a release without a hold": ([drop(37)], "F:37: a release without a hold"),
    "an end at a tick without a hold": ([drop(16)], "F:16: an end at tick 10 without a hold"),
    "a second end": ([again(27, 28)], "F:28: generation 2 ends a second time"),
    "a stranger gets the state": (
        [insert(23, "sync", worker="b:0#2", bytes=1, seconds=0.1)],
        "F:23: b:0#2 gets the state, but is no member",
    ),
    "too many members": ([put(1, max_np=3)], "F:22: 4 members, but min_np is 2 and max_np is 3"),
    "too few members": ([put(1, min_np=4)], "F:13: 3 members, but min_np is 4"),
    "no whole groups": ([put(1, np_multiple=2)], "F:13: 3 members, but np_multiple is 2"),
    "a root that is no rank": ([put(22, root=4)], "F:22: the root is rank 4 of 4"),
    "all members get the state": ([put(22, synced=4)], "F:22: 4 of 4 members get the state"),
    "no end before a world": ([drop(27)], "F:31: generation 2 has not ended"),
    "a stranger leaves": ([put(32, left=["b:0#2"])], "F:32: b:0#2 left, but was no member"),
    "a member joins": ([put(22, joined=["a:1#1"])], "F:22: a:1#1 joined, but was a member"),
    "a size that does not add up": ([put(22, size=3)], "F:22: 3 members, and not 3 - 0 + 1"),
    "a host that is not there": ([put(22, hosts=3)], "F:22: 3 hosts, and not 2"),
    "a member that is not READY": ([drop(19)], "F:21: a:1#1 is a member, but is member"),
    "a member that has exited": (
        [insert(22, "worker_exited", **COMMON, rank=2, exit_code=1, signal=None, expected=False)],
        "F:23: b:0#1 is a member, but is exited",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_each_check_finds_a_file_that_breaks_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edits, wrong = EDITS[name]
    lines = story()
    for edit in edits:
        edit(lines)
    status, output = verified(tmp_path / "e", lines, capsys)
    assert status == 1
    assert any(line.startswith(wrong) for line in output), "\n".join(output)


def test_one_line_says_that_a_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = story()
    assert verified(tmp_path / "e", lines, capsys) == (0, ["F: 44 events, 3 generations, 1 failure: holds"])
    status, output = verified(tmp_path / "e", [*lines, *lines[:13]], capsys)
    assert status == 0
    assert output[0].startswith("F: 57 events, 4 generations, 1 failure: holds; no job_finished: the job still runs, ")


def test_the_record_is_kept_before_the_events_that_it_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = story()
    insert(20, "record_kept", generation=2, hosts=["a", "b", "c"], standbys=[])(lines)
    assert verified(tmp_path / "events", lines, capsys)[0] == 0


def test_a_member_that_drains_explains_a_start_in_a_cooldown_during_the_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it too few are left, so the cooldown gives way."""
    drains = """
0.0 hosts a:1 b:2 + agent-joined a + agent-joined b
1.0 ready a:0#1 + ready b:0#1 + ready b:1#1
2.0 first a:0#1 in=1 train=0.2 sync=0.1
9.0 agent-lost a sent no heartbeat
9.2 ready b:0#1 in=1 commit=1.7 ticks=9 + ready b:1#1 in=1 commit=1.7 ticks=9
9.5 first b:0#1 in=2 train=0.2 sync=0.1
10.0 draining b:1#1
10.1 agent-joined a
10.2 ready a:0#2
10.3 answer b:0#1 in=2 ticks=9 to=1 + answer b:1#1 in=2 ticks=9 to=1
10.4 ready b:0#1 in=2 commit=2.10 ticks=10 + ready b:1#1 in=2 commit=2.10 ticks=10
11.0 first b:0#1 in=3 train=0.2 sync=0.1
20.0 hosts a:1 b:1 c:1 + agent-joined c
21.0 ready c:0#1
"""
    lines = [json.loads(line) for line in recorded(drains, preemption_window_s=0.0).splitlines()]
    started = next(place for place, line in enumerate(lines) if line.get("worker") == "a:0#2")
    holds = [place for place, line in enumerate(lines) if line["event"] == "hold"]
    assert holds[0] < started < holds[1]
    assert verified(tmp_path / "events", lines, capsys)[0] == 0


def test_a_file_may_begin_and_end_in_the_middle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = story()
    for first in range(1, 44, 3):
        for last in range(first + 1, 45, 7):
            status, output = verified(tmp_path / "e", lines[first - 1 : last], capsys)
            assert status == 0, (first, last, output)


def test_events_that_a_killed_driver_did_not_write_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = story()
    restart = {**lines[22], "event": "driver_restarted", **DRIVER}
    status, output = verified(tmp_path / "e", [*lines[:16], restart], capsys)
    assert status == 0
    assert output[0].startswith("F: 17 events, 2 generations, 0 failures: holds; no world_formed of generation 2: ")


def test_a_file_with_dropped_events_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = story()
    dropped = {**lines[39], "event": "output_resumed", "output": "--events-file e", "dropped_bytes": 900}
    status, output = verified(tmp_path / "e", [*lines[:20], *lines[23:40], {**dropped, "host": None}], capsys)
    assert status == 0
    assert output[0].endswith("; not checked: 900 bytes of events were dropped")


def test_all_files_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good").write_text(recorded())
    (tmp_path / "bad").write_text(recorded().replace('"root": 0', '"root": 9'))
    assert main(["verify", str(tmp_path / "bad"), str(tmp_path / "good")]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("good: 44 events, 3 generations, 1 failure: holds")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("", "has no complete event"),
        ("no events\n", "line 1 is no event (not JSON"),
        (recorded().replace("a:0#1", "nobody"), "line 9 is no event ('worker' is 'nobody')"),
        (recorded().replace('"min_np": 2, ', ""), "line 1 is no event (no field 'min_np')"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    text: str | None, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "e").write_text(text)
    assert main(["verify", str(tmp_path / "e")]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert error in captured.err


def test_help_says_what_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "elasticrun verify events.jsonl" in text
    assert max(map(len, text.splitlines())) <= 120
