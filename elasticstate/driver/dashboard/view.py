"""View of a job for the dashboard, made from the core's state: the numbers of ``elasticrun status`` and more.

All times are Unix times, not ages, so that what does not change is not sent again.
"""

from __future__ import annotations

from math import isfinite

from elasticstate.core.diagnostics import why_empty
from elasticstate.core.membership import Membership
from elasticstate.core.phases import Phase
from elasticstate.core.records import Host, Over, Running, Slot, Worker
from elasticstate.driver.dashboard.history import History
from elasticstate.driver.dashboard.merge_patch import View
from elasticstate.driver.durable_figures import DurableFigures
from elasticstate.driver.job_state import JobState
from elasticstate.driver.overview import host_state, overview_of, worker_state
from elasticstate.driver.shards_overview import ShardsOverview


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
        "hosts": {name: _host(host, now, ahead_s) for name, host in m.hosts.items()},
        "workers": _workers(m, now, ahead_s),
        "waiting": list(overview.waiting_for),
        "stragglers": _stragglers(m.phase),
        "generations": dict(history.generations),
        "failures": dict(history.failures),
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


def _stragglers(phase: Phase) -> list[str]:
    """Return one line for each persistently slow rank."""
    found = phase.stragglers if isinstance(phase, Running) else ()
    return [f"{s.worker} (rank {s.rank}): {s.factor:.2f} times the own time of the others" for s in found]


def _host(host: Host, now: float, ahead_s: float) -> View:
    view: View = {"state": host_state(host, now), "slots": host.slots, "order": host.order}
    if host.rack:
        view["rack"] = host.rack
    if why := host.draining or (f"its agent {host.loss}" if host.loss else ""):
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
            view[f"{host}:{index}"] = _empty(slot, now)
    return view


def _empty(slot: Slot, now: float) -> View:
    return {"state": "empty", "why": why_empty(slot, now)}


def _worker(m: Membership, worker: Worker, ahead_s: float) -> View:
    view: View = {
        "state": worker_state(m, worker),
        "name": str(worker.id),
        "place": worker.place,
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
