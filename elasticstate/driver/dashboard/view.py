"""View of a job for the dashboard, made from the core's state: the numbers of ``elasticrun status`` and more.

All times are Unix times, not ages, so that what does not change is not sent again.
"""

from __future__ import annotations

from itertools import islice
from math import isfinite
from typing import Any

import msgspec

from elasticstate.core import event_file, links
from elasticstate.core.diagnostics import why_empty
from elasticstate.core.state import Host, Membership, Over, Running, Worker
from elasticstate.core.types import listed
from elasticstate.driver.dashboard.charts import Charts
from elasticstate.driver.job import JobState, Metric, shown
from elasticstate.driver.status import DurableFigures, ShardsOverview, host_state, overview_of, worker_state
from elasticstate.failures import WorkerFailure
from elasticstate.net.messages import HostUse

# ---------------------------------------------------------------------------------------------------------- merge patch


View = dict[str, Any]
"""Nested dicts with texts, numbers and lists, and without None: in a patch, None removes a key."""


def difference(old: View, new: View) -> View:
    """Return the merge patch that changes ``old`` to ``new``. Return {} if they are equal."""
    patch: View = {}
    for key, value in new.items():
        if key in old and old[key] == value:
            continue
        before = old.get(key)
        is_nested = isinstance(before, dict) and isinstance(value, dict)
        patch[key] = difference(old[key], value) if is_nested else value
    for key in old:
        if key not in new:
            patch[key] = None
    return patch


# -------------------------------------------------------------------------------------------------------------- history
# History of a job for its dashboard: generations, failures, and the lines of ``elasticrun``. All lists are bounded.
#
# The history is a file in the job's directory, so that the next driver continues it.


_MOST_GENERATIONS = 200
_MOST_FAILURES = 50
_FIRST_FAILURES = 10  # of them, the first ones of the job: the others may be their consequences
_MOST_LINES = 200
_LONGEST_ERROR = 8000  # characters
_LONGEST_LINE = 500
_SHOWN = 6  # workers in one text
_FIRST = "start of the job"


class History(msgspec.Struct):
    """Past of a job, newest last. The dashboard passes on what ``Report`` writes."""

    generations: dict[str, View] = {}
    failures: dict[str, View] = {}
    lines: dict[str, View] = {}
    numbers: int = 0  # of failures and lines so far
    cause: str = _FIRST  # why the newest world is changed
    loss: str = ""  # the first failure of a member or a host since the newest world: the cause behind ``cause``
    left: list[str] = []  # slots of the workers that the newest world has lost
    unresponsive: dict[str, str] = {}  # by worker: why its agent kills it
    failed: int = 0  # failures so far
    charts: Charts = msgspec.field(default_factory=Charts)

    def event(self, name: str, fields: Any, at: float) -> None:
        self.charts.event(name, fields, at)
        match name:
            case "end":
                self.cause = fields["cause"]
            case "world_formed":
                self._world_formed(fields, at)
            case "generation_finished":
                self._update(fields, until=at, goodput_s=fields["goodput_s"], wall_s=fields["wall_s"])
            case "training_resumed":
                known = fields["downtime_s"] is not None
                self._update(fields, ticks_lost=fields["ticks_lost"], commits_lost=fields["commits_lost"])
                self._update(fields, **({"downtime_s": fields["downtime_s"]} if known else {}))
            case "worker_unresponsive":
                self.unresponsive[fields["worker"].partition("#")[0]] = fields["reason"]
            case "agent_lost":
                reason = f"host {fields['host']} lost: its agent {fields['reason']}"
                self.loss = self.loss or reason
                self._add_failure({"reason": reason, "at": at, "generation": fields["generation"]})
            case "root_cause":
                error = str(fields.get("error") or "").rstrip()[-_LONGEST_ERROR:]
                about = {"reason": f"root cause: {fields['reason']}", "at": at, "generation": fields["generation"]}
                self._add_failure({**about, "error": error})

    def failure(self, failure: WorkerFailure, at: float) -> None:
        """Add the failure of a worker."""
        worker = f"{failure.host}:{failure.slot}"
        why = self.unresponsive.pop(worker, "")
        about = {"reason": f"{failure.reason} ({why})" if why else failure.reason, "worker": worker}
        rank = {} if failure.rank is None else {"rank": failure.rank}
        if rank and worker not in self.left:  # else: the newest world was formed because of it
            self.loss = self.loss or str(about["reason"])
        self.charts.mark("hang" if why else "failure", at, about["reason"])
        error = failure.error.rstrip()[-_LONGEST_ERROR:]
        self._add_failure({**about, **rank, "at": at, "generation": failure.generation, "error": error})

    def line(self, text: str, at: float) -> None:
        """Add a line of ``elasticrun``."""
        self._add(self.lines, {"at": at, "text": text[:_LONGEST_LINE]}, _MOST_LINES)

    def _world_formed(self, fields: event_file.WorldFormed, at: float) -> None:
        joined, left = fields["joined"], fields["left"]
        self.generations[str(fields["generation"])] = {
            "at": at,
            "size": fields["size"],
            "hosts": fields["hosts"],
            "cause": self.loss or self.cause,
            "joined": listed(joined, shown=_SHOWN) if joined and self.cause != _FIRST else "",
            "left": listed(left, shown=_SHOWN) if left else "",
        }
        self.cause, self.loss = "end of the generation", ""
        self.left = [name.partition("#")[0] for name in left]
        _shorten(self.generations, _MOST_GENERATIONS)

    def _update(self, fields: event_file.CommonFields, **values: float) -> None:
        generation = str(fields["generation"])
        if generation in self.generations:
            self.generations[generation] = {**self.generations[generation], **values}

    def _add_failure(self, failure: View) -> None:
        self.failed += 1
        self._add(self.failures, failure, _MOST_FAILURES, _FIRST_FAILURES)

    def _add(self, to: dict[str, View], entry: View, most: int, first: int = 0) -> None:
        self.numbers += 1
        to[str(self.numbers)] = entry
        _shorten(to, most, first)


def _shorten(entries: dict[str, View], most: int, first: int = 0) -> None:
    """Remove the oldest entries that are too many, but keep the first ones."""
    while len(entries) > most:
        del entries[next(islice(entries, first, None))]


def decoded(data: bytes) -> History:
    """Return the history in a file; an empty one if it cannot be read."""
    try:
        return msgspec.json.decode(data, type=History)
    except msgspec.DecodeError:
        return History()


# ----------------------------------------------------------------------------------------------------------------- view


def view_of(job: str, state: JobState, history: History, now: float, ahead_s: float) -> View:
    """Return the view. ``ahead_s``: Unix time minus the core's clock."""
    m = state.membership
    overview, figures = overview_of(job, m, state.reason, now, state.durable, state.copies)
    view: View = {
        "job": {
            "name": job,
            "phase": overview.phase if state.outcome is None else state.outcome.word,
            "reason": overview.reason,
            "is_over": state.outcome is not None,
            **_time("since", -1.0 if isinstance(m.phase, Over) else m.phase.since, ahead_s),
        },
        "world": {"generation": overview.generation, "size": overview.size, "living": overview.living},
        "figures": {**_without_none(overview.figures), "ticks": overview.ticks},
        "hosts": {name: _host(m, host, state.readings.use.get(name), now, ahead_s) for name, host in m.hosts.items()},
        "workers": _workers(m, now, ahead_s),
        "waiting": list(overview.waiting_for),
        "stragglers": [s.text() for s in m.phase.stragglers] if isinstance(m.phase, Running) else [],
        "generations": dict(history.generations),
        "failures": dict(history.failures),
        "failed": history.failed,
        "metrics": {name: _metric(metric) for name, metric in state.readings.metrics(m).items()},
        "charts": history.charts.view(),
        "lines": dict(history.lines),
    }
    if overview.commit is not None:
        members = [w for w in m.workers.values() if w.commit == overview.commit]
        at = min((w.commit_at for w in members), default=-1.0)
        id = f"({overview.commit.generation}, {overview.commit.tick})"
        stall_s = round(figures.times.commit_stall, 2)
        view["commit"] = {"id": id, "bytes": state.commit_bytes, "stall_s": stall_s, **_time("at", at, ahead_s)}
    if overview.shards is not None:
        view["shards"] = _shards(m, overview.shards, ahead_s)
    if overview.durable is not None:
        view["durable"] = _durable(state.durable, ahead_s)
    return view


def _shards(m: Membership, shards: ShardsOverview, ahead_s: float) -> View:
    """Return the commit line, its replication, and the memory and bandwidth of the copies."""
    view: View = {"replicas": shards.replicas, "copies": shards.copies, "trouble": shards.trouble}
    view |= {"memory": shards.memory, "sent_bytes": shards.sent_bytes}
    if shards.line is not None:
        view |= {"line": str(shards.line), **_time("line_at", m.shards.line_at, ahead_s)}
    if shards.replicated is not None:
        view |= {"replicated": str(shards.replicated), **_time("replicated_at", m.shards.replicated_at, ahead_s)}
    if (present := m.shards.replication) is not None and shards.replication is not None:
        done, since = shards.replication.done, _time("since", present.since, ahead_s)
        view["replication"] = {"commit": str(present.commit), "done": done, "copies": len(present.copies), **since}
    return view


def _durable(figures: DurableFigures, ahead_s: float) -> View:
    view: View = {"saved": figures.saved, "failed": figures.failed, "trouble": figures.trouble}
    if figures.newest is not None and figures.newest_at is not None:
        newest = {"commit": str(figures.newest), "bytes": figures.newest_bytes}
        view |= {**newest, **_time("at", figures.newest_at, ahead_s)}
    return view


def _metric(metric: Metric) -> View:
    """Return the newest value of a name, and what the living workers have reported."""
    view: View = {"value": shown(metric.value), "workers": len(metric.values)}
    if metric.rank is not None:
        view["rank"] = metric.rank
    if finite := [value for value in metric.values if isfinite(value)]:
        view |= {"least": min(finite), "greatest": max(finite)}
    if strange := len(metric.values) - len(finite):
        view["strange"] = strange
    return view


def _host(m: Membership, host: Host, use: HostUse | None, now: float, ahead_s: float) -> View:
    view: View = {"state": host_state(host, now), "slots": host.slots, "order": host.order}
    if use is not None and host.agent == "joined":
        view["use"] = _without_none(use._asdict())
    if host.rack:
        view["rack"] = host.rack
    if why := host.draining or (f"its agent {host.loss}" if host.loss else "") or links.reason(m, host.name):
        view["why"] = why
    if host.cooldown_until > now:
        view |= {"cooldown": host.cooldown_reason, **_time("cooldown_until", host.cooldown_until, ahead_s)}
    if host.report:
        view |= {"report": host.report, **_time("reported_at", host.reported_at, ahead_s)}
    return view


def _workers(m: Membership, now: float, ahead_s: float) -> View:
    """Return the workers and the empty slots, by slot."""
    view: View = {}
    for (host, index), slot in m.slots.items():
        worker = m.workers.get(slot.worker) if slot.worker is not None else None
        if worker is not None:
            view[f"{host}:{index}"] = _worker(m, worker, ahead_s)
        elif index < m.hosts[host].slots:
            view[f"{host}:{index}"] = {"state": "empty", "why": why_empty(slot, now)}
    return view


def _worker(m: Membership, worker: Worker, ahead_s: float) -> View:
    view: View = {
        "state": worker_state(m, worker),
        "name": str(worker.id),
        "place": str(worker.place),
        "tick": worker.ticks,
        **_time("seen", worker.reported_at, ahead_s),
    }
    if worker.rank is not None:
        view["rank"] = worker.rank
    if worker.commit is not None:
        view |= {"commit": str(worker.commit), **_time("commit_at", worker.commit_at, ahead_s)}
    if worker.draining:
        view["why"] = worker.draining
    return view


def _time(name: str, at: float, ahead_s: float) -> View:
    """Return a time of the core's clock as Unix time; {} if it never was."""
    return {name: round(at + ahead_s, 1)} if isfinite(at) and at >= 0 else {}


def _without_none(fields: dict[str, object]) -> View:
    return {key: value for key, value in fields.items() if value is not None}
