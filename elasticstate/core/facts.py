"""What an event changes in the state. No decision is taken here, but the ends of a generation's members are collected.

What is unknown, stale or impossible has no effect (I1): a worker that is not alive, an older incarnation, another
generation, an order of things that cannot be.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from signal import Signals

from elasticstate.core import memory, reach, types as t
from elasticstate.core.budget import host_is_lost, rest, slot_failed
from elasticstate.core.ending import earlier
from elasticstate.core.records import Draft, Failure, Finishing, Forming, Host, Running, Worker

EXIT_0 = "exited with 0 without returning from train"


def apply(d: Draft, event: t.Event) -> None:
    """Enter one event into the draft."""
    match event:
        case t.Heartbeat():
            _heartbeat(d, event)
        case t.CommitSealed():
            _commit_sealed(d, event)
        case t.WorkerReady():
            _worker_ready(d, event)
        case t.WorkerExited():
            _worker_exited(d, event)
        case t.WorkerUnresponsive():
            _worker_unresponsive(d, event)
        case t.WorkerLeaving():
            _worker_leaving(d, event)
        case t.HoldAnswered():
            _hold_answered(d, event)
        case t.FailureReported():
            _failure_reported(d, event)
        case t.GateEntered():
            _gate_entered(d, event)
        case t.FirstTick():
            _first_tick(d, event)
        case t.HostsDiscovered():
            _hosts_discovered(d, event)
        case t.AgentJoined():
            _agent_joined(d, event)
        case t.AgentLost():
            _agent_lost(d, event)
        case t.AgentLeaving():
            _agent_leaving(d, event)
        case t.Several():
            for each in event.events:
                apply(d, each)
        case t.TimePassed():
            pass


# ------------------------------------------------------------------------------------------------ hosts and agents


def _hosts_discovered(d: Draft, event: t.HostsDiscovered) -> None:
    found: dict[str, t.HostSlots] = {}
    for host in event.hosts:
        found.setdefault(host.name, host)
    for name, known in list(d.hosts.items()):
        if name not in found and known.slots:
            d.put_host(known, slots=0)
            d.note("host_removed", host=name)
    for order, (name, answer) in enumerate(found.items()):
        slots = max(0, answer.slots)
        before = d.hosts.get(name) or Host(name)
        if (before.order, before.slots) != (order, slots) or name not in d.hosts:
            d.put_host(before, order=order, slots=slots, seats=max(before.seats, slots))
        if slots and not before.slots:
            if before.notices:  # it is another machine by now, or may be used again
                d.put_host(d.hosts[name], notices=0, cooldown_until=-inf, gives_way_at=-inf)
            d.note("host_added", host=name, slots=slots)
        elif before.slots and not slots:
            d.note("host_removed", host=name)


def _agent_joined(d: Draft, event: t.AgentJoined) -> None:
    host = d.hosts.get(event.host)
    if host is None or host.agent == "stopping":  # one that was out of reach has come back in the other's place
        d.effects.append(t.StopAgent(event.host, "it is not wanted any more"))
    if host is None or host.agent not in ("asked", "none"):
        return
    d.put_host(host, agent="joined", may_live_until=-inf, heard="its agent connected", heard_at=d.now)
    memory.found(d, host.name, dict(event.commits))
    d.note("agent_joined", host=host.name)
    for worker in (*(t.WorkerId(host.name, *known) for known in event.incarnations), *(w for w, _ in event.workers)):
        reach.has_been(d, worker)
    if host.may_live_until > -inf and not event.workers:
        d.account(is_broken=True)
    for worker, generation in event.workers:
        reach.take_back(d, worker, generation)


def _agent_lost(d: Draft, event: t.AgentLost) -> None:
    host = d.hosts.get(event.host)
    if host is None or host.agent == "none":
        return
    expected = host.agent == "stopping"
    may_live = event.may_live and not expected
    notice = host.leaving
    heard = notice or ("its agent was stopped" if expected else f"its agent was lost: {event.reason}")
    host = d.put_host(host, agent="none", leaving="", heard=heard, heard_at=d.now)
    if not expected:
        d.note("agent_lost", host=host.name, reason=event.reason)
    seats = (d.slots.get(t.SlotId(host.name, index)) for index in range(host.seats))
    workers = [d.workers[slot.worker] for slot in seats if slot is not None and slot.worker is not None]
    for worker in workers:
        cause = d.root_cause(worker, f"lost {worker.id}: the agent of host {host.name} is gone ({event.reason})")
        if d.breaks(worker) and not worker.gone:
            d.broken.append(Failure(cause, "lost"))
        if d.breaks(worker) and may_live:
            host = d.put_host(host, may_live_until=d.now + reach.lease_s(d.policy))
        elif d.breaks(worker):
            d.account(is_broken=True)
        _bury(d, worker, exit_code=None, signal=None)
    if expected:
        memory.found(d, host.name, {})  # it has removed its workers' commits
    else:
        host_is_lost(d, host, workers, event.reason, notice)
    if notice and host.slots:
        rest(d, d.hosts[host.name], notice)


def _agent_leaving(d: Draft, event: t.AgentLeaving) -> None:
    host = d.hosts.get(event.host)
    if host is not None and host.agent == "joined" and not host.leaving:
        d.put_host(host, leaving=f"notice: {event.reason}")
        d.note("host_leaving", host=host.name, reason=event.reason)


# --------------------------------------------------------------------------------------------- the ends of workers


def _worker_exited(d: Draft, event: t.WorkerExited) -> None:
    worker = d.workers.get(event.worker)
    if worker is None:
        return
    how = _how(event)
    error = event.error or worker.suspect_error
    cause = d.root_cause(worker, f"{worker.id} {how}", error)
    cause = replace(cause, exit_code=event.exit_code, signal=event.signal, time_ns=event.time_ns)
    is_member = d.breaks(worker) and not worker.gone
    benign = worker.gone == "stopped"
    if d.breaks(worker):
        d.account(is_broken=True)
    if isinstance(d.phase, Finishing) and is_member:
        benign = event.exit_code == 0
        if not benign:
            d.broken.append(Failure(cause, "own"))
    elif worker.booting and event.exit_code == 0 and not d.ledger.ever_ready:
        benign = True
        d.put_slot(worker.id.seat, finished=True)
    elif not benign:
        if event.exit_code == 0:
            cause = replace(cause, reason=f"{worker.id} {EXIT_0}")
        benign = bool(worker.leaving) and not is_member
        if is_member:
            _member_ended(d, worker, cause)
    _bury(d, worker, event.exit_code, event.signal)
    if not benign:
        slot_failed(d, worker, cause)


def _how(event: t.WorkerExited) -> str:
    if event.signal is None:
        return f"exited with {event.exit_code}"
    try:
        return f"was killed by {Signals(event.signal).name}"
    except ValueError:
        return f"was killed by signal {event.signal}"


def _member_ended(d: Draft, worker: Worker, cause: t.RootCause) -> None:
    """A member of the newest world has ended by itself."""
    own_error = worker.ready is None and bool(cause.exit_code) and cause.signal is None
    if own_error:
        d.account(own_errors=d.ledger.own_errors + 1, own_error=earlier(d.ledger.own_error, cause))
    if d.ledger.outage is not None:
        d.account(outage=earlier(d.ledger.outage, cause))
    d.broken.append(Failure(cause, "own", own_error))


def _bury(d: Draft, worker: Worker, exit_code: int | None, signal: int | None) -> None:
    d.remove(worker)
    d.put_slot(worker.id.seat, worker=None)
    d.note(
        "worker_exited",
        worker=str(worker.id),
        host=worker.id.host,
        slot=worker.id.slot,
        rank=worker.rank,
        exit_code=exit_code,
        signal=signal,
    )


def _worker_unresponsive(d: Draft, event: t.WorkerUnresponsive) -> None:
    worker = d.workers.get(event.worker)
    if worker is None or worker.gone:
        return
    d.note("worker_unresponsive", worker=str(worker.id), reason=event.reason)
    if isinstance(d.phase, Finishing):
        return  # its exit decides
    if d.breaks(worker):
        d.broken.append(Failure(d.root_cause(worker, f"{worker.id} does not respond: {event.reason}"), "own"))
    d.put(worker, gone="failed", ready=None)


def _worker_leaving(d: Draft, event: t.WorkerLeaving) -> None:
    worker = d.workers.get(event.worker)
    if worker is not None and not worker.leaving and not worker.gone:
        d.put(worker, leaving=f"notice: {event.reason}", leaving_at=d.now)


# -------------------------------------------------------------------------------------------- the words of workers


def _see_commit(d: Draft, commit: t.CommitId | None) -> None:
    if commit is not None and commit.tick >= 1 and (d.ledger.highest is None or commit > d.ledger.highest):
        d.account(highest=commit)


def _heartbeat(d: Draft, event: t.Heartbeat) -> None:
    worker = d.workers.get(event.worker)
    if worker is None:
        return
    _see_commit(d, event.commit)
    if event.commit is not None:
        memory.remember(d, worker.id.seat, event.commit)
    if worker.ready is not None or event.generation != worker.joined:
        d.put(worker, heard_at=d.now, place=event.place)
        return
    d.put(
        worker,
        heard_at=d.now,
        place=event.place,
        ticks=event.ticks,
        ticks_at=d.now if event.ticks != worker.ticks else worker.ticks_at,
        commit=event.commit or worker.commit,
    )


def _commit_sealed(d: Draft, event: t.CommitSealed) -> None:
    worker = d.workers.get(event.worker)
    if worker is not None:
        _see_commit(d, event.commit)
        memory.remember(d, worker.id.seat, event.commit)
        d.put(worker, commit=event.commit)


def _worker_ready(d: Draft, event: t.WorkerReady) -> None:
    worker = d.workers.get(event.worker)
    if worker is None or worker.gone or event.generation != worker.joined or isinstance(d.phase, Finishing):
        return
    _see_commit(d, event.commit)
    _see_commit(d, event.previous)
    memory.remember(d, worker.id.seat, event.commit)
    if not d.ledger.ever_ready:
        d.account(ever_ready=True)
        _finished_slots_have_failed(d)
    if worker.ready is not None:
        d.put(worker, ready=event, commit=event.commit, heard_at=d.now)
        return
    d.note("worker_ready", worker=str(worker.id), host=worker.id.host, slot=worker.id.slot)
    d.put(
        worker,
        ready=event,
        ready_at=d.now,
        heard_at=d.now,
        commit=event.commit,
        late=False,
        in_gate=False,
        suspect_at=None,
        confirmed_at=None,
    )
    if d.breaks(worker):
        d.account(is_broken=True)
        match d.phase:
            case Running():
                cause = d.root_cause(worker, f"{worker.id} has left the generation")
                d.broken.append(Failure(cause, "reported"))
            case Forming(clock=None):
                d.phase = replace(d.phase, clock=d.now)


def _finished_slots_have_failed(d: Draft) -> None:
    """The command uses ``run`` after all: who exited with 0 before it was READY has failed."""
    for seat, slot in list(d.slots.items()):
        if slot.finished:
            worker = t.WorkerId(seat.host, seat.slot, slot.incarnation)
            cause = t.RootCause(f"{worker} {EXIT_0}", worker, exit_code=0)
            d.put_slot(seat, finished=False, failures=1, failure=cause, not_before=d.now)


def _member(d: Draft, worker: t.WorkerId, generation: int) -> Worker | None:
    """The worker, if it stands in this generation, and that is the present one."""
    found = d.workers.get(worker)
    if found is None or found.gone or found.ready is not None or found.late:
        return None
    return found if found.joined == generation == d.generation else None


def _hold_answered(d: Draft, event: t.HoldAnswered) -> None:
    worker = _member(d, event.worker, event.generation)
    is_held = isinstance(d.phase, Running) and d.phase.hold_since is not None
    if worker is not None and is_held and event.number == d.ledger.holds:  # since another one's the worker has run on
        d.put(worker, answer=(event.ticks, event.in_gate), heard_at=d.now)


def _failure_reported(d: Draft, event: t.FailureReported) -> None:
    worker = _member(d, event.worker, event.generation)
    live = isinstance(d.phase, Running) or (isinstance(d.phase, Forming) and d.phase.at_tick is not None)
    if worker is None or not live:
        return  # in a generation that has ended now, every suspect has its answer
    if event.certain:
        d.broken.append(_what_was_found(d, worker, event.error))
        d.put(worker, heard_at=d.now)
    elif worker.suspect_at is None:
        d.put(worker, suspect_at=d.now, suspect_error=event.error, heard_at=d.now)


def _what_was_found(d: Draft, worker: Worker, error: str) -> Failure:
    """Why a member finds the generation broken: another one leaves it, with an error that is known to be its own."""
    suspects = d.workers.values() if d.suspects else ()
    confirmed = (w for w in suspects if w.confirmed_at is not None and d.breaks(w))
    first = min(confirmed, key=lambda w: (w.suspect_at or 0.0, w.id), default=None)
    if first is None:
        return Failure(d.root_cause(worker, f"{worker.id} found the generation broken", error), "reported")
    return Failure(d.root_cause(first, f"{first.id} had an error of its own", first.suspect_error), "own")


def _gate_entered(d: Draft, event: t.GateEntered) -> None:
    worker = _member(d, event.worker, event.generation)
    if worker is None or worker.in_gate:
        return
    d.put(worker, in_gate=True, heard_at=d.now, place="gate")
    if isinstance(d.phase, Running) and d.phase.gate_since is None:
        d.phase = replace(d.phase, gate_since=d.now)


def _first_tick(d: Draft, event: t.FirstTick) -> None:
    worker = _member(d, event.worker, event.generation)
    if worker is None or not isinstance(d.phase, Running) or d.phase.first_tick:
        return
    d.phase = replace(d.phase, first_tick=True)
    down_since = d.ledger.down_since
    if down_since is not None:
        downtime_s = d.now - down_since
        d.note("training_resumed", downtime_s=round(downtime_s, 6), ticks_lost=d.ledger.ticks_lost)
        d.account(downtime_s=d.ledger.downtime_s + downtime_s)
    d.account(quiet_until=-inf, outage=None, down_since=None, ticks_lost=0)
