"""Invariants that must be true after every step of the core (DESIGN.md, "Membership"), checked from the outside.

The checker keeps its own records from events and effects. It reads the core's records only for facts without an event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf

from elasticstate.core import commits, types as t
from elasticstate.core.figures import NAMES
from elasticstate.core.policy import Policy
from elasticstate.core.reattach import Remains
from elasticstate.core.slots import FAILURES_IN_A_ROW, is_restarting, lease_s
from elasticstate.core.state import DOUBTED, Count, Finishing, Forming, Host, Membership, Over, Running, Waiting, Worker
from elasticstate.core.step import Transition, next_deadline
from tests.kit.simulation.oracle import naive_placements

ENDS = (
    *("StateLostError", "no progress", "reset limit", "--elastic-timeout", "--start-timeout"),
    *("times in a row before", "every worker failed"),
)


def each(event: t.Event) -> Iterator[t.Event]:
    if isinstance(event, t.Several):
        for part in event.events:
            yield from each(part)
    else:
        yield event


def _is_counted_right(m: Membership) -> None:
    booting = ready = draining = suspects = still = 0
    for worker_id, worker in m.workers.items():
        booting += worker.booting
        ready += worker.ready is not None and not worker.gone
        draining += bool(worker.draining) and not worker.gone
        suspects += worker.suspect_at is not None
        still += worker.still_s >= DOUBTED * m.policy.heartbeat_timeout_s
        assert m.slots[worker_id.slot_id].worker == worker_id, "each in its slot"
    assert m.count == Count(booting, ready, draining, suspects, still)
    assert Counter(m.living) == Counter(worker.host for worker in m.workers)
    taken = [slot_id for slot_id, slot in m.slots.items() if slot.worker is not None]
    assert len(taken) == len(m.workers), "and nobody else"
    assert all(slot_id.slot < m.hosts[slot_id.host].slots_ever for slot_id in taken)


class Checker:
    """Checker of one schedule. ``reached`` counts the situations of the schedule, to show that schedules reach all."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        self.world: t.World | None = None
        self._ages: dict[t.WorkerId, int] = {}
        self._next_age = 0
        self._joined: dict[t.WorkerId, int] = {}
        self._held: dict[t.WorkerId, t.CommitId | None] = {}
        self._previous: dict[t.WorkerId, t.CommitId | None] = {}
        self._heirs: dict[t.SlotId, int] = {}  # the ages of replaced workers
        self._lost: set[t.WorkerId] = set()  # workers that were lost since the last world: who returns is a newcomer
        self._behind: set[t.WorkerId] = set()  # workers that have ended ticks without training
        self._committed = False
        self._incarnations: dict[t.SlotId, int] = {}
        self._living: dict[t.SlotId, t.WorkerId] = {}
        self._unresponsive: set[t.WorkerId] = set()
        self._ended: dict[int, list[int | None]] = {}  # by generation: the ticks of its ENDs
        self._planned_at: float | None = None
        self._over = self._behind_gate = self._stopped = False
        self._back: set[t.WorkerId] = set()  # workers that became reachable again in this step
        self._severed: Counter[tuple[t.WorkerId, int]] = Counter()  # how often those in a generation were taken back
        self._leases: dict[str, float] = {}  # unreachable hosts with members of the newest world: the end of their time
        self._named: set[str] = set()  # by discovery
        self._notices: dict[str, float] = {}  # hosts with a preemption notice: the end of their cooldown
        self._stands_still = False  # a member of the newest world is known to have left it
        self._probes: tuple[int, dict[str, tuple[str, ...]]] = (0, {})  # the last order, as far as it is not answered
        self._probed_at = 0.0  # when it was given
        self._cut: set[tuple[str, str]] = set()  # links that are cut
        self._unanswered: set[tuple[str, str]] = set()  # links whose peers have not answered their orders
        self._health: dict[str, str] = {}  # hosts whose health check was ordered: "asked", "well" or "sick"

    def restart(self, remains: Remains, transition: Transition) -> None:
        """Follow a new core: facts that the last core had and the new one does not receive do not count."""
        self._incarnations = {slot_id: slot.incarnation for slot_id, slot in transition.next.slots.items()}
        self._living = {worker.slot_id: worker for worker in transition.next.workers}
        self._joined = {worker: known.joined for worker, known in transition.next.workers.items()}
        self._held, self._heirs, self._lost = {}, {}, set()
        self._unresponsive, self._leases, self._planned_at = set(), {}, None
        self._probes, self._cut, self._unanswered, self._health = (0, {}), set(), set(), {}
        self._named, self._notices = {host.name for host in remains.hosts if host.slots}, {}
        members = [placement.worker for placement in self.world.members] if self.world is not None else []
        ages = dict(zip(members, remains.ages, strict=True))  # a lost worker that returns keeps its age
        self._ages = {worker: age for worker, age in ages.items() if worker in transition.next.workers}
        absent = [worker for worker in members if worker not in transition.next.workers]
        self._stands_still = bool(absent)
        self._ended.pop(self.generation, None)
        for effect in transition.effects:
            match effect:
                case t.End(generation, None, _):
                    assert generation == self.generation
                    assert absent or remains.has_ended, "a world that may go on is not ended"
                    self._ended[generation] = [None]
                case t.OpenGate(generation):
                    assert generation == self.generation
                    assert remains.gate_is_open
                case t.StopWorker(worker):
                    members = [placement.worker for placement in remains.first_round]
                    assert worker in members, "only a first round can end for all its members"
                    assert set(members) - set(transition.next.workers), "a round that may go on is not ended"
                case _:
                    assert isinstance(effect, t.Note), f"{effect} before the first event"
        assert not absent or transition.effects, "a world without some of its members cannot go on"

    @property
    def generation(self) -> int:
        return self.world.generation if self.world else 0

    def see(self, before: Membership, event: t.Event, now: float, transition: Transition) -> None:
        after, effects, reason = transition
        assert reason, "every transition has a reason"
        _is_counted_right(after)
        self._behind_gate, self._back = isinstance(before.phase, Finishing), set()
        deadline = next_deadline(after)
        assert deadline is None or deadline > now, f"a deadline in the past: {deadline} at {now}"
        if self._over:
            assert not effects
            assert after is before
            return
        if self._probes[1] and not before.ledger.links.asked:  # answers that are so late do not count
            assert now > self._probed_at + 0.6 * before.policy.heartbeat_timeout_s, "an order is given up too early"
            self._probes, self._unanswered = (self._probes[0], {}), set()
        agents: dict[str, str] = {}  # states of the agents that changed in this step
        for part in each(event):
            if isinstance(part, (t.AgentLost, t.AgentJoined)):
                known = before.hosts.get(part.host)
                agents.setdefault(part.host, known.agent if known is not None else "")
                self._hear_agent(agents, transition, part, now)
            else:
                self._hear(before, part)
            self._hear_links(part)
            self._stopped |= isinstance(part, t.StopRequested)
            host = getattr(part, "host", "")
            known = before.hosts.get(host)
            agent = agents.get(host, known.agent if known is not None else "")
            self._follow_notice(agent, part, before.policy, now)
        for effect in effects:
            self._see_effect(before, after, effects, effect, now)
        assert not +self._severed, "who is back is severed"
        self._not_too_many(after, [effect.worker for effect in effects if isinstance(effect, t.StartWorker)])

    def _hear_links(self, event: t.Event) -> None:
        """Follow which links are cut."""
        number, asked = self._probes
        match event:
            case t.LinksProbed(host, known, cut) if known == number and host in asked:
                links = {(host, peer) for peer in asked.pop(host)}
                self._cut -= {link for link in links if link[1] not in cut}
                self._unanswered |= {link for link in links if link[1] in cut}
                found = {link for link in self._unanswered if link[1] not in asked}
                self._cut, self._unanswered = self._cut | found, self._unanswered - found
            case t.AgentLost(host):
                self._cut = {link for link in self._cut if host not in link}
                self._unanswered = {link for link in self._unanswered if host not in link}
                asked.pop(host, None)
                for name, peers in list(asked.items()):
                    asked[name] = tuple(peer for peer in peers if peer != host)

    def _is_apart(self, worker: t.WorkerId, hosts: set[str]) -> bool:
        """Return True if the host of this worker has no link to one of these hosts."""
        return any(worker.host in link and not hosts.isdisjoint(set(link) - {worker.host}) for link in self._cut)

    def _waits_apart(self, after: Membership, worker: Worker) -> bool:
        """Return True if a READY worker waits for links."""
        links = after.ledger.links
        return worker.ready is not None and any(worker.id.host in link for link in (*self._cut, links.apart))

    def _not_too_many(self, after: Membership, started: list[t.WorkerId]) -> None:
        """Check max_np. Beyond it, only spares and a worker for the slot of an awaited newest commit may be started."""
        limit = after.policy.max_np
        usable = (w for w in after.workers.values() if not (w.draining or w.gone))
        living = sum(not self._waits_apart(after, worker) for worker in usable)
        trains = isinstance(after.phase, Running) and after.phase.first_tick
        if limit is None or not started or living <= limit + (after.policy.spares if trains else 0):
            return
        kept = {name for name, host in after.hosts.items() if not (host.draining and host.agent == "stopping")}
        retained = [slot.retained for slot_id, slot in after.slots.items() if slot_id.host in kept]
        newest = max((commit for commit in retained if commit is not None), default=None)
        assert self._awaits_retained(after), "more workers were started than max_np"
        assert [after.slots[worker.slot_id].retained for worker in started] == [newest], "more were started than max_np"
        self.reached["beyond max_np"] += 1

    def _hear(self, before: Membership, event: t.Event) -> None:
        match event:
            case t.FromWorker(worker, t.Ready(generation, commit, previous)) if self._lives(before, worker):
                if self._joined.get(worker, 0) == generation:
                    self._stands_still |= generation == self.generation
                    self._held[worker], self._previous[worker] = commit, previous
                    (self._behind.add if event.body.behind else self._behind.discard)(worker)
                    self._committed |= any(self._is_a_users(before, c) for c in (commit, previous))
            case t.FromWorker(worker, t.Stamp(commit=commit) | t.CommitSealed(commit)) if (
                self._living.get(worker.slot_id) == worker
            ):
                self._committed |= self._is_a_users(before, commit)
            case t.HealthChecked(host, fault) if self._health.get(host) == "asked":
                self._health[host] = "sick" if fault else "well"
                self.reached["sick"] += bool(fault)
            case t.WorkerUnresponsive(worker=worker) if self._living.get(worker.slot_id) == worker:
                self._unresponsive.add(worker)
            case t.WorkerExited(worker=worker) if self._living.get(worker.slot_id) == worker:
                del self._living[worker.slot_id]
                self._ages.pop(worker, None)
                members = self.world.members if self.world is not None else ()
                self._stands_still |= any(placement.worker == worker for placement in members)

    @staticmethod
    def _is_a_users(m: Membership, commit: t.CommitId | None) -> bool:
        return commit is not None and commit.tick > 0 and not commits.is_rejected(m, commit)

    def _follow_notice(self, agent: str, event: t.Event, policy: Policy, now: float) -> None:
        """Follow I17: after a preemption notice a host stays unused until its cooldown ends or discovery removes it."""
        match event:
            case t.HostDraining(host=host) if agent == "joined" and host in self._named:
                self._notices[host] = inf
                self.reached["notice"] += 1
            case t.AgentLost(host=host) if self._notices.get(host) == inf:
                self._notices[host] = now + policy.preemption_cooldown_s
            case t.HostsDiscovered(hosts=hosts):
                self._named = {host.name for host in hosts if host.slots}
                self._notices = {host: until for host, until in self._notices.items() if host in self._named}

    def _hear_agent(
        self, agents: dict[str, str], transition: Transition, event: t.AgentLost | t.AgentJoined, now: float
    ) -> None:
        """Follow the living workers of a host. ``agents``: the states of the agents before this event."""
        host, known = event.host, agents[event.host]
        if known == "stopping" and isinstance(event, t.AgentJoined):
            assert any(isinstance(effect, t.StopAgent) and effect.host == host for effect in transition.effects)
            self.reached["joined while stopped"] += 1
        if isinstance(event, t.AgentJoined):
            if known in ("asked", "none"):
                agents[host] = "joined"
                lease = self._leases.pop(host, None)
                self._stands_still |= lease is not None and not event.workers
                started = [t.WorkerId(host, *known) for known in event.incarnations]
                for worker in (*started, *(worker for worker, _ in event.workers)):
                    self._incarnations[worker.slot_id] = max(
                        self._incarnations.get(worker.slot_id, 0), worker.incarnation
                    )
                for worker, generation in event.workers:
                    self._launch_results(transition, worker, generation)
        elif known not in ("", "none"):
            agents[host] = "none"
            if known == "stopping" or self._health.get(host) != "sick":
                self._health.pop(host, None)
            for worker in [worker for worker in self._living.values() if worker.host == host]:
                del self._living[worker.slot_id]
                self._ages.pop(worker, None)
                self._lost.add(worker)
                if self._joined.get(worker, 0) != self.generation or not self.world:
                    continue
                if event.may_live and known != "stopping":
                    self._leases[host] = now + lease_s(transition.next.policy)
                else:
                    self._stands_still = True

    def _launch_results(self, transition: Transition, worker: t.WorkerId, generation: int) -> None:
        """Check that the core takes back a worker that lived on, unless the report is impossible."""
        if self._living.get(worker.slot_id) == worker:
            return  # reported twice
        after, effects, _ = transition
        killed = any(isinstance(e, t.StopWorker) and e.worker == worker and e.kill for e in effects)
        if after.ledger.kind != "elastic":
            self._is_stopped(after, worker, killed)
            return
        is_true = worker.slot_id not in self._living and self._incarnations.get(worker.slot_id) == worker.incarnation
        if generation > self.generation or not is_true or (killed and worker not in after.workers):
            assert killed, "who cannot live there any more is killed"
            assert worker not in after.workers
            ended = generation < self.generation or bool(self._ended.get(generation)) or not self.world
            ended = ended and not self._behind_gate  # behind the gate the core takes no worker back
            assert not is_true or not ended or generation > self.generation, "who may live is taken back"
            self.reached["refused"] += 1
            return
        self._back.add(worker)
        self._living[worker.slot_id] = worker
        self._joined[worker] = generation
        self._held.pop(worker, None)
        self._unresponsive.discard(worker)
        if generation:
            self._severed[worker, generation] += 1
        self.reached["returned"] += 1

    def _is_stopped(self, after: Membership, worker: t.WorkerId, killed: bool) -> None:
        """Check that a worker with a place in an ended round is killed. Its slot stays taken until it has exited."""
        assert killed or isinstance(after.phase, Over), "who cannot join another world is killed"
        if worker in after.workers:
            assert after.workers[worker].gone
            self._living[worker.slot_id] = worker
        self.reached["returned too late"] += 1

    def _lives(self, before: Membership, worker: t.WorkerId) -> bool:
        gone = worker in before.workers and before.workers[worker].gone and worker not in self._back
        return self._living.get(worker.slot_id) == worker and not gone and worker not in self._unresponsive

    def _see_effect(
        self, before: Membership, after: Membership, effects: tuple[t.Effect, ...], effect: t.Effect, now: float
    ) -> None:
        if self._stopped:
            begins = t.World | t.StartWorker | t.StartAgent | t.Hold | t.End
            assert not isinstance(effect, begins), "nothing begins in a job that is being stopped"
        match effect:
            case t.World() as world:
                self._publish(before, after, world, now)
            case t.StartWorker(worker):
                self._start(after, worker, now)
            case t.StartAgent(host):
                assert after.hosts[host].slots
                is_refused = self._health.get(host) == "sick" and after.hosts[host].cooldown_until > now
                assert not is_refused, "I5: the cooldown of a sick host never gives way"
                self._respect_cooldown(after, after.hosts[host], now)
            case t.CheckHealth(host):
                assert after.hosts[host].agent == "joined"
                assert self._health.get(host) != "asked", "one check at a time"
                sick = self._health.get(host) == "sick"
                assert not sick or after.hosts[host].cooldown_until <= now, "I5: checked again after its cooldown"
                self.reached["checked again"] += sick
                self._health[host] = "asked"
            case t.Hold(generation):
                self._hold(before, after, generation, now)
            case t.Release():
                self.reached["release"] += 1
            case t.End(generation, at_tick, _):
                self._end(before, generation, at_tick, now)
            case t.Sever(worker, generation, _):
                self._severed[worker, generation] -= 1
                assert self._severed[worker, generation] >= 0, "nobody but who is back, once each time"
            case t.Leave(worker):
                assert isinstance(after.phase, Running | Waiting | Finishing | Over)
                published = [e for e in effects if isinstance(e, t.World)]
                assert all(worker != p.worker for world in published for p in world.members)
                assert worker not in after.workers or after.workers[worker].gone
                self.reached["leave"] += 1
            case t.StopWorker(worker):
                self.reached["killed at a stop"] += self._stopped and effect.kill
                assert worker not in after.workers or after.workers[worker].gone
                self.reached["stop"] += 1
            case t.ConfirmOwnError(worker, generation):
                self._verdict(before, after, worker, generation, now)
            case t.OpenGate(generation):
                assert generation == self.generation
                members = [w for w in after.workers.values() if w.joined == generation and not w.gone]
                assert all(w.in_gate for w in members), "the gate opens when all members are in it"
                self.reached["gate"] += 1
                self.reached["stopped in the gate"] += self._stopped
            case t.Terminate(generation):
                assert generation == self.generation
                self.reached["stopped"] += 1
            case t.EndJob(succeeded, cause, own_error):
                assert not own_error or (cause is not None and cause.signal is None), "no error of the script itself"
                self.reached["own error"] += own_error
                assert succeeded == (cause is None) or (self._stopped and not succeeded)
                assert effect is effects[-1], "the end of the job comes last"
                assert isinstance(after.phase, Over)
                self._over = True
                self.reached["job succeeded" if succeeded else "job failed"] += 1
                if cause is not None:
                    self.reached.update(f"end: {name}" for name in ENDS if name in cause.reason)
                    lease_over = now >= max(self._leases.values(), default=now)
                    assert lease_over or "StateLostError" not in cause.reason, "I3: an unreachable host may hold it"
            case t.ProbeLinks(number, peers):
                assert number > self._probes[0]
                pairs = [frozenset((host, peer)) for host, its in peers for peer in its]
                known = {frozenset(link) for link in self._cut}
                assert all(len(pair) == 2 for pair in pairs)
                assert len({*pairs}) == len(pairs) or known, "each link is probed once"
                assert all(after.hosts[host].agent == "joined" for pair in pairs for host in pair)
                self._probes, self._unanswered, self._probed_at = (number, dict(peers)), set(), now
                self.reached["probes of a failure"] += isinstance(after.phase, Forming)
            case t.Note(event):
                self.reached[f"note {event}"] += 1
                if event == "divergence":
                    replaced = effect.get("replaced")
                    assert isinstance(replaced, list)
                    self._heirs = {worker.slot_id: age for worker, age in self._ages.items() if str(worker) in replaced}
                    self.reached["replaced worker"] += bool(self._heirs)
                self.reached["retained commit given up"] += "is given up" in str(effect.get("text"))
                if event == "training_resumed":
                    figures = [effect.get(name) for name in NAMES]
                    assert all(isinstance(figure, int | float) and figure >= 0 for figure in figures), figures
                    self.reached.update(name for name in NAMES if effect.get(name))

    # ---------------------------------------------------------------------------------------------------- worlds

    def _publish(self, before: Membership, after: Membership, world: t.World, now: float) -> None:
        policy, members = after.policy, [placement.worker for placement in world.members]
        assert world.generation == self.generation + 1, "I1: one world per generation, strictly rising"
        assert not self.world or world.generation - 1 in self._ended, "I1: the last generation has been ended"
        lease_until = max(self._leases.values(), default=now)
        assert self._stands_still or now >= lease_until, "I16: the last world is unreachable and may be training"
        self.reached["lease over"] += bool(self._leases) and not self._stands_still
        self._leases, self._stands_still = {}, False
        assert policy.fewest(world.generation - 1) <= world.size, "I4"
        assert policy.max_np is None or world.size <= policy.max_np, "I4"
        assert world.size % policy.np_multiple == 0, "I4: whole groups"
        heirs = [w for w in members if w.slot_id in self._heirs and w not in self._ages and w not in self._lost]
        self._ages.update((worker, self._heirs[worker.slot_id]) for worker in heirs)
        self._heirs, self._lost = {}, set()
        self._discard_rejected(after)
        order = [host.name for host in sorted(after.hosts.values(), key=lambda host: (host.order, host.name))]
        survivors = {worker: self._ages[worker] for worker in members if worker in self._ages}
        assert world.members == naive_placements(members, survivors, order), "I2"
        self._root(world, members)
        self._who_is_in(before, after, members)
        if any(tick is not None for tick in self._ended.get(self.generation, [])):
            self._planned_at = now if self._ended[self.generation][-1] is not None else self._planned_at
        self._grow_older(members)
        self._joined.update((worker, world.generation) for worker in members)
        self.world = world
        self.reached["world"] += 1

    def _discard_rejected(self, after: Membership) -> None:
        """Forget commits that the core uses no more, because members differ in them."""
        for worker, commit in list(self._held.items()):
            if commits.is_rejected(after, commit):
                previous = self._previous.get(worker)
                self._held[worker] = None if commits.is_rejected(after, previous) else previous
                self.reached["rejected commit"] += 1

    def _root(self, world: t.World, members: list[t.WorkerId]) -> None:
        held = [self._held.get(worker) for worker in members]
        best = max((commit for commit in held if commit is not None), default=None)
        assert world.root == held.index(best), "I3: the root is the oldest that holds the newest commit"
        if world.line is not None:
            assert not world.lacking + world.near, "I19: nobody gets the state of a sharded job from the root"
            return
        if best is None:
            assert not self._committed, "I3: never silently from scratch"
        lacking = {rank for rank in range(world.size) if rank != world.root and (best is None or held[rank] != best)}
        assert world.lacking == tuple(sorted(lacking)), "I3: all others need the state, and nobody else"

    def _who_is_in(self, before: Membership, after: Membership, members: list[t.WorkerId]) -> None:
        draining = [worker for worker in members if after.workers[worker].draining]
        if draining:
            assert len(draining) == 1, "I5: no leaving worker in a world"
            held = [(self._held.get(worker) or (0, 0), worker in draining) for worker in members]
            assert max(held)[1], "I5: but for the only holder of the newest commit"
            assert len([1 for commit, _ in held if commit == max(held)[0]]) == 1
            self.reached["postponed leave"] += 1
        hosts = {worker.host for worker in members}
        assert not any(hosts.issuperset(link) for link in self._cut), "I20: a world with a cut link"
        left_out = [w for w in after.workers.values() if w.ready is not None and not w.draining and not w.gone]
        reads = self._can_read(after, hosts)  # a host without a link to all shards does not join those that have one
        apart = [
            w.id
            for w in left_out
            if self._is_apart(w.id, hosts) or (reads and not self._can_read(after, {*hosts, w.id.host}))
        ]
        most = after.policy.fitting(len(members) + self._most_together([w.id for w in left_out if w.id not in apart]))
        assert len(members) == most, "I6: who is READY joins"
        self.reached["incomplete group"] += len(left_out) > len(apart) and len(members) != after.policy.max_np
        if apart and not draining:
            self._is_the_largest(before, after, members, apart)

    def _most_together(self, workers: list[t.WorkerId]) -> int:
        """Return how many of these workers can be in one world, as far as links are known to be cut."""
        hosts = sorted({worker.host for worker in workers})
        parts = [{host for place, host in enumerate(hosts) if chosen >> place & 1} for chosen in range(1 << len(hosts))]
        whole = [part for part in parts if not any(part.issuperset(link) for link in self._cut)]
        return max(sum(worker.host in part for worker in workers) for part in whole)

    def _is_the_largest(
        self, before: Membership, after: Membership, members: list[t.WorkerId], apart: list[t.WorkerId]
    ) -> None:
        """Check that no larger part of the READY workers could have been the world, whose hosts all have links, and
        that has the job's state. In a sharded job, that a largest part can read a commit is more important."""
        ready = [*members, *apart]
        hosts = sorted({worker.host for worker in ready})
        held = {worker: self._held.get(worker) or t.CommitId(0, 0) for worker in ready}
        decides = {worker for worker in ready if self._had_the_state(before, worker)}
        if not decides and not after.shards.layouts:
            decides = {worker for worker in ready if held[worker] == max(held.values())}
        best = (
            self._can_read(after, {worker.host for worker in members}),
            not decides or not decides.isdisjoint(members),
        )
        for chosen in range(1, 1 << len(hosts)):
            part = {host for place, host in enumerate(hosts) if chosen >> place & 1}
            if self._can_talk(part) and not any(self._can_talk({*part, host}) for host in hosts if host not in part):
                inside = [worker for worker in ready if worker.host in part]
                found = self._can_read(after, part), not decides or not decides.isdisjoint(inside)
                size = before.policy.fitting(len(inside))
                assert (*found, size) <= (*best, len(members)), f"I20: {size} workers of {part} are better: {found}"
        self.reached["a part"] += 1
        self.reached["a part of several"] += len(self._cut) > 1

    def _can_talk(self, part: set[str]) -> bool:
        return not any(part.issuperset(link) for link in self._cut)

    def _can_read(self, m: Membership, part: set[str]) -> bool:
        """Return True if a part of a sharded job reaches all shards of a commit."""
        if not m.shards.layouts:
            return True
        behind = {host for link in self._cut if not part.isdisjoint(link) for host in link} - part
        near = {host.name for host in m.hosts.values() if host.agent == "joined"} - behind
        copies = {(slot_id, commit) for host in near for slot_id, commit in m.hosts[host].kept}
        for slot_id, slot in m.slots.items():
            if slot_id.host in near:
                copies |= {(slot_id, commit) for commit in (slot.retained, slot.previous) if commit is not None}
        for layout in m.shards.layouts:
            for commit in {commit for _, commit in copies if commit.generation == layout.generation}:
                found = {digest for slot_id, digest in layout.digests if (slot_id, commit) in copies}
                if found == {digest for _, digest in layout.digests}:
                    return True
        return False

    def _had_the_state(self, before: Membership, worker: t.WorkerId) -> bool:
        """Return True if a READY worker was in the last world, and had the job's state there."""
        known, held = before.workers.get(worker), self._held.get(worker)
        if known is None or held is None or not known.keeps or not 0 < known.joined == before.generation:
            return False
        return worker not in self._behind and (not known.lacked or held.generation == before.generation)

    def _grow_older(self, members: list[t.WorkerId]) -> None:
        self._ages = {worker: self._ages[worker] for worker in members if worker in self._ages}
        for worker in members:
            if worker not in self._ages:
                self._ages[worker] = self._next_age
                self._next_age += 1

    # ------------------------------------------------------------------------------------------- starts and ends

    def _start(self, after: Membership, worker: t.WorkerId, now: float) -> None:
        assert worker.slot_id not in self._living, "two workers in one slot"
        assert worker.incarnation == self._incarnations.get(worker.slot_id, 0) + 1
        self._incarnations[worker.slot_id] = worker.incarnation
        self._living[worker.slot_id] = worker
        host = after.hosts[worker.host]
        assert host.agent == "joined"
        assert worker.slot < host.slots
        self._respect_cooldown(after, host, now)
        is_well = after.policy.health_check is None or self._health.get(worker.host) == "well"
        assert is_well, "I5: nothing starts on a host that is not known to be well"
        self.reached["start"] += 1

    def _respect_cooldown(self, after: Membership, host: Host, now: float) -> None:
        """Check I5: nothing starts on a host in cooldown, unless the other hosts cannot provide min_np. Slots that fail
        repeatedly, and starts requested a long time ago, do not count."""
        until = self._notices.get(host.name, now)
        if until == inf:
            holds = any(slot_id.host == host.name for slot_id, _ in commits.awaited(after))
            assert holds, "I17: nothing starts on a host between its notice and the end of its agent"
            self.reached["used once more"] += 1
            return
        assert until <= host.cooldown_until or until <= now, "I17: a host with a preemption notice is in cooldown"
        if host.cooldown_until <= now:
            return
        self.reached["notice gave way"] += until > now
        elsewhere = 0
        for other in after.hosts.values():
            usable = other.slots and not other.draining and other.cooldown_until <= now
            asked_at = other.checked_at if other.health == "checking" else now
            asked_at = other.reported_at if other.agent == "asked" else asked_at
            usable = usable and not self._too_late(after, asked_at, now)
            for index in range(other.slots_ever):
                slot = after.slots.get(t.SlotId(other.name, index))
                worker = after.workers.get(slot.worker) if slot and slot.worker else None
                hopeless = slot is not None and slot.failures >= FAILURES_IN_A_ROW
                if worker is not None:
                    is_new = worker.started_at == now and other.cooldown_until > now
                    hopeless = worker.booting and (hopeless or self._too_late(after, worker.started_at, now))
                    hopeless = hopeless or self._waits_apart(after, worker)
                    elsewhere += not (worker.draining or worker.gone or is_new or hopeless)
                    elsewhere += is_restarting(after, worker)
                elif slot is not None and slot.finished:
                    elsewhere += 1
                else:
                    elsewhere += bool(usable) and index < other.slots and not hopeless
        holds = any(slot.retained is not None for slot_id, slot in after.slots.items() if slot_id.host == host.name)
        holds = holds or bool(host.kept)
        assert elsewhere < after.policy.fewest(after.generation) or (holds and self._awaits_retained(after)), "I5"
        self.reached["cooldown gave way"] += 1

    def _too_late(self, after: Membership, asked_at: float, now: float) -> bool:
        """Return True if half of the time-out is over since ``asked_at``, or since the job began to wait."""
        if isinstance(after.phase, Waiting):
            asked_at = min(asked_at, after.phase.since)
        limit_s = after.policy.elastic_timeout_s if self.generation else after.policy.start_timeout_s
        return now >= asked_at + limit_s / 2

    def _awaits_retained(self, after: Membership) -> bool:
        return isinstance(after.phase, Waiting) and after.phase.retained_since is not None

    def _hold(self, before: Membership, after: Membership, generation: int, now: float) -> None:
        assert generation == self.generation
        assert generation not in self._ended
        draining = any(w.draining for w in after.workers.values() if w.joined == generation and not w.gone)
        ready = sum(w.ready is not None and not (w.draining or w.gone) for w in after.workers.values())
        assert draining or ready, "I6: newcomers cause an interrupt only when they are ready"
        size = sum(w.joined == generation and not w.gone for w in after.workers.values())
        assert draining or after.policy.fitting(size + ready) > size, "I6: newcomers that complete no group"
        distance_s = after.policy.min_interrupt_distance_s
        assert draining or self._planned_at is None or now >= self._planned_at + distance_s, "I6: minimum distance"
        self.reached["hold"] += 1
        self.reached["drain"] += draining

    def _end(self, before: Membership, generation: int, at_tick: int | None, now: float) -> None:
        assert generation == self.generation, "I1: only the present generation is ended"
        ends = self._ended.setdefault(generation, [])
        assert None not in ends, "END now is sent once"
        assert at_tick is None or not ends, "END at a tick comes first, and once"
        if at_tick is not None:
            phase = before.phase
            assert isinstance(phase, Running)
            assert phase.hold_since is not None, "END at a tick ends a hold"
            self.reached["interrupt"] += 1
        else:
            self.reached["escalation" if ends else "failure"] += 1
        ends.append(at_tick)

    def _verdict(self, before: Membership, after: Membership, worker: t.WorkerId, generation: int, now: float) -> None:
        assert generation == self.generation
        assert None not in self._ended.get(generation, []), "no verdict OWN on a generation that has failed"
        here = [w for w in after.workers.values() if w.joined == generation]  # a suspect may be stopped at once
        first = min(w.suspect_at for w in here if w.suspect_at is not None)
        proof_at = first + after.policy.failure_grace_s
        if self._stopped:
            return  # no other world follows, so the error of a suspect is shown in any case
        assert now >= proof_at
        unproven = [w for w in here if not w.gone and w.reported_at < proof_at]
        assert all(w.suspect_at == first for w in unproven), "OWN needs proof that all others live"
        self.reached["verdict"] += 1
