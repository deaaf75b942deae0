"""Check of a file against Chrome's trace event format, as far as ``elasticrun trace`` uses it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def checked(path: Path) -> list[Event]:
    """Return the events of a trace, after a check of each event and of the nesting in each lane."""
    trace = json.loads(path.read_bytes())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = trace["traceEvents"]
    for event in events:
        _check(event)
    _check_names(events)
    _check_nesting(events)
    return events


def lanes(events: list[Event]) -> dict[tuple[str, str], list[Event]]:
    """Return the spans by the names of process and thread, by their beginning."""
    names: dict[Any, str] = {}
    for event in events:
        if event["ph"] == "M" and event["name"].endswith("_name"):
            names[event["pid"], event.get("tid")] = event["args"]["name"]
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"], None], names[event["pid"], event["tid"]]].append(event)
    return dict(found)


def _check(event: Event) -> None:
    assert event["ph"] in ("X", "i", "C", "M"), event
    assert isinstance(event["pid"], int), event
    assert event["name"], event
    assert isinstance(event["name"], str), event
    assert isinstance(event.get("args", {}), dict), event
    if event["ph"] != "M":
        assert isinstance(event["ts"], int), event
        assert event["ts"] >= 0, event
    if event["ph"] == "X":
        assert isinstance(event["tid"], int), event
        assert isinstance(event["dur"], int), event
        assert event["dur"] >= 0, event
    if event["ph"] == "i":
        assert event["s"] in ("g", "p", "t"), event
    if event["ph"] == "C":
        assert all(isinstance(value, int | float) for value in event["args"].values()), event


def _check_names(events: list[Event]) -> None:
    named = {(e["pid"], e.get("tid")) for e in events if e["ph"] == "M" and e["name"].endswith("_name")}
    for event in events:
        if event["ph"] in ("X", "i"):
            assert (event["pid"], None) in named, event
            assert (event["pid"], event["tid"]) in named, event


def _check_nesting(events: list[Event]) -> None:
    """Check that the spans of a lane come in order, a parent before its children, and that none is cut by another."""
    open_spans: dict[tuple[int, int], list[Event]] = defaultdict(list)
    last: dict[tuple[int, int], int] = defaultdict(int)
    for event in events:
        if event["ph"] != "X":
            continue
        lane = event["pid"], event["tid"]
        assert event["ts"] >= last[lane], f"out of order: {event}"
        last[lane] = event["ts"]
        stack = open_spans[lane]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        if stack:
            end = stack[-1]["ts"] + stack[-1]["dur"]
            assert event["ts"] + event["dur"] <= end, f"{event} ends after {stack[-1]}"
        stack.append(event)
