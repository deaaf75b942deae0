"""Hosts and slots: which agents and workers the core starts and stops, which slots drain, and unreachable hosts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from math import inf
from zlib import crc32

from msgspec.structs import asdict, replace

from elasticstate.core import accounting, event_file, links, types as t
from elasticstate.core.commits import awaited
from elasticstate.core.policy import LEASE_MARGIN, Policy
from elasticstate.core.sharded import awaited_copies, hosts_of, needed_hosts
from elasticstate.core.state import (
    NEW_SLOT,
    NEWCOMER,
    Draft,
    Finishing,
    Forming,
    Host,
    Membership,
    Over,
    Round,
    Running,
    Slot,
    Together,
    Waiting,
    Worker,
    fields_of,
)
from elasticstate.core.types import number_of, within_limits
from elasticstate.core.worlds import assign, may_hold_more, whole_hosts

# ------------------------------------------------------------------------------------------------------------- cooldown
# Backoff of a slot that has failed, and cooldown of a host that fails repeatedly (docs/decisions/restarts.md).


MAX_BACKOFF_S = 60.0
JITTER = 0.1  # so that slots and hosts that were lost together do not all return in the same second
FAILURES_IN_A_ROW = 3  # deaths on one host: cooldown; failures of one slot: the job does not count on it any more
SAME_DEATH_S = 1.0  # deaths on one host within this time count as one
_ATTEMPTS = 10  # the least number of attempts within a time-out that would end the job


def backoff_s(failures: int, name: str = "") -> float:
    """Return the seconds before a restart after ``failures`` in a row: 0, 1, 2, 4 ... at most 60, with a jitter by
    name."""
    if failures <= 1:
        return 0.0
    return _spread(2.0 ** min(failures - 2, 10), 0.0, MAX_BACKOFF_S, name, failures)


def cooldown_s(host: str, count: int, min_s: float, max_s: float) -> float:
    """Return the seconds of a host's cooldown number ``count`` (from 0): doubling, with a jitter within the limits."""
    return _spread(min_s * 2.0 ** min(count, 30), min_s, max_s, host, count)


def patience_s(failures: int, limit_s: float) -> float:
    """Return the seconds of backoff or cooldown for a slot or host that the job needs to reach min_np. The job ends
    after ``limit_s``, so this time is short enough for several attempts."""
    return min(backoff_s(failures), patience_limit_s(limit_s))


def patience_limit_s(limit_s: float) -> float:
    """Return the longest time for one of several attempts in a job that ends after ``limit_s``."""
    return limit_s / _ATTEMPTS


def _spread(seconds: float, min_s: float, max_s: float, name: str, count: int) -> float:
    """Return ``seconds``, up to a tenth longer, but not more than ``max_s``: at this limit, up to a tenth shorter, but
    not less than ``min_s``. A checksum decides, so the same events give the same transcript."""
    if not name:
        return min(seconds, max_s)
    share = JITTER * (crc32(f"{name}/{count}".encode()) % 1000) / 1000.0
    return seconds * (1.0 + share) if seconds * (1.0 + JITTER) <= max_s else max(min_s, max_s / (1.0 + share))


def host_is_lost(d: Draft, host: Host, workers: Iterable[Worker], notice: str) -> None:
    """Start the cooldown of a host whose agent was lost together with ``workers``, whatever the host did before. After
    a preemption ``notice`` the loss was expected: no cooldown is started here."""
    host = _clear_failures(d, host, any(_has_done_well(d, worker) for worker in workers))
    if not notice:
        _cool_down(d, host, "its agent was lost")


def start_preemption_cooldown(d: Draft, host: Host, reason: str) -> None:
    """Start the preemption cooldown of a host: discovery may still name the host until it is gone. Like any cooldown,
    it gives way if the job would be below min_np without the host. Each time it gives way later, because a new agent
    may receive the same preemption notice."""
    host = d.put_host(host, notices=host.notices + 1)
    _leave_unused(d, host, d.policy.preemption_cooldown_s, host.notices, reason)


def slot_failed(d: Draft, worker: Worker, cause: t.RootCause) -> None:
    """Count a failure of the slot, and a death on its host."""
    slot = d.slots[worker.id.slot_id]
    done_well = _has_done_well(d, worker)
    failures = 1 if done_well else slot.failures + 1
    first = cause if failures == 1 else slot.failure
    d.put_slot(
        worker.id.slot_id,
        failures=failures,
        failure=first,
        not_before=d.now + backoff_s(failures, str(worker.id.slot_id)),
        gives_way_at=d.now + patience_s(failures, d.time_to_give_up_s()),
    )
    if d.generation == 0 and d.ledger.outage is None:
        # the others may fail in the same way, before one is restarted
        quiet_s = min(SAME_DEATH_S, patience_limit_s(d.time_to_give_up_s())) if cause.exit_code else 0.0
        d.update_ledger(outage=cause, quiet_until=d.now + quiet_s)
    host = _clear_failures(d, d.hosts[worker.id.host], done_well)
    if host.health == "well":
        host = d.put_host(host, health="unknown")
    _host_had_a_death(d, host, worker.id.slot, cause)


def _host_had_a_death(d: Draft, host: Host, slot: int, cause: t.RootCause) -> None:
    """Count a death on the host. One slot that fails repeatedly does not put its host in cooldown while another slot
    of the host is well."""
    host = d.put_host(host, dead_slots=host.dead_slots | {slot})
    if d.now - host.last_death <= SAME_DEATH_S:
        return
    host = d.put_host(host, deaths=host.deaths + 1, last_death=d.now)
    if host.deaths >= FAILURES_IN_A_ROW and (len(host.dead_slots) > 1 or not _is_well(d, host)):
        _cool_down(d, host, f"{host.deaths} worker failures in a row, the last one: {cause.reason}")


def _is_well(d: Draft, host: Host) -> bool:
    """Return True if a worker on the host is READY or in a world."""
    return any(not worker.gone and (worker.joined or worker.ready is not None) for worker in workers_on(d, host))


def _has_done_well(d: Draft, worker: Worker) -> bool:
    """Return True if a commit since the worker first joined a world, or enough time without failures, clears the
    earlier failures of its slot and host."""
    highest = d.ledger.highest
    has_seen_a_commit = highest is not None and 0 < worker.first_joined <= highest.generation
    return has_seen_a_commit or d.now - worker.ready_at >= long_s(d)


def set_apart(d: Draft) -> None:
    """Start the cooldown of the hosts without which the next world is formed, because their links are cut. It does not
    start again while a host is apart, and it grows with each time a link is cut, whatever happens in between."""
    before, apart = d.ledger.links.apart, {}
    for name in sorted(links.beyond(d)) if d.ledger.links.cut else ():
        if name not in before:
            host = _clear_failures(d, d.hosts[name], False)
            _cool_down(d, host, links.reason(d, name))
        apart[name] = before.get(name, d.hosts[name].cooldown_until)
    if apart != before:
        d.update_ledger(links=replace(d.ledger.links, apart=apart))


def replace_workers(d: Draft, workers: Sequence[Worker], reason: str) -> None:
    """Kill workers whose memory or processor cannot be trusted, and start the cooldown of their hosts."""
    for worker in workers:
        stop(d, worker, reason, kill=True)
    for name in dict.fromkeys(worker.id.host for worker in workers):
        _cool_down(d, _clear_failures(d, d.hosts[name], False), reason)


def _cool_down(d: Draft, host: Host, reason: str) -> None:
    seconds = cooldown_s(host.name, host.cooldowns, *d.policy.cooldown_range_s)
    host = d.put_host(host, cooldowns=host.cooldowns + 1)
    reason += f" (cooldown {host.cooldowns} in a row)" if host.cooldowns > 1 else ""
    _leave_unused(d, host, seconds, host.cooldowns, reason)


def _leave_unused(d: Draft, host: Host, seconds: float, times: int, reason: str) -> None:
    """Start a cooldown. ``times``: in a row; each time it gives way later."""
    until = max(host.cooldown_until, d.now + seconds)
    gives_way_at = min(until, d.now + patience_s(times, d.time_to_give_up_s()))
    d.put_host(host, cooldown_until=until, cooldown_reason=reason, gives_way_at=gives_way_at)
    d.note(event_file.HostCooldown, host=host.name, seconds=round(until - d.now, 3), reason=reason)


def _clear_failures(d: Draft, host: Host, has_done_well: bool) -> Host:
    """Clear the failures of a host if one of its workers has done well, or if nothing has failed for a long time."""
    quiet_since = max(host.last_death, host.cooldown_until)
    if has_done_well or d.now - quiet_since >= long_s(d):
        return d.put_host(host, deaths=0, dead_slots=frozenset(), cooldowns=0)
    return host


def health_checked(d: Draft, event: t.HealthChecked) -> None:
    """Record the answer of an agent. A sick host has a cooldown, at whose end it is checked again."""
    host = d.hosts.get(event.host)
    if host is None or host.health != "checking":
        return
    host = d.put_host(host, health="sick" if event.fault else "well")
    if event.fault:
        _cool_down(d, _clear_failures(d, host, False), f"health check: {event.fault}")


def _may_be_sick(d: Draft, host: Host) -> bool:
    """Return True if nothing starts on the host, because its health check is due, has no answer yet, or has failed.
    Unlike a cooldown, this never gives way."""
    return d.policy.health_check is not None and host.health != "well"


def _check_health(d: Draft, plan: _Plan) -> None:
    """Order the checks that are due: of new hosts, of hosts with a failure since the last one, and of sick hosts after
    their cooldown. Workers that live there train on meanwhile."""
    for host in plan.candidates if d.policy.health_check is not None else ():
        is_due = host.health == "unknown" or (host.health == "sick" and host.cooldown_until <= d.now)
        if is_due and host.agent == "joined":
            d.put_host(host, health="checking", checked_at=d.now)
            d.effects.append(t.CheckHealth(host.name))


def long_s(d: Draft) -> float:
    """Return the seconds without a failure that clear earlier failures: the longest backoff or cooldown."""
    return max(MAX_BACKOFF_S, *d.policy.cooldown_range_s)


def hosts_discovered(d: Draft, event: t.HostsDiscovered) -> None:
    """Enter a new answer of discovery."""
    found, warning = within_limits(event.hosts, d.policy.max_np)
    if warning:
        d.warn(warning)
    for name, known in list(d.hosts.items()):
        if name not in found and known.is_named:
            d.put_host(known, slots=0, is_named=False)
            if known.slots:
                d.note(event_file.HostRemoved, host=name)
    racks = {host.name: host.rack for host in reversed(event.hosts)}
    for order, (name, slots) in enumerate(found.items()):
        before, rack = d.hosts.get(name) or Host(name), racks[name]
        now = (order, slots, True, rack)
        if (before.order, before.slots, before.is_named, before.rack) != now or name not in d.hosts:
            most = max(before.slots_ever, slots)
            d.put_host(before, order=order, slots=slots, is_named=True, rack=rack, slots_ever=most)
        if slots and not before.slots:
            if before.notices:  # the name belongs to another machine now, or the host may be used again
                d.put_host(d.hosts[name], notices=0, cooldown_until=-inf, gives_way_at=-inf)
            if before.agent == "stopping":  # its end starts no preemption cooldown any more
                d.put_host(d.hosts[name], draining="")
            d.note(event_file.HostAdded, host=name, slots=slots)
        elif before.slots and not slots:
            d.note(event_file.HostRemoved, host=name)


# ---------------------------------------------------------------------------------------------------- unreachable hosts
# Workers on unreachable hosts: how long they may live on, and how the core takes survivors back.


def lease_s(policy: Policy) -> float:
    """Return the seconds after the loss of its agent in which an unreachable worker may still train: until the agent
    has killed it, or with ``--lease`` until the end of the lease."""
    if policy.lease_s is not None:
        return LEASE_MARGIN * policy.lease_s
    return LEASE_MARGIN * (policy.heartbeat_timeout_s + policy.driver_timeout_s + policy.stop_timeout_s)


def record_incarnation(d: Draft, worker: t.WorkerId) -> None:
    """Record a worker that an agent has reported as started, perhaps by an earlier driver."""
    host, slot = d.hosts[worker.host], d.slots.get(worker.slot_id)
    d.put_host(host, slots_ever=max(host.slots_ever, worker.slot + 1))
    if slot is None or slot.incarnation < worker.incarnation:
        d.put_slot(worker.slot_id, incarnation=worker.incarnation)


def take_back(d: Draft, worker: t.WorkerId, generation: int) -> None:
    """Take back a worker that lived on while its agent was unreachable. Its generation has ended, so the world does not
    wait for the worker."""
    if worker in d.workers:
        return
    if d.ledger.kind == "" and generation == 0:  # it has used run: else its place has a generation
        d.update_ledger(kind="elastic", round=None, first_user=worker)
    if d.ledger.kind != "elastic":
        _stop_returned(d, worker)
        return
    slot = d.slots[worker.slot_id]
    is_its_own = slot.worker is None and 0 < worker.incarnation == slot.incarnation
    if not is_its_own or not _is_over(d, generation):
        d.effects.append(t.StopWorker(worker, "its slot has another worker now", kill=True))
        return
    d.put_slot(worker.slot_id, worker=worker)
    members = d.world.members if d.world is not None and generation == d.generation else ()
    rank = next((placement.rank for placement in members if placement.worker == worker), None)
    lacked = d.world is not None and rank in d.world.lacking  # so the worker's commit may be older than its world
    keeps_own = d.world is None or rank is None or d.world.keeps(rank)
    late = generation > 0
    d.add(Worker(worker, started_at=d.now, joined=generation, rank=rank, lacked=lacked, keeps=keeps_own, late=late))
    if late:
        d.effects.append(t.Sever(worker, generation, f"host {worker.host} was unreachable"))


def _stop_returned(d: Draft, worker: t.WorkerId) -> None:
    """Stop a worker that cannot join another world, because it has read its place when it started."""
    slot = d.slots[worker.slot_id]
    d.effects.append(t.StopWorker(worker, "its world has ended", kill=True))
    if slot.worker is None and 0 < worker.incarnation == slot.incarnation:
        d.put_slot(worker.slot_id, worker=worker)
        d.add(Worker(worker, started_at=d.now, gone="stopped"))


def _is_over(d: Draft, generation: int) -> bool:
    """Return True if a generation has ended or is about to end: no worker may continue in it."""
    return generation < d.generation or (generation == d.generation and isinstance(d.phase, (Forming, Waiting)))


def may_train_on(d: Draft) -> bool:
    """Return True if all members of the newest world are unreachable, so that they may complete ticks unseen (I16).

    A single member that is known to have left the world, or to be dead, proves that the world stands still. With
    ``--lease`` this is no proof, because a tick does not need all members.
    """
    stands_still = d.ledger.is_broken and d.policy.lease_s is None
    return not stands_still and bool(unreachable_hosts(d))


def unreachable_hosts(d: Draft) -> list[str]:
    """Return the hosts on which members of the newest world, or the only holder of the newest commit, may live on,
    until the last of them has given up."""
    hosts = [host.name for host in d.hosts.values() if host.may_live_until > -inf]
    return hosts if d.now < unreachable_until(d) else []


def unreachable_until(d: Draft) -> float:
    """Return the time at which the last unreachable worker has given up."""
    return max((host.may_live_until for host in d.hosts.values()), default=-inf)


# ------------------------------------------------------------------------------------------------------------- together
# Worlds of plain workers, which do not use ``run``: who is in one, when it starts, and its publication.
#
# All workers of such a world start together, because each reads its place when it starts.


def may_start(d: Draft) -> bool:
    """Return True if a round may start: the command may be plain, and no worker of the last round lives."""
    return d.ledger.kind != "elastic" and d.ledger.round is None and not d.workers and isinstance(d.phase, Waiting)


def window_end(d: Draft) -> float:
    """Return the time until which a round waits for more slots, when the free slots are enough but fewer than np."""
    return d.ledger.enough_since + d.policy.join_window_s


def chosen(d: Draft, free: Sequence[t.SlotId], are_more_expected: bool) -> list[t.SlotId]:
    """Return the free slots in which a round starts now; [] to wait for more slots."""
    policy = d.policy
    if len(free) < policy.fewest(d.generation):
        return []
    if len(free) < policy.np and are_more_expected and d.now < window_end(d):
        return []
    places = whole_hosts([slot_id.host for slot_id in free], policy.fitting(len(free)), policy.np_multiple)
    return [free[place] for place in places]


def publish(d: Draft) -> None:
    """Enter Together: the present round is a world. A failure, a change of the members or their end ends this phase."""
    present = d.ledger.round
    assert present is not None
    left = [] if d.world is None else [str(member.worker) for member in d.world.members]
    accounting.next_generation(d)
    members = present.members
    d.world = t.World(d.generation + 1, members, len(members), 0, (), "", fresh=True, is_plain=True)
    generation = d.world.generation
    for member in members:
        worker = d.workers.get(member.worker)
        if worker is not None:
            d.put(
                worker,
                joined=generation,
                first_joined=generation,
                rank=member.rank,
                ready_at=d.now,
                place=t.Place.TRAIN,
            )
    d.update_ledger(is_broken=False)
    for host in list(d.hosts.values()):
        if host.may_live_until > -inf:
            d.put_host(host, may_live_until=-inf)
    d.note(
        event_file.WorldFormed,
        size=d.world.size,
        hosts=d.world.members[0].cross_size,
        joined=[str(member.worker) for member in members],
        left=left,
        root=0,
        synced=0,
        plain=True,
    )
    d.phase = Together(since=present.since)
    d.reason = f"world {d.world.generation}: {number_of(d.world.size, 'worker')} without run"


def mark_draining(d: Draft) -> None:
    """Start the drain of workers whose slot discovery has removed, or whose host has a preemption notice."""
    if isinstance(d.phase, Finishing):
        return  # behind the gate each worker exits in its own time
    for host in d.hosts.values():
        if not (host.draining or host.slots < host.slots_ever) or not d.living.get(host.name):
            continue
        gone = "discovery removed its slot" if host.slots else f"discovery removed host {host.name}"
        for worker in workers_on(d, host):
            if (host.draining or worker.id.slot >= host.slots) and not (worker.draining or worker.gone):
                d.put(worker, draining=host.draining or gone, draining_since=d.now)


def stop(d: Draft, worker: Worker, reason: str, *, kill: bool = False, overdue: bool = False) -> None:
    """Stop a worker. It does not count any more, and its exit is no failure.

    ``overdue``: the worker should have ended by itself, so people are shown its exit as unexpected.
    """
    d.effects.append(t.StopWorker(worker.id, reason, kill))
    d.put(worker, gone="stopped", ready=None, overdue=overdue)


def leave(d: Draft, worker: Worker) -> None:
    d.effects.append(t.Leave(worker.id))
    d.put(worker, gone="stopped", ready=None)


def start_and_stop(d: Draft) -> None:
    """Start workers in free slots that the job needs, and stop the others. Called after the decision on the world."""
    if isinstance(d.phase, Over):
        return
    stop_overdue_boots(d)  # counts from the first world on, which this step may have made
    is_sought = not isinstance(d.phase, (Running, Finishing))
    holders = awaited(d) if is_sought else []
    may_hold = may_hold_more(d, d.ready_workers()) if is_sought and d.draining else []
    _stop_unneeded(d, {slot_id for slot_id, _ in holders}.union(worker.id.slot_id for worker in may_hold))
    if isinstance(d.phase, Finishing):
        return
    plan = _Plan(d, holders)
    for host in plan.hosts:
        if host.name in plan.usable:
            if host.agent == "none":
                d.put_host(host, agent="asked", report="agent started", reported_at=d.now)
                d.effects.append(t.StartAgent(host.name))
        elif host.agent in ("asked", "joined") and not _wanted(host) and not d.living.get(host.name):
            if host.name in plan.holding_hosts or host.name in needed_hosts(d):
                continue  # the host's agent keeps the newest commit: discovery may name the host again
            d.put_host(host, agent="stopping")
            d.effects.append(t.StopAgent(host.name, host.draining or f"discovery removed host {host.name}"))
    _check_health(d, plan)
    _start_workers(d, plan)


def slot_deadlines(d: Draft) -> Iterator[tuple[str, float]]:
    """Yield the times, by name, at which agents and workers may be started or stopped; some may have passed."""
    if isinstance(d.phase, (Finishing, Over)):
        return
    if d.generation and d.booting:
        booting_since = min(worker.started_at for worker in d.workers.values() if worker.booting)
        yield "boot", booting_since + d.policy.start_timeout_s
    if _is_quiet(d):
        yield "quiet time", d.ledger.quiet_until
    if may_start(d):
        yield "start of a round", window_end(d)
    is_sought = not isinstance(d.phase, Running)
    yield from _Plan(d, awaited(d) if is_sought else []).deadlines()


class _Plan:
    """Plan for starts: the hosts that may be used now, and their free slots."""

    def __init__(self, d: Draft, holders: list[tuple[t.SlotId, t.CommitId]]) -> None:
        """``holders``: slots whose retained commits are awaited, the newest first."""
        self._d = d
        self.holders = holders
        self.hosts = hosts = d.by_discovery()
        self.holding_hosts = {slot_id.host for slot_id, _ in holders}
        if isinstance(d.phase, Waiting):
            self.holding_hosts.update(hosts_of(awaited_copies(d)))
        self.awaits_retained = isinstance(d.phase, Waiting) and d.phase.retained_since is not None
        self.candidates = [h for h in hosts if _wanted(h) or (h.slots and h.name in self.holding_hosts)]
        self._cooling = [host for host in self.candidates if host.cooldown_until > d.now]
        self._warm = [host for host in self.candidates if host.cooldown_until <= d.now]
        self._giving_way = self._find_giving_way() if self._cooling else []
        used_now = (*self._warm, *(host for host in self._giving_way if d.now >= host.gives_way_at))
        self.usable = {host.name for host in used_now}

    def _find_giving_way(self) -> list[Host]:
        """Return hosts in cooldown that are used in spite of it, each from its ``gives_way_at`` on: when the job would
        be below min_np without them (I5), or a retained commit there is awaited."""
        d = self._d
        warm = [host for host in self._warm if not host.draining]
        is_short = _slots_counted_on(d) + sum(_good_slots(d, host) for host in warm) < d.policy.fewest(d.generation)
        well = [host for host in self._cooling if host.health != "sick"]
        return [h for h in well if is_short or (self.awaits_retained and h.name in self.holding_hosts)]

    def free_slots(self) -> list[tuple[t.SlotId, Slot]]:
        """Return the slots in which a worker may be started, when their backoff is over.

        Of draining hosts, and of barred slots, only those with an awaited retained commit.
        """
        d, held = self._d, {slot_id for slot_id, _ in self.holders}
        hosts = [d.hosts[host.name] for host in self.hosts if host.name in self.usable]
        found_in = [h for h in hosts if h.agent == "joined" and d.living.get(h.name) != h.slots_ever]
        found_in = [host for host in found_in if not _may_be_sick(d, host)]
        free = [found for host in found_in for found in _free_slots(d, host)]
        return [
            (slot_id, slot)
            for slot_id, slot in free
            if slot_id in held or not (d.hosts[slot_id.host].draining or slot.barred)
        ]

    def start_at(self, slot_id: t.SlotId, slot: Slot, is_short: bool) -> float:
        """Return the time from which a worker may be started in a free slot."""
        gives_way = is_short or (self.awaits_retained and slot_id in self.newest_holders)
        return slot.gives_way_at if gives_way else slot.not_before

    def startable(self) -> list[t.SlotId]:
        """Return the free slots in which a worker may be started now, in discovery's order."""
        d, free = self._d, self.free_slots()
        is_short = self.is_short(free)
        found = ((slot_id, self.start_at(slot_id, slot, is_short)) for slot_id, slot in free)
        return [slot_id for slot_id, at in found if d.now >= at and not d.hosts[slot_id.host].draining]

    def expects_more(self, startable: list[t.SlotId]) -> bool:
        """Return True if more slots than these may soon be free: agents are being started, hosts are checked,
        backoffs are not over, or more hosts may dial in."""
        hosts = [self._d.hosts[name] for name in self.usable]
        asked = any(host.agent in ("none", "asked") or host.health == "checking" for host in hosts)
        return asked or self._d.policy.listen is not None or len(startable) < len(self.free_slots())

    @property
    def newest_holders(self) -> set[t.SlotId]:
        """The slots that retain the newest commit."""
        return {slot_id for slot_id, commit in self.holders if commit == self.holders[0][1]}

    def is_short(self, free: list[tuple[t.SlotId, Slot]]) -> bool:
        """Return True if the job would be below min_np without the slots whose backoff is not over."""
        d = self._d
        ready = [(slot_id, slot) for slot_id, slot in free if slot.not_before <= d.now]
        if len(ready) == len(free):
            return False
        in_time = (slot_id for slot_id, slot in ready if slot.failures < FAILURES_IN_A_ROW) if _is_in_time(d) else ()
        good = sum(not d.hosts[slot_id.host].draining for slot_id in in_time)
        return _slots_counted_on(d) + good < d.policy.fewest(d.generation)

    def deadlines(self) -> Iterator[tuple[str, float]]:
        """Yield the ends of cooldowns and backoffs, and the times from which they give way."""
        d = self._d
        for host in self._cooling:
            yield f"cooldown of host {host.name}", host.cooldown_until
        for host in self._giving_way:
            yield f"host {host.name} gives way", host.gives_way_at
        free = self.free_slots() if _may_start_workers(d) else []
        if free and not self.awaits_retained and _vacancies(d) <= 0:
            free = []
        backing_off = [(slot_id, slot) for slot_id, slot in free if slot.not_before > d.now]
        is_short = self.is_short(free)
        for slot_id, slot in backing_off:
            yield f"backoff of slot {slot_id}", self.start_at(slot_id, slot, is_short)
        if self._cooling or backing_off:
            yield from _late_start_deadlines(d, self.hosts)


def _stop_unneeded(d: Draft, held: Set[t.SlotId]) -> None:
    """Stop workers outside the present world that the job does not need: draining workers, and behind the gate all. A
    draining worker stays if its slot is in ``held``: it holds, or may hold, the newest commit."""
    finishing = isinstance(d.phase, Finishing)
    if not (finishing or d.draining):
        return
    for worker in list(d.workers.values()):
        if worker.gone or not (worker.draining or finishing) or d.breaks(worker) or worker.id.slot_id in held:
            continue
        if d.in_round(worker):
            continue  # the round ends for all its workers together
        reason = worker.draining or "the job is over"
        if worker.ready is None:
            stop(d, worker, reason)
        elif isinstance(d.phase, (Running, Finishing)):
            leave(d, worker)  # in Waiting and Forming the worker stays: it may hold the newest commit


def stop_overdue_boots(d: Draft) -> None:
    """Kill workers that have booted for --start-timeout: their slots have failed. (Before the first world, this
    time-out ends the job.)"""
    limit_s = d.policy.start_timeout_s
    if not d.generation or isinstance(d.phase, Finishing) or not d.booting:
        return
    for worker in list(d.workers.values()):
        if worker.booting and d.now >= worker.started_at + limit_s:
            d.warn(f"{worker.id} is killed: not ready within --start-timeout of {limit_s:g} s")
            d.effects.append(t.StopWorker(worker.id, f"not ready within --start-timeout of {limit_s:g} s", kill=True))
            d.put(worker, gone="failed")


def _wanted(host: Host) -> bool:
    return host.slots > 0 and not host.draining


def workers_on(d: Draft, host: Host) -> list[Worker]:
    """Return the living workers of a host, by slot."""
    slots = (d.slots.get(t.SlotId(host.name, index)) for index in range(host.slots_ever))
    return [d.workers[slot.worker] for slot in slots if slot is not None and slot.worker is not None]


def _free_slots(d: Draft, host: Host) -> Iterator[tuple[t.SlotId, Slot]]:
    """Yield the free slots of a host. A worker may be started there when the backoff is over."""
    for index in range(host.slots):
        slot_id = t.SlotId(host.name, index)
        slot = d.slots.get(slot_id, NEW_SLOT)
        if slot.worker is None and not slot.finished:
            yield slot_id, slot


def _finished_slots(d: Draft) -> int:
    return 0 if d.ledger.ever_ready else sum(slot.finished for slot in d.slots.values())


def _vacancies(d: Draft) -> float:
    """Return how many workers may still be started: up to max_np, and the spares beside a world that trains."""
    if d.policy.max_np is None:
        return inf
    spares = d.policy.spares if isinstance(d.phase, Running) and d.phase.first_tick else 0
    return d.policy.max_np + spares - _taken(d)


def _taken(d: Draft) -> int:
    """Return how many workers have finished, or live and may be in the next world."""
    return _finished_slots(d) + sum([not (w.draining or w.gone) for w in _not_apart(d)])  # a list: faster


def _hosts_of_world(d: Draft) -> set[str]:
    """Return the hosts of the world's members if the next worker is a spare: it had better be on another host."""
    is_whole = d.policy.spares and d.policy.max_np is not None and len(d.members()) >= d.policy.max_np
    return {member.id.host for member in d.members()} if is_whole else set()


def _slots_counted_on(d: Draft) -> int:
    """Return the number of slots with a worker that is READY, in a world, or booting with a chance of success."""
    found = _not_apart(d)
    if d.booting:
        return _finished_slots(d) + sum(_is_counted_on(d, worker) for worker in found)
    return _finished_slots(d) + sum([not (w.draining or w.gone) or is_restarting(d, w) for w in found])


def _is_counted_on(d: Draft, worker: Worker) -> bool:
    if worker.booting:
        return d.slots[worker.id.slot_id].failures < FAILURES_IN_A_ROW and _is_in_time(d, worker.started_at)
    return not (worker.draining or worker.gone) or is_restarting(d, worker)


def _not_apart(d: Draft) -> Collection[Worker]:
    """Return all workers but the READY ones that wait because links are cut."""
    if not (d.ledger.links.cut or d.ledger.links.apart):
        return d.workers.values()
    beyond = links.beyond(d)
    return [worker for worker in d.workers.values() if worker.ready is None or worker.id.host not in beyond]


def is_restarting(d: Draft | Membership, worker: Worker) -> bool:
    """Return True if the worker is stopped only because others of its round have ended: its slot is as good as free."""
    is_in_use = worker.id.slot < d.hosts[worker.id.host].slots
    return worker.in_round and worker.gone == "stopped" and not worker.draining and is_in_use


def _is_in_time(d: Draft, asked_at: float = inf) -> bool:
    """Return True if a start that was requested at ``asked_at``, or would be now, is worth waiting for. It is for half
    of the time after which the job is given up. The other half is for all other starts."""
    return d.now < _late_from(d, asked_at)


def _late_from(d: Draft, asked_at: float = inf) -> float:
    waits_since = d.phase.since if isinstance(d.phase, Waiting) else inf
    return min(asked_at, waits_since) + d.time_to_give_up_s() / 2


def _late_start_deadlines(d: Draft, hosts: list[Host]) -> Iterator[tuple[str, float]]:
    """Yield the times at which booting workers and requested agents are not counted on any more."""
    yield "starts are late", _late_from(d)
    for worker in d.workers.values() if d.booting else ():
        if worker.booting:
            yield f"boot of {worker.id} is late", _late_from(d, worker.started_at)
    for host in hosts:
        if (asked_at := _asked_at(host)) < inf:
            yield f"host {host.name} is late", _late_from(d, asked_at)


def _good_slots(d: Draft, host: Host) -> int:
    """Return the number of free slots of a host that may be counted on."""
    if d.living.get(host.name) == host.slots_ever or not _is_in_time(d, _asked_at(host)):
        return 0
    return sum(slot.failures < FAILURES_IN_A_ROW and not slot.barred for _, slot in _free_slots(d, host))


def _asked_at(host: Host) -> float:
    """Return when the agent of the host, or its health check, was begun that is awaited; inf: nothing is awaited."""
    if host.agent == "asked":
        return host.reported_at
    return host.checked_at if host.health == "checking" else inf


def _is_recovering(d: Draft) -> bool:
    return isinstance(d.phase, Forming) or (isinstance(d.phase, Running) and not d.phase.first_tick)


def _is_quiet(d: Draft) -> bool:
    """Return True if no worker may start: a boot would compete with the recovery, or, before any worker was READY, the
    first failure is so recent that all other workers may fail in the same way."""
    return d.now < d.ledger.quiet_until and (_is_recovering(d) or not d.ledger.ever_ready)


def _may_start_workers(d: Draft) -> bool:
    """Return False in a quiet time, or while members with a confirmed own error have not exited: all members may end by
    their own errors."""
    if _is_quiet(d):
        return False
    if not _is_recovering(d):
        return True
    return not any(worker.confirmed_at is not None and not worker.gone for worker in d.workers.values())


def _start_workers(d: Draft, plan: _Plan) -> None:
    """Start workers in free slots, first in slots that retain a commit newer than any READY worker's. If such a commit
    is awaited, one worker may be started beyond max_np."""
    if not _may_start_workers(d):
        return
    if d.ledger.kind != "elastic":
        _start_round(d, plan)
        return
    free = plan.free_slots()
    if not free:
        return
    vacancies = _vacancies(d)
    order = {slot_id: position for position, (slot_id, _) in enumerate(plan.holders)}
    newest = plan.newest_holders
    beyond = plan.awaits_retained and all(d.slots[slot_id].worker is None for slot_id in newest)
    used = _hosts_of_world(d)
    free.sort(key=lambda found: (order.get(found[0], len(order)), found[0].host in used))
    is_short = plan.is_short(free)
    for slot_id, slot in free:
        if vacancies <= 0 and not (beyond and slot_id in newest):
            return
        if d.now >= plan.start_at(slot_id, slot, is_short):
            _start_worker(d, slot_id)
            beyond = beyond and slot_id not in newest
            vacancies -= not d.hosts[slot_id.host].draining  # a draining host's worker only provides its commit


def _start_round(d: Draft, plan: _Plan) -> None:
    """Start workers together, each with its place in a world, if the command may be plain."""
    if not may_start(d):
        return
    free = plan.startable()
    enough = len(free) >= d.policy.fewest(d.generation) and not may_train_on(d)
    if enough != (d.ledger.enough_since < inf):
        d.update_ledger(enough_since=d.now if enough else inf)
    slot_ids = chosen(d, free, plan.expects_more(free)) if enough else []
    if not slot_ids:
        return
    members = assign([(_next_worker(d, slot_id), NEWCOMER) for slot_id in slot_ids])
    for member in members:
        place = t.PlainPlace(
            **asdict(member),
            generation=d.generation + 1,
            size=len(members),
            restarts=d.ledger.restarts,
            max_restarts=d.policy.reset_limit,
            store_host=members[0].worker.host,
        )
        _start_worker(d, member.worker.slot_id, place)
    d.update_ledger(round=Round(members, d.now), enough_since=inf)
    if d.ledger.kind == "plain":
        publish(d)


def newcomers(d: Draft) -> list[t.SlotId]:
    """Return the free slots that fit into the next world of plain workers. Slots that failed repeatedly do not count:
    each start there may end the whole world."""
    plan = _Plan(d, [])
    free = [slot_id for slot_id in plan.startable() if d.slots.get(slot_id, NEW_SLOT).failures < FAILURES_IN_A_ROW]
    taken = _taken(d)
    return free[: max(0, d.policy.fitting(taken + len(free)) - taken)]


def _next_worker(d: Draft, slot_id: t.SlotId) -> t.WorkerId:
    return t.WorkerId(*slot_id, d.slots[slot_id].incarnation + 1 if slot_id in d.slots else 1)


def _start_worker(d: Draft, slot_id: t.SlotId, place: t.PlainPlace | None = None) -> None:
    draining, age = d.hosts[slot_id.host].draining, d.slots.get(slot_id, NEW_SLOT).age
    since = d.now if draining else inf
    worker = Worker(
        _next_worker(d, slot_id), d.now, draining=draining, draining_since=since, in_round=place is not None, age=age
    )
    d.add(worker)
    d.put_slot(slot_id, incarnation=worker.id.incarnation, worker=worker.id)
    d.effects.append(t.StartWorker(worker.id, place=place))
    d.note(event_file.WorkerStarted, **fields_of(worker.id))
