"""Trace of a job for Perfetto and chrome://tracing, in Chrome's trace event format.

A process of the trace is a host, and a thread of it is a slot. The first process of each run is the job itself. Times
are microseconds since the first event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timezone
from functools import partial
from heapq import heappop, heappush
from typing import Any

import msgspec

from elasticstate.core.types import number_of
from elasticstate.history.event_files import Event
from elasticstate.history.job_history import JobHistory, Sink, Span, histories

_LANES = {  # of the job's process, each with the kinds of its spans
    "generations": ("generation",),
    "regroups": ("hold", "waiting", "formation"),
    "downtime": ("downtime",),
    "drains": ("drain",),
    "cooldowns": ("cooldown",),
    "stalls": ("stall",),
    "drivers": ("driver",),
}
_PARENTS = {"worker": -2, "generation": -1}  # before spans with the same times
_EVENTS_LANE = 0  # of each process: what happened at one time
_encoder = msgspec.json.Encoder()


def _encoded(value: object) -> bytes:
    """Return a value as JSON. Texts of others may have halves of surrogate pairs, which msgspec rejects."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


class ChromeTrace:
    """Trace under construction. Call ``add`` once; then ``data`` is the content of the file."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, int, int, int, int, bytes]] = []  # process, thread, begin, -length, order, JSON
        self._heads: list[bytes] = []
        self._processes = 0
        self._hosts: dict[tuple[int, str], int] = {}  # the process of each host of a run
        self._threads: set[tuple[int, int]] = set()  # of slots
        self._origin: float | None = None
        self.spans = 0

    def add(self, path: str, events: Iterable[Event]) -> list[JobHistory]:
        """Add the runs of an event file. Raises OptionError as ``read_events`` does."""
        jobs: list[int] = []  # the process of each run

        def sink(first: Event) -> Sink:
            if self._origin is None:
                self._origin = first["time"]
            jobs.append(self._process(f"job {first['job']}"))
            return partial(self._add_worker_span, jobs[-1])

        runs = histories(path, events, sink)
        for run, process in zip(runs, jobs, strict=True):
            self._add_job(run, process)
        return runs

    def data(self) -> bytes:
        """Return the file's content: a JSON object with one event per line."""
        self._lines.sort()
        lines = b",\n".join([*self._heads, *(line[-1] for line in self._lines)])
        begins_at = datetime.fromtimestamp(self._origin or 0.0, timezone.utc).isoformat()
        head = _encoded({"source": "elasticrun trace", "ts 0 is at": begins_at})
        return b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[\n%b\n]}\n' % (head, lines)

    # --------------------------------------------------------------------------------------------------------- jobs

    def _add_job(self, run: JobHistory, process: int) -> None:
        self.thread(process, _EVENTS_LANE, "events")
        spans = [*run.spans, *_generations(run)]
        number = _EVENTS_LANE
        for lane, kinds in _LANES.items():
            chosen = sorted((s for s in spans if s.kind in kinds), key=lambda s: (s.begin, s.end))
            number = self._add_lanes(process, number, lane, chosen)
        for mark in run.marks:
            at = self._host(process, mark.host) if mark.host else process
            self.mark(at, mark.time, mark.name, mark.kind, mark.details)
        for time, size in run.sizes:
            self.counter(process, time, "world size", {"workers": size})
        for time, share in run.goodput:
            self.counter(process, time, "goodput", {"share": share})

    def _add_lanes(self, process: int, number: int, name: str, spans: list[Span]) -> int:
        """Add spans that may overlap: each goes to the first lane that is free. Return the number of the last lane."""
        free: list[tuple[int, int]] = []  # end of the last span of a lane, number of the lane
        first = number
        for span in spans:
            begin, end = self.ts(span.begin), self.ts(span.end)
            if free and free[0][0] <= begin:
                _, lane = heappop(free)
            else:
                number = lane = number + 1
                self.thread(process, lane, name if lane == first + 1 else f"{name} {lane - first}")
            heappush(free, (end, lane))
            self.span(process, lane, span)
        return number

    # ------------------------------------------------------------------------------------------------------- events

    def ts(self, time: float) -> int:
        """Return a time in microseconds since the first event, at least 0."""
        return max(0, round((time - (self._origin or 0.0)) * 1e6))

    def span(self, process: int, thread: int, span: Span) -> None:
        ts, kind, args = self.ts(span.begin), span.kind, span.details
        length = max(0, self.ts(span.end) - ts)
        self.spans += 1
        name = span.name or kind
        head = {"ph": "X", "pid": process, "tid": thread, "ts": ts, "dur": length, "name": name, "cat": kind}
        self._put(process, thread, ts, -length, {**head, "args": args} if args else head, _PARENTS.get(kind))

    def mark(self, process: int, time: float, name: str, kind: str, args: dict[str, Any]) -> None:
        ts = self.ts(time)
        head = {"ph": "i", "pid": process, "tid": _EVENTS_LANE, "ts": ts, "s": "p", "name": name, "cat": kind}
        self._put(process, _EVENTS_LANE, ts, 0, {**head, "args": args} if args else head)

    def counter(self, process: int, time: float, name: str, values: dict[str, float]) -> None:
        ts = self.ts(time)
        self._put(process, _EVENTS_LANE, ts, 0, {"ph": "C", "pid": process, "ts": ts, "name": name, "args": values})

    def thread(self, process: int, thread: int, name: str) -> None:
        """Name a thread. Threads of a process are shown by their numbers."""
        place = {"ph": "M", "pid": process, "tid": thread}
        self._heads.append(_encoded({**place, "name": "thread_name", "args": {"name": name}}))
        self._heads.append(_encoded({**place, "name": "thread_sort_index", "args": {"sort_index": thread}}))

    def _process(self, name: str) -> int:
        self._processes += 1
        place = {"ph": "M", "pid": self._processes}
        index = {"sort_index": self._processes}
        self._heads.append(_encoded({**place, "name": "process_name", "args": {"name": name}}))
        self._heads.append(_encoded({**place, "name": "process_sort_index", "args": index}))
        return self._processes

    def _host(self, job: int, name: str) -> int:
        """Return the process of a host of a run. Hosts come in the order in which they appear."""
        if (job, name) not in self._hosts:
            self._hosts[job, name] = self._process(f"host {name}")
            self.thread(self._hosts[job, name], _EVENTS_LANE, "events")
        return self._hosts[job, name]

    def _add_worker_span(self, job: int, span: Span) -> None:
        assert span.host is not None
        assert span.slot is not None
        process, thread = self._host(job, span.host), span.slot + 1
        if (process, thread) not in self._threads:
            self._threads.add((process, thread))
            self.thread(process, thread, f"slot {span.slot}")
        self.span(process, thread, span)

    def _put(
        self, process: int, thread: int, ts: int, length: int, event: dict[str, Any], order: int | None = None
    ) -> None:
        order = len(self._lines) if order is None else order
        self._lines.append((process, thread, ts, length, order, _encoded(event)))


def _generations(run: JobHistory) -> Iterable[Span]:
    for g in run.generations:
        name, end = f"generation {g.number}: {number_of(g.size, 'worker')}", run.last if g.ended is None else g.ended
        details = {"size": g.size, "hosts": g.hosts, "joined": g.joined, "left": g.left, "end": g.end_cause}
        yield Span("generation", None, None, name, g.formed, end, details)
