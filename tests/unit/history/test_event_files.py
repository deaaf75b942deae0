"""Reading event files: whole files, files that are cut, and files that are something else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from elasticstate.core.event_file import by_name
from elasticstate.errors import OptionError
from elasticstate.history.event_files import read_events
from elasticstate.history.job_history import CopiesHistory, JobHistory, WorkerSpans, histories
from tests.kit.events import EventLines, killed_and_restarted

GOOD = '{"time": 1.0, "event": "warning", "job": "j", "generation": 0, "text": "t"}\n'


def names(path: Path) -> list[str]:
    return [event["event"] for event in read_events(str(path))]


def test_all_events_are_read_in_order(tmp_path: Path) -> None:
    path = killed_and_restarted(tmp_path / "e").path
    assert names(path) == [json.loads(line)["event"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_last_line_without_its_end_is_left_out(tmp_path: Path, cut: int) -> None:
    path = killed_and_restarted(tmp_path / "e").path
    whole = names(path)
    path.write_bytes(path.read_bytes()[:-cut])
    assert names(path) == whole[:-1]


def test_the_events_of_a_new_driver_follow_half_an_event_of_the_one_that_was_killed(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "e").start()
    lines.add(1, "warning", text='a text with {"time": 2}')
    lines.path.write_bytes(lines.path.read_bytes()[:-30])
    lines.add(2, "driver_restarted", epoch=2, back=["a"], lost=[])
    assert names(lines.path) == ["job_started", "driver_restarted"]


def test_unknown_events_and_fields_are_read(tmp_path: Path) -> None:
    (tmp_path / "e").write_text(GOOD + GOOD.replace("warning", "a_new_event"))
    assert names(tmp_path / "e") == ["warning", "a_new_event"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("no JSON\n", "not JSON: "),
        ("[1, 2]\n", "not an object"),
        ('"a text"\n', "not an object"),
        ("\udcff\udcfe\n", "not JSON: "),
        ('{"event": "warning", "job": "j", "generation": 0}\n', "no field 'time'"),
        (GOOD.replace("1.0", '"now"'), """'time' is "now\""""),
        (GOOD.replace("1.0", "NaN"), "not JSON: NaN is no number"),
        (GOOD.replace("1.0", "1e999"), "'time' is inf"),
        (GOOD.replace("1.0", "-1"), "'time' is -1"),
        (GOOD.replace("1.0", "1" * 400), "'time' is "),
        (GOOD.replace(": 0", ": null"), "'generation' is null"),
        (GOOD.replace("warning", "world_formed"), "no field 'size'"),
        (GOOD.replace("warning", "host_cooldown"), "no field 'host'"),
        ("[" * 100_000 + "\n", "not JSON: "),
    ],
)
def test_a_line_that_is_no_event_is_named_by_its_number(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "e"
    path.write_bytes((GOOD + "\n" + line + GOOD).encode(errors="surrogateescape"))
    with pytest.raises(OptionError, match=re.escape(f"{str(path)!r}: line 3 is no event ({problem}")) as caught:
        histories(str(path), read_events(str(path)))
    assert "\n" not in str(caught.value)


def test_only_events_have_a_method_in_the_history() -> None:
    """``JobHistory.add`` finds the methods by the name of the event."""
    names = {*dir(JobHistory), *dir(WorkerSpans), *dir(CopiesHistory)}
    assert {name[3:] for name in names if name.startswith("on_")} <= set(by_name())


@pytest.mark.parametrize(("name", "problem"), [("absent", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(OptionError, match=f"cannot be read .{problem}"):
        names(tmp_path / name)
