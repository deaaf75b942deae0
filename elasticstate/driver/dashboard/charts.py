"""Charts of the dashboard: curves over time, and marks of what has changed the world. All are bounded.

A curve has one value for each interval of time. When it has too many, the interval is doubled, so that the curve always
shows the whole job.
"""

from __future__ import annotations

from typing import Any

import msgspec

from elasticstate.core import links
from elasticstate.core.accounting import ticks_of
from elasticstate.core.types import listed
from elasticstate.driver.job import JobState, shown
from elasticstate.net.messages import HostUse

MOST_POINTS = 240
"""Points of a curve."""
MOST_MARKS = 200
_FIRST_INTERVAL_S = 1.0
_TICKS_OVER_S = 2.0  # time over which ticks are counted
_SETTLED_S = 3.0
_TOGETHER_S = 2.0  # marks of one kind within this time are one mark
_LONGEST_TEXT = 300
_SHOWN = 6  # workers in one text

MARKS = ("failure", "hang", "drain", "join", "restart")
"""Kinds of marks: a worker or host was lost; a worker hung; one left as planned; one joined; the driver restarted."""


class Curve(msgspec.Struct):
    """Values by number of their interval. A value that is not finite is a text."""

    interval_s: float = _FIRST_INTERVAL_S
    points: dict[str, list[float | str]] = {}  # time and value

    def add(self, at: float, value: float) -> None:
        """Add a value. It replaces an earlier one of the same interval."""
        self.points[self._number(at)] = [round(at, 1), shown(float(f"{value:.6g}"))]
        while len(self.points) > MOST_POINTS:
            self.interval_s *= 2
            self.points = {self._number(float(point[0])): point for point in self.points.values()}

    def _number(self, at: float) -> str:
        return str(int(at // self.interval_s))


class Mark(msgspec.Struct):
    """A change of the world. ``texts``: what happened, in words."""

    kind: str
    at: float
    texts: list[str]


class Charts(msgspec.Struct):
    """Curves by key: ``own:`` and a name for those of elasticstate, ``metric:`` and the name for those of scripts."""

    curves: dict[str, Curve] = {}
    marks: dict[str, Mark] = {}
    numbers: int = 0  # of marks so far
    has_world: bool = False

    def add(self, key: str, at: float, value: float) -> None:
        self.curves.setdefault(key, Curve()).add(at, value)

    def mark(self, kind: str, at: float, text: str) -> None:
        """Add a mark, or add to the last one of its kind if it has just been made."""
        for mark in list(self.marks.values())[-len(MARKS) :]:
            if mark.kind == kind and at - mark.at < _TOGETHER_S:
                if text[:_LONGEST_TEXT] not in mark.texts and len(mark.texts) < _SHOWN:
                    mark.texts.append(text[:_LONGEST_TEXT])
                return
        self.numbers += 1
        self.marks[str(self.numbers)] = Mark(kind, round(at, 1), [text[:_LONGEST_TEXT]])
        while len(self.marks) > MOST_MARKS:
            del self.marks[next(iter(self.marks))]

    def event(self, name: str, fields: Any, at: float) -> None:
        """Add the mark of an event, if it is one. ``mark`` gets the failures of workers."""
        match name:
            case "agent_lost":
                self.mark("failure", at, f"host {fields['host']} lost: its agent {fields['reason']}")
            case "link_cut":
                self.mark("failure", at, links.text_of((fields["host"], fields["peer"])))
            case "hang":
                self.mark("hang", at, fields["text"])
            case "host_draining":
                self.mark("drain", at, f"host {fields['host']} drains: {fields['reason']}")
            case "host_removed":
                self.mark("drain", at, f"host {fields['host']} removed by discovery")
            case "world_formed":
                if fields["joined"] and self.has_world:
                    self.mark("join", at, f"joined: {listed(fields['joined'], shown=_SHOWN)}")
                self.has_world = True
            case "driver_restarted":
                self.mark("restart", at, "the driver was restarted")

    def view(self) -> dict[str, Any]:
        """Return the charts for the page. Nothing in it changes later."""
        curves = {key: {"interval_s": c.interval_s, "points": dict(c.points)} for key, c in self.curves.items()}
        marks = {n: {"kind": m.kind, "at": m.at, "text": "; ".join(m.texts)} for n, m in self.marks.items()}
        return {"curves": curves, "marks": marks}


class Sampler:
    """Adds points to the curves of a job, when it is called. Times: Unix time."""

    def __init__(self, charts: Charts, state: JobState) -> None:
        self._charts = charts
        self._state = state
        self._seen: dict[str, float] = {}  # by name: when the value that has its point arrived
        self._counted: tuple[float, int] | None = None  # time and ticks of the last look
        self._has_world_since: float | None = None
        self._used_at = 0.0  # of the last points for the use of the hosts

    def __call__(self, at: float) -> None:
        m, readings = self._state.membership, self._state.readings
        for name, metric in readings.metrics(m).items():
            if self._seen.get(name) != (arrived := readings.arrived.get(name, at)):
                self._seen[name] = arrived
                self._charts.add(f"metric:{name}", arrived, metric.value)
        ticks = ticks_of(m)
        if m.generation and self._has_world_since is None:
            self._has_world_since = at
        if self._has_world_since is None or at < self._has_world_since + _SETTLED_S:
            self._counted = None  # a driver that reattaches hears of the ticks until then
        if self._counted is None or at >= self._counted[0] + _TICKS_OVER_S:
            if self._counted is not None and (ticks or "own:ticks per second" in self._charts.curves):
                rate = max(0, ticks - self._counted[1]) / (at - self._counted[0])
                self._charts.add("own:ticks per second", at, rate)
            self._counted = at, ticks
        if at >= self._used_at + _TICKS_OVER_S:
            self._used_at = at
            for name, percent in totals(readings.use).items():
                self._charts.add(f"own:{name}", at, percent)


def totals(use: dict[str, HostUse]) -> dict[str, float]:
    """Return the use of all hosts together, in percent: processors and GPUs as the mean, memory as the share used."""
    found: dict[str, float] = {}
    processors = [each.cpu for each in use.values() if each.cpu is not None]
    if processors:
        found["processors"] = 100 * sum(processors) / len(processors)
    if total := sum(each.memory_total_bytes for each in use.values()):
        found["memory"] = 100 * sum(each.memory_bytes for each in use.values()) / total
    gpus = [(each.gpu, each.gpus) for each in use.values() if each.gpu is not None]
    if gpus:
        found["GPUs"] = 100 * sum(share * number for share, number in gpus) / sum(number for _, number in gpus)
    if total := sum(each.gpu_memory_total_bytes for each in use.values()):
        found["memory of GPUs"] = 100 * sum(each.gpu_memory_bytes for each in use.values()) / total
    return found
