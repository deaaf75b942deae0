"""Random schedules for the core alone: events made from the present state, most of them likely, some of them rubbish.

The maker draws events that a real job could send next (from workers that may be READY, are held, or were stopped). Some
events are wrong: an older incarnation, another generation, an unknown worker, an impossible order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import Phase, given, seed, settings

from elasticstate.core import types as t
from elasticstate.core.policy import Policy
from elasticstate.core.state import Finishing, Forming, Membership, Running, Stopping, Worker
from tests.kit.policy import policy_of

HOSTS = ("a", "b", "c", "d")


def explore_all(
    play: Callable[..., None], schedules: range, reached: Counter[str], wanted: Iterable[str], **drawn: Any
) -> None:
    """Run so many schedules, and more until all ``wanted`` situations are reached, as some of them are rare.

    ``play`` runs one schedule with arguments that hypothesis draws from ``drawn``. It counts in ``reached``.
    """
    for part in range(60):
        count = len(schedules) if part == 0 else len(schedules) // 4
        seed(schedules.start + part)(settings(max_examples=count, phases=[Phase.generate])(given(**drawn)(play)))()
        if all(reached[what] for what in wanted):
            break
    assert reached["schedules"] >= len(schedules)
    missing = [what for what in wanted if not reached[what]]
    assert not missing, f"no schedule has come by: {missing}"


def some_of(schedules: range, part: int, least: int = 0) -> range:
    """Return one in ``part`` of these schedules, and ``least`` at least."""
    return range(schedules.start, schedules.start + max(least, len(schedules) // part))


def random_policy(rng: random.Random) -> Policy:
    """Return a policy with short time-outs, so that schedules of some tens of events reach all of them."""
    np = rng.randint(1, 4)
    return policy_of(
        np=np,
        min_np=rng.randint(1, np),
        max_np=rng.choice((None, np, np + 1, np + 2)),
        start_timeout_s=rng.choice((20.0, 60.0)),
        elastic_timeout_s=rng.choice((6.0, 30.0)),
        regroup_timeout_s=3.0,
        failure_grace_s=rng.choice((0.0, 0.5, 1.0)),
        drain_timeout_s=rng.choice((1.0, 4.0)),
        driver_timeout_s=rng.choice((1.0, 4.0, 12.0)),
        heartbeat_timeout_s=0.5,
        stop_timeout_s=0.5,
        hold_timeout_s=1.0,
        join_window_s=rng.choice((0.0, 2.0)),
        min_interrupt_distance_s=rng.choice((0.0, 2.0)),
        preemption_window_s=rng.choice((0.0, 1.0)),
        preemption_cooldown_s=rng.choice((1.0, 8.0)),
        collective_timeout_s=rng.choice((None, 3.0)),
        reset_limit=rng.choice((None, None, 3)),
        max_no_progress=rng.randint(2, 4),
        cooldown_range_s=(2.0, rng.choice((2.0, 16.0))),
        waiting_notice_s=2.0,
        no_tick_notice_s=1.0,
        straggler_action=rng.choice(("warn", "drain")),
        spares=rng.choice((0, 0, 1, 2)),
    )


class EventMaker:
    """Source of the next event for a membership. ``commits``: the newest commit that the maker let each worker seal."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.commits: dict[t.WorkerId, t.CommitId | None] = {}
        self.away: dict[str, list[tuple[t.WorkerId, int]]] = {}  # by unreachable host: living workers, generations
        self._hosts: tuple[t.HostSlots, ...] = ()

    def draw(self, m: Membership) -> t.Event:
        if self.rng.random() < 0.12:
            return t.Several(tuple(self._one(m) for _ in range(self.rng.randint(2, 4))))
        return self._one(m)

    def published(self, world: t.World) -> None:
        """Let the sync of a world seal (g, 0): it succeeds on most members."""
        for placement in world.members:
            if self.rng.random() < 0.95:
                self.commits[placement.worker] = t.CommitId(world.generation, 0)

    def _one(self, m: Membership) -> t.Event:
        likely = self._likely(m)
        make, _ = self.rng.choices(likely, [weight for _, weight in likely])[0]
        return make(m)

    def _likely(self, m: Membership) -> list[tuple[Callable[[Membership], t.Event], float]]:
        some: list[tuple[Callable[[Membership], t.Event], float]] = [
            (self._rubbish, 2.0),
            (self._discovery, 12.0 if not self._hosts else 0.7),
            (self._time, 4.0),
            (self._stop, 0.02),
        ]
        if any(host.agent == "asked" for host in m.hosts.values()):
            some.append((self._agent_joins, 8.0))
        if any(host.agent == "stopping" for host in m.hosts.values()):
            some.append((self._stopped_agent_joins, 0.5))
        if any(host.agent != "none" for host in m.hosts.values()):
            some += [(self._agent_lost, 0.4), (self._unreachable, 0.5), (self._host_draining, 0.2)]
            some.append((self._all_unreachable, 0.1))
        if m.ledger.links.asked:
            some.append((self._probed, 8.0))
        if any(host.health == "checking" for host in m.hosts.values()):
            some.append((self._health_checked, 8.0))
        if self.away:
            some.append((self._reachable_again, 3.0))
        workers = list(m.workers.values())
        if not workers:
            return some
        some += [
            (self._exit, 1.2),
            (self._heartbeat, 3.0),
            (self._sealed, 0.3),
            (self._unresponsive, 0.2),
            (self._draining, 0.3),
        ]
        if m.ledger.kind == "":
            some.append((self._run_used, 20.0))
        if m.policy.divergence == "restore":
            some.append((self._digests, 8.0))
        if any(w.ready is None and (not w.joined or not isinstance(m.phase, Running)) for w in workers):
            some.append((self._ready, 14.0))
        if any(w.gone for w in workers):
            some.append((self._exit_of_the_gone, 5.0))
        if any(w.confirmed_at is not None for w in workers):
            some.append((self._exit_of_the_confirmed, 8.0))
        if isinstance(m.phase, Running):
            some += [(self._failure, 0.7), (self._suspect, 0.6), (self._all_suspect, 0.3), (self._gate, 0.6)]
            some += [(self._call, 1.0), (self._all_stand_still, 0.5), (self._all_train_on, 0.2)]
            if m.ledger.ticking.standstill is not None:
                some.append((self._where, 3.0))
            some += [(self._tick, 3.0 if m.phase.first_tick else 12.0), (self._stray_ready, 0.05)]
            if any(w.suspect_at is not None for w in workers):
                some.append((self._all_alive, 8.0))
            if m.phase.hold_since is not None:
                some.append((self._answers, 14.0))
            if m.phase.gate_since is not None:
                some.append((self._gate, 8.0))
        elif isinstance(m.phase, Forming) and m.phase.at_tick is not None:
            some += [(self._gate, 0.5), (self._suspect, 0.4), (self._failure, 0.4), (self._all_stand_still, 0.5)]
        elif isinstance(m.phase, Stopping):
            some += [(self._gate, 20.0), (self._suspect, 0.4)]
        elif isinstance(m.phase, Finishing):
            some.append((self._clean_exit, 10.0))
        return some

    # ------------------------------------------------------------------------------------------ hosts and time

    def _discovery(self, m: Membership) -> t.Event:
        names = [name for name in HOSTS if self.rng.random() < (0.9 if not self._hosts else 0.7)]
        self._hosts = tuple(t.HostSlots(name, self.rng.randint(0, 3) or 2) for name in names)
        return t.HostsDiscovered(self._hosts)

    def _time(self, m: Membership) -> t.Event:
        return t.TimePassed()

    def _stop(self, m: Membership) -> t.Event:
        return t.StopRequested("SIGTERM")

    def _agent_joins(self, m: Membership) -> t.Event:
        host = self.rng.choice([h.name for h in m.hosts.values() if h.agent == "asked"])
        self.away.pop(host, None)  # the new agent has replaced the unreachable one
        return t.AgentJoined(host, self._left_on(host))

    def _stopped_agent_joins(self, m: Membership) -> t.Event:
        return t.AgentJoined(self.rng.choice([h.name for h in m.hosts.values() if h.agent == "stopping"]))

    def _left_on(self, host: str) -> tuple[tuple[int, t.CommitId], ...]:
        slot_ids = [(slot_id, commit) for slot_id, commit in self._newest_by_slot().items() if slot_id.host == host]
        found = [(slot_id.slot, commit) for slot_id, commit in slot_ids if self.rng.random() < 0.8]
        return tuple(found)

    def _unreachable(self, m: Membership) -> t.Event:
        host = self.rng.choice([h.name for h in m.hosts.values() if h.agent != "none"])
        living = [(w.id, w.joined) for w in m.workers.values() if w.id.host == host and w.gone != "failed"]
        if living:
            self.away[host] = living
        return t.AgentLost(host, "sent no heartbeat", may_live=True)

    def _all_unreachable(self, m: Membership) -> t.Event:
        """Make all hosts of the newest world unreachable."""
        hosts = {w.id.host for w in m.workers.values() if w.joined == m.generation}
        for host in sorted(hosts):
            self.away[host] = [(w.id, w.joined) for w in m.workers.values() if w.id.host == host]
        return t.Several(tuple(t.AgentLost(host, "sent no heartbeat", may_live=True) for host in sorted(hosts)))

    def _reachable_again(self, m: Membership) -> t.Event:
        """Return an agent with most of the workers that may live on its host, and sometimes one that cannot."""
        rng = self.rng
        host = rng.choice(list(self.away))
        workers = [(worker, given) for worker, given in self.away.pop(host) if rng.random() < 0.8]
        if workers and rng.random() < 0.2:
            worker, given = rng.choice(workers)
            lie = rng.randrange(4)
            if lie == 0:
                worker = worker._replace(incarnation=worker.incarnation - 1)
            elif lie == 1:
                worker = worker._replace(slot=7)
            elif lie == 2:
                workers.remove((worker, given))
                given = m.generation + 1
            workers.append((worker, given))
        return t.AgentJoined(host, self._left_on(host), tuple(workers))

    def _agent_lost(self, m: Membership) -> t.Event:
        host = self.rng.choice([h.name for h in m.hosts.values() if h.agent != "none"])
        return t.AgentLost(host, "is unreachable: connection closed")

    def _host_draining(self, m: Membership) -> t.Event:
        return t.HostDraining(self.rng.choice([h.name for h in m.hosts.values() if h.agent != "none"]), "SIGTERM")

    def _probed(self, m: Membership) -> t.Event:
        """Answer for an agent: mostly a link that was cut still is, and sometimes another one is, or several."""
        links, rng = m.ledger.links, self.rng
        host = rng.choice(list(links.asked))
        cut = [peer for peer in links.asked[host] if rng.random() < (0.6 if (host, peer) in links.cut else 0.2)]
        return t.LinksProbed(host, links.number, tuple(cut))

    def _health_checked(self, m: Membership) -> t.Event:
        host = self.rng.choice([h.name for h in m.hosts.values() if h.health == "checking"])
        return t.HealthChecked(host, self.rng.choice(("", "", "", "no memory")))

    # ------------------------------------------------------------------------------------------------ workers

    def _any(self, m: Membership) -> Worker:
        return self.rng.choice(list(m.workers.values()))

    def _newest_by_slot(self) -> dict[t.SlotId, t.CommitId]:
        """Return the retained commits: the commit of the last worker of each slot."""
        newest = sorted((worker, commit) for worker, commit in self.commits.items() if commit is not None)
        return {worker.slot_id: commit for worker, commit in newest}

    def _ready_of(self, m: Membership, worker: Worker) -> t.Event:
        if not worker.joined and worker.id not in self.commits and self.rng.random() < 0.8:
            self.commits[worker.id] = self._newest_by_slot().get(worker.id.slot_id)
        commit = self.commits.get(worker.id)
        phase = m.phase
        if worker.joined and isinstance(phase, Forming) and phase.at_tick is not None and self.rng.random() < 0.95:
            commit = t.CommitId(phase.ended, phase.at_tick)
        self.commits[worker.id] = commit
        ticks = worker.ticks + self.rng.randint(0, 2)
        store = f"{worker.id}:1"
        previous = None
        if m.policy.divergence == "restore" and commit is not None and commit.tick:
            previous = commit._replace(tick=commit.tick - 1)
        return t.FromWorker(worker.id, t.Ready(worker.joined, commit, previous, store, ticks, self.rng.random()))

    def _digests(self, m: Membership) -> t.Event:
        """Return the digests of all members' next commits, of which some may differ or be lacking."""
        members = [worker for worker in m.workers.values() if 0 < worker.joined == m.generation] or [self._any(m)]
        kinds = (7,) * 12 + (8, t.LACKED, t.OUT_OF_INPUTS)
        tick = max((worker.digests[-1][1] for worker in members if worker.digests), default=0) + 1
        sent = []
        for worker in members:
            if self.rng.random() < 0.9:
                self.commits[worker.id] = t.CommitId(m.generation, tick)
                each = ((tick - 1, tick, self.rng.choice(kinds)),)
                sent.append(t.FromWorker(worker.id, t.CommitDigests(worker.joined, each, True)))
        return t.Several(tuple(sent))

    def _run_used(self, m: Membership) -> t.Event:
        return t.WorkerUsesRun(self._any(m).id)

    def _ready(self, m: Membership) -> t.Event:
        late = isinstance(m.phase, Running)
        able = [w for w in m.workers.values() if w.ready is None and (not late or w.joined != m.generation)]
        return self._ready_of(m, self.rng.choice(able) if able else self._any(m))

    def _stray_ready(self, m: Membership) -> t.Event:
        return self._ready_of(m, self._any(m))

    def _exit(self, m: Membership) -> t.Event:
        worker = self._any(m).id
        if self.rng.random() < 0.6:
            return t.WorkerExited(worker, 1, None, self.rng.choice((9, 11, 15, 77)))
        return t.WorkerExited(worker, 1, self.rng.choice((0, 1, 1, 3)), None, "Traceback: boom")

    def _clean_exit(self, m: Membership) -> t.Event:
        return t.WorkerExited(self._any(m).id, 1, 0, None)

    def _exit_of_the_gone(self, m: Membership) -> t.Event:
        worker = self.rng.choice([w for w in m.workers.values() if w.gone])
        return (
            t.WorkerExited(worker.id, 1, None, 9) if worker.gone == "failed" else t.WorkerExited(worker.id, 1, 0, None)
        )

    def _exit_of_the_confirmed(self, m: Membership) -> t.Event:
        worker = self.rng.choice([w for w in m.workers.values() if w.confirmed_at is not None])
        return t.WorkerExited(worker.id, 1, 1, None, "Traceback: own")

    def _heartbeat(self, m: Membership) -> t.Event:
        worker = self._any(m)
        if worker.joined and worker.joined == m.generation and self.rng.random() < 0.5:
            self.commits[worker.id] = t.CommitId(m.generation, worker.ticks + 1)
        ticks = worker.ticks + self.rng.choice((0, 1, 1, 3))
        commit_s = self.rng.choice((0.0, 0.0, 0.2, 5.0))
        commit = self.commits.get(worker.id)
        return t.FromWorker(
            worker.id, t.Stamp(t.Place.TRAIN, worker.joined, ticks, commit, commit_s, self._pace(worker))
        )

    def _pace(self, worker: Worker, ticks: int | None = None) -> tuple[tuple[int, int], ...]:
        """Return points of the worker's own time. Workers in odd slots are slower, mostly."""
        tick, own_us = worker.pace[-1] if worker.pace else (5, 0)
        slow = worker.id.slot % 2 and self.rng.random() < 0.9
        each_us = (130_000 if slow else 100_000) + self.rng.randint(0, 5_000)
        return tuple((tick + i, own_us + i * each_us) for i in range(1, ticks or self.rng.choice((1, 8, 16))))

    def _sealed(self, m: Membership) -> t.Event:
        worker = self._any(m)
        commit = t.CommitId(max(1, m.generation), 1)
        if worker.joined == commit.generation:
            self.commits[worker.id] = commit
        return t.FromWorker(worker.id, t.CommitSealed(commit))

    def _all_alive(self, m: Membership) -> t.Event:
        beats = [t.FromWorker(w.id, t.Stamp(t.Place.TRAIN, w.joined, w.ticks, None)) for w in m.workers.values()]
        return t.Several(tuple(beats))

    def _all_train_on(self, m: Membership) -> t.Event:
        """Report so many ticks of all members that they are compared, as one after the other rarely does."""
        beats = [
            t.FromWorker(
                w.id,
                t.Stamp(t.Place.TRAIN, w.joined, w.ticks + 15, self.commits.get(w.id), pace=self._pace(w, ticks=16)),
            )
            for w in m.workers.values()
            if w.joined == m.generation
        ]
        return t.Several(tuple(beats))

    def _all_stand_still(self, m: Membership) -> t.Event:
        beats = [
            t.FromWorker(
                w.id, t.Stamp(t.Place.TRAIN, w.joined, w.ticks, None, still_s=self.rng.choice((w.still_s + 2.0, 9.0)))
            )
            for w in m.workers.values()
        ]
        return t.Several(tuple(beats))

    def _where(self, m: Membership) -> t.Event:
        entered = tuple(t.Collective("default_pg", number, "barrier()") for number in range(self.rng.randint(0, 3)))
        report = t.CollectivesReport(m.generation, entered, "", self.rng.choice(("train.py:1", "train.py:2")))
        return t.FromWorker(self._any(m).id, report)

    def _unresponsive(self, m: Membership) -> t.Event:
        return t.WorkerUnresponsive(self._any(m).id, "no stamp for 10 s")

    def _draining(self, m: Membership) -> t.Event:
        return t.FromWorker(self._any(m).id, t.WorkerPreemptionNotice(15))

    def _tick(self, m: Membership) -> t.Event:
        train_s, sync_s = self.rng.random(), self.rng.choice((0.0, self.rng.random()))
        return t.FromWorker(self._any(m).id, t.First(m.generation, train_s, sync_s))

    def _call(self, m: Membership) -> t.Event:
        waiting_s = self.rng.choice((None, 1.0, 59.0, 100.0))
        report = t.CallReport(m.generation, 0, (), self.rng.randint(1, 2), "barrier()", waiting_s)
        return t.FromWorker(self._any(m).id, report)

    def _failure(self, m: Membership) -> t.Event:
        return t.FromWorker(self._any(m).id, t.GenerationFailure(m.generation, True, "Connection closed by peer"))

    def _suspect(self, m: Membership) -> t.Event:
        return t.FromWorker(self._any(m).id, t.GenerationFailure(m.generation, False, "ValueError"))

    def _all_suspect(self, m: Membership) -> t.Event:
        return t.Several(
            tuple(t.FromWorker(w, t.GenerationFailure(m.generation, False, "ValueError")) for w in m.workers)
        )

    def _gate(self, m: Membership) -> t.Event:
        outside = [w.id for w in m.workers.values() if w.joined == m.generation and not w.in_gate]
        if outside and self.rng.random() < 0.4:
            return t.Several(tuple(t.FromWorker(worker, t.Gate(m.generation)) for worker in outside))
        return t.FromWorker(self.rng.choice(outside) if outside else self._any(m).id, t.Gate(m.generation))

    def _answers(self, m: Membership) -> t.Event:
        silent = [w for w in m.workers.values() if w.joined == m.generation and w.answer is None]
        in_gate = self.rng.random() < 0.05
        answers = [t.FromWorker(w.id, t.HoldAnswer(m.generation, w.ticks, in_gate, m.ledger.holds)) for w in silent]
        return t.Several(tuple(answers if self.rng.random() < 0.7 else answers[:1]))

    # ------------------------------------------------------------------------------------------------ rubbish

    def _rubbish(self, m: Membership) -> t.Event:
        rng = self.rng
        worker = t.WorkerId(rng.choice((*HOSTS, "z")), rng.randint(0, 3), rng.randint(1, 3))
        generation = rng.randint(0, m.generation + 1)
        return rng.choice(rubbish(worker, generation, t.CommitId(generation or 1, 0)))


def rubbish(worker: t.WorkerId, generation: int, commit: t.CommitId) -> list[t.Event]:
    """Return one event of each kind about this worker and generation."""
    return [
        t.FromWorker(worker, t.Ready(generation, commit, None, f"{worker}:1")),
        t.WorkerExited(worker, 1, 0, None),
        t.WorkerUnresponsive(worker, "?"),
        t.FromWorker(worker, t.WorkerPreemptionNotice(15)),
        t.FromWorker(worker, t.HoldAnswer(generation, 3, False, 1)),
        t.FromWorker(worker, t.GenerationFailure(generation, True, "?")),
        t.FromWorker(worker, t.GenerationFailure(generation, False, "?")),
        t.FromWorker(worker, t.Gate(generation)),
        t.FromWorker(worker, t.Stamp(t.Place.TRAIN, generation, 1, commit)),
        t.FromWorker(worker, t.CommitSealed(commit)),
        t.WorkerUsesRun(worker),
        t.FromWorker(worker, t.First(generation)),
        t.FromWorker(worker, t.Attached(generation, (7,))),
        t.CopyKept("z", worker.slot_id, commit),
        t.CopyDropped("z", worker.slot_id, commit, "?"),
        t.CommitDamaged(t.SlotId("z", 0), commit),
        t.FromWorker(worker, t.CallReport(generation, 0, (), 1, "?", 100.0)),
        t.AgentJoined("z"),
        t.AgentLost("z", "?"),
        t.HostDraining("z", "?"),
        t.HealthChecked("z", "?"),
        t.LinksProbed("z", generation, ("a",)),
        t.LinksProbed(worker.host, 0, ("a", "b", "c", "d")),
    ]
