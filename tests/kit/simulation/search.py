"""Exhaustive search of the core: *all* orders of events of a small job, breadth-first, on the real ``step``.

Only what is around the core is modelled here: agents, the memory of hosts, and workers as far as the core can see them.
A message on its way needs no state of its own: a message to the core that is late is a worker that acts late, and an
order that is late is a worker that still acts without it. All that may happen is an action; each has its budget if it
is a fault. Time passes only to ``next_deadline``. That is free when nothing else can happen; a time limit that ends
while an answer is on its way costs one of ``late``.

A state is known if its key is known: core, environment and checker without what no decision reads (texts, figures,
process numbers), with times from now on and generations counted from the newest one. ``Search.sample`` proves this on
samples: different states with the same key must have the same successors.
"""

from __future__ import annotations

import marshal
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Any, NamedTuple

from elasticstate.core import types as t
from elasticstate.core.policy import LEASE_MARGIN, Policy
from elasticstate.core.slots import FAILURES_IN_A_ROW, lease_s
from elasticstate.core.state import (
    Failure,
    Finishing,
    Forming,
    Host,
    Membership,
    Over,
    Running,
    Slot,
    Stopping,
    Together,
    Waiting,
    Worker as KnownWorker,
)
from elasticstate.core.step import Transition, new_membership, next_deadline, step
from tests.kit.policy import policy_of
from tests.kit.simulation.invariants import Checker, each

NOW = -9  # END at once
_MANY = 100  # failures: more than there can be
_OLD_S = 100.0  # no decision of these jobs compares with an older time


_ABOUT_A_GENERATION = (t.First, t.Gate, t.HoldAnswer, t.GenerationFailure)


class Budget(NamedTuple):
    """The number of times that each fault may happen. A host may be lost with its memory, or its agent alone."""

    kills: int = 0  # of workers
    losses: int = 0  # of agents, alone or with the memory of their hosts
    crashes: int = 9  # of both kinds together
    late: int = 0
    freezes: int = 0  # a worker stands still until it is killed
    errors: int = 0  # a worker raises an exception
    cuts: int = 0  # a host is unreachable for the driver
    notices: int = 0  # a host has a preemption notice
    removals: int = 0  # discovery removes a host
    stops: int = 0  # a signal stops the job
    links: int = 0  # the hosts reach the driver, but not each other

    @property
    def faults(self) -> float:
        """The number of faults that are left."""
        return min(self.crashes, self.kills + self.losses) + sum(self[3:])


@dataclass(frozen=True)
class Bounds:
    """A small job: its hosts with their slots, its faults, and what is needed to find a mutant of the core."""

    hosts: tuple[int, ...]
    budget: Budget
    min_np: int = 1
    max_np: int | None = None
    ticks: int = 1  # of each generation, then the exit gate
    policy: tuple[tuple[str, Any], ...] = ()
    twice: bool = False  # each step is made twice, for I8
    symmetric: bool = False  # states that differ in an exchange of slots of a host are one

    def make_policy(self) -> Policy:
        values: dict[str, Any] = {
            "start_timeout_s": 20.0,
            "elastic_timeout_s": 20.0,
            "regroup_timeout_s": 4.0,
            "failure_grace_s": 1.0,
            "drain_timeout_s": 5.0,
            "driver_timeout_s": 4.0,
            "heartbeat_timeout_s": 1.0,
            "stop_timeout_s": 1.0,
            "join_window_s": 0.0,
            "min_interrupt_distance_s": 0.0,
            "preemption_cooldown_s": 3.0,
            "preemption_window_s": 0.0,
            "cooldown_range_s": (3.0, 3.0),
            "waiting_notice_s": inf,
            "no_tick_notice_s": inf,
            "collective_timeout_s": None,
            "max_no_progress": _MANY,
            **dict(self.policy),
        }
        return policy_of(sum(self.hosts), self.min_np, self.max_np, **values)


class Worker(NamedTuple):
    """A process. ``at``: boot, ready, in (a world), gate, frozen, or dead, when its exit is not reported yet."""

    incarnation: int
    at: str = "boot"
    generation: int = 0
    told: int = -1  # ticks that the core knows of
    end: int | None = None  # END of its generation: a tick, or NOW
    left: bool = False  # it has found the generation broken by itself
    hold: int = 0  # the number of a hold that it has not answered
    answered: int | None = None  # its ticks in the answer to the present hold
    order: str = ""  # open, leave, stop or own
    raised: bool = False  # an exception of its own waits for the verdict
    code: int | None = None
    signal: int | None = None


class Group(NamedTuple):
    """A generation: the ticks of each member, -1 before sync and -2 if it was dead, and the members whose sockets are
    closed."""

    ticks: dict[t.SlotId, int]
    cut: frozenset[t.SlotId]

    def made(self, generation: int) -> t.CommitId | None:
        fewest = min(self.ticks.values())
        return t.CommitId(generation, fewest) if fewest >= 0 else None


class World:
    """All of a job: the core, its checker, and what is really there."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.m = new_membership(bounds.make_policy())
        self.checker = Checker()
        self.now = 0.0
        self.budget = bounds.budget
        self.hosts = tuple(t.HostSlots("ab"[index], slots) for index, slots in enumerate(bounds.hosts))
        self.slot_ids = tuple(t.SlotId(host.name, slot) for host in self.hosts for slot in range(host.slots))
        self.named = frozenset(host.name for host in self.hosts)
        self.agents: dict[str, str] = {}  # asked, up, stopping, lost; cut, away: unreachable, and the core knows it
        self.workers: dict[t.SlotId, Worker] = {}
        self.memory: dict[t.SlotId, t.CommitId] = {}
        self.reported: dict[t.SlotId, t.CommitId] = {}  # that are in memory, as far as the core knows
        self.groups: dict[int, Group] = {}
        self.made: t.CommitId | None = None  # the newest commit that all members of a generation have sealed
        self.waits_since: float | None = None  # for a retained commit
        self.dies_at: dict[str, float] = {}  # when the workers of an unreachable host have stopped
        self.is_parted = False  # the hosts cannot reach each other
        self.beaten = False  # the workers have shown that they live since time has passed
        self.transition: Transition | None = None
        self.probes: tuple[t.LinksProbed, ...] = ()  # answers of agents in the present step

    def copy(self) -> World:
        other = object.__new__(World)
        other.__dict__.update(self.__dict__)
        for name in ("agents", "workers", "memory", "reported", "groups", "dies_at"):
            other.__dict__[name] = self.__dict__[name].copy()
        other.checker = _copied(self.checker)
        return other

    # ------------------------------------------------------------------------------------------------- what may happen

    def actions(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        """Yield all that may happen now: a text, and a function that lets it happen to a copy."""
        if isinstance(self.m.phase, Over):
            return
        if not self.m.hosts:
            yield "discovery", lambda w: w.tell(t.HostsDiscovered(w.hosts))
            return
        answers = [*self._agents(), *(action for slot_id in list(self.workers) for action in self._worker(slot_id))]
        answers += [*self._beats(), *self._links()]
        answers = self._representative(answers)
        yield from answers
        deadline = next_deadline(self.m)
        if deadline is not None and (not answers or self.budget.late):
            yield f"time {deadline:g}", lambda w: w._time(deadline, bool(answers))
        yield from self._faults()

    def _representative(
        self, answers: list[tuple[str, Callable[[World], None]]]
    ) -> list[tuple[str, Callable[[World], None]]]:
        """Return one action instead of several whose order makes no difference. All others come after it.

        Only if no fault may come between them: a member that leaves its ended generation, unless it is the last one; a
        sync that nobody can see; and all exits behind the open gate.
        """
        if self.budget.faults or self.budget.late:
            return answers
        answers.sort(key=lambda answer: answer[0])
        if type(self.m.phase) is Finishing:
            return answers[:1]
        leave = []
        for slot_id, worker in sorted(self.workers.items()):
            is_reachable = self.agents.get(slot_id.host) == "up"
            if worker.at == "in" and self.groups[worker.generation].ticks[slot_id] == -1 and self._is_fair(worker):
                what = f"{slot_id} ticks"
                if any(name == what for name, _ in answers):
                    return [answer for answer in answers if answer[0] == what]
            if worker.at in ("in", "gate") and worker.end == NOW and worker.generation == self.m.generation:
                known = self.m.workers.get(t.WorkerId(*slot_id, worker.incarnation))
                if is_reachable and not worker.order and known is not None and not (known.gone or known.late):
                    leave.append(f"{slot_id} ready")
        if len(leave) > 1:
            return [answer for answer in answers if answer[0] == leave[0]]
        return answers

    def _agents(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        for host, state in self.agents.items():
            if state == "asked":
                yield f"agent of {host} joins", lambda w, host=host: w._joins(host)  # type: ignore[misc]
            elif state in ("stopping", "lost"):
                yield f"agent of {host} is gone", lambda w, host=host: w._agent_gone(host)  # type: ignore[misc]
            elif state == "cut":
                yield f"{host} is unreachable", lambda w, host=host: w._unreachable(host)  # type: ignore[misc]
            elif state == "away":
                yield f"{host} is back", lambda w, host=host: w._returns(host)  # type: ignore[misc]

    def _worker(self, slot_id: t.SlotId) -> Iterator[tuple[str, Callable[[World], None]]]:
        worker = self.workers[slot_id]
        reaches = self.agents.get(slot_id.host) == "up"
        if worker.at == "in" and self._may_tick(slot_id, worker):
            if self._is_fair(worker) and self.groups[worker.generation].ticks[slot_id] >= 0:
                yield f"{slot_id} ticks and reports", lambda w: w._tick(slot_id, reports=True)
            else:
                yield f"{slot_id} ticks", lambda w: w._tick(slot_id)
        if not reaches:
            if worker.at == "in" and self._may_leave(slot_id, worker):
                yield f"{slot_id} leaves", lambda w: w._leaves(slot_id)
            return
        if worker.at == "dead":
            yield f"{slot_id} exited", lambda w: w._exited(slot_id)
        elif worker.at == "frozen":
            yield f"{slot_id} is unresponsive", lambda w: w._unresponsive(slot_id)
        elif worker.order in ("stop", "own") or (worker.order, worker.at) in (("leave", "ready"), ("open", "gate")):
            yield f"{slot_id} ends", lambda w: w._ends(slot_id)
        elif worker.at == "boot":
            yield f"{slot_id} ready", lambda w: w._ready(slot_id)
        elif worker.at in ("in", "gate"):
            yield from self._member(slot_id, worker)

    def _member(self, slot_id: t.SlotId, worker: Worker) -> Iterator[tuple[str, Callable[[World], None]]]:
        ticks = self.groups[worker.generation].ticks[slot_id]
        is_of_use = worker.end != NOW or self.bounds.budget.late or self.bounds.budget.losses or self.bounds.budget.cuts
        if worker.told < ticks and ticks >= 1 and is_of_use:  # else READY or the exit tells as much
            yield f"{slot_id} reports", lambda w: w._report(slot_id)
        if worker.hold:
            yield f"{slot_id} answers", lambda w: w._answer(slot_id)
        has_ended = worker.end == NOW or worker.left or worker.end == ticks
        if worker.at == "in" and not has_ended and not worker.raised:
            is_held = worker.answered is not None and worker.end is None and ticks > worker.answered
            is_short = max(self.groups[worker.generation].ticks.values()) == self.bounds.ticks
            if is_short and worker.told == ticks == self.bounds.ticks and not is_held:
                yield f"{slot_id} gate", lambda w: w._gate(slot_id)
            if self.groups[worker.generation].cut - {slot_id}:
                yield f"{slot_id} finds it broken", lambda w: w._broken(slot_id)
        if has_ended and (worker.at == "in" or worker.end == NOW):
            if worker.end != NOW and worker.raised:
                return
            yield f"{slot_id} ready", lambda w: w._ready(slot_id)

    def _beats(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        if not self.beaten and any(worker.suspect_at is not None for worker in self.m.workers.values()):
            yield "all live", World._beat

    def _links(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        if self.is_parted:
            yield "the hosts reach each other again", World._unite
            for slot_id, worker in self.workers.items():
                stands = worker.at == "in" and self.agents.get(slot_id.host) == "up" and self._is_split(worker)
                if stands and worker.end != NOW and not self.m.workers[self._id(slot_id)].still_s:
                    yield f"{slot_id} stands still", lambda w, slot_id=slot_id: w._stand(slot_id)  # type: ignore[misc]

    def _is_split(self, worker: Worker) -> bool:
        """Return True if the worker's world is on hosts that cannot reach each other."""
        return self.is_parted and len({slot_id.host for slot_id in self.groups[worker.generation].ticks}) > 1

    def _faults(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        budget = self.budget
        living = [
            slot_id
            for slot_id, worker in self.workers.items()
            if worker.at not in ("dead", "frozen") and worker.order != "stop"
        ]
        up = [host for host, state in self.agents.items() if state == "up"]
        if budget.kills and budget.crashes:
            for slot_id in living:
                yield f"KILL {slot_id}", lambda w, slot_id=slot_id: w._kill(slot_id)  # type: ignore[misc]
        if budget.losses and budget.crashes:
            for host in up:
                yield f"LOSE agent of {host}", lambda w, host=host: w._lose(host, False)  # type: ignore[misc]
                if not isinstance(self.m.phase, Finishing) and any(slot_id.host == host for slot_id in self.memory):
                    yield f"LOSE host {host}", lambda w, host=host: w._lose(host, True)  # type: ignore[misc]
        if budget.freezes:
            for slot_id in living:
                yield f"FREEZE {slot_id}", lambda w, slot_id=slot_id: w._freeze(slot_id)  # type: ignore[misc]
        if budget.errors:
            for slot_id in living:
                worker = self.workers[slot_id]
                if worker.at == "in" and not worker.raised and not worker.left and worker.end != NOW:
                    yield f"ERROR in {slot_id}", lambda w, slot_id=slot_id: w._raises(slot_id)  # type: ignore[misc]
        if budget.cuts:
            for host in up:
                yield f"CUT {host}", lambda w, host=host: w._cut_off(host)  # type: ignore[misc]
        if budget.notices:
            for host in up:
                if not self.m.hosts[host].draining:
                    yield f"NOTICE {host}", lambda w, host=host: w._notice(host)  # type: ignore[misc]
        if budget.removals and len(self.named) > 1:
            for host in self.named:
                yield f"REMOVE {host}", lambda w, host=host: w._discovery(w.named - {host})  # type: ignore[misc]
        if len(self.named) < len(self.hosts):
            yield "ADD all hosts", lambda w: w._discovery(frozenset(host.name for host in w.hosts))
        if budget.links and len(up) > 1:
            yield "PART the hosts", World._part
        if budget.stops:
            yield "STOP", lambda w: w._stop()

    # --------------------------------------------------------------------------------------------------------- the core

    def tell(self, *events: t.Event) -> None:
        """Let the core take one step, check it, and carry out its effects."""
        event = events[0] if len(events) == 1 else t.Several(events)
        before = self.m
        self.transition = transition = step(before, event, self.now)
        if self.bounds.twice:
            assert step(before, event, self.now) == transition, "I8: the same event has two results"
        self.checker.see(before, event, self.now, transition)
        self._old_messages_have_no_effect(before, event)
        self.m = transition.next
        waits = isinstance(self.m.phase, Waiting) and self.m.phase.retained_since is not None
        self.probes = ()
        for effect in transition.effects:
            self._carry_out(effect)
        if not waits:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = self.now
        assert (
            isinstance(self.m.phase, Over)
            or next_deadline(self.m) is not None
            or self.workers
            or self.agents
            or (not self.named)
        ), "I7: nothing is awaited, and no time limit runs"
        if self.probes:
            self.tell(*self.probes)  # the time that they take makes no difference

    def _old_messages_have_no_effect(self, before: Membership, event: t.Event) -> None:
        """Check I1: what a worker says about an older generation than the newest one changes no decision."""
        assert self.transition is not None
        for part in each(event):
            body = part.body if isinstance(part, t.FromWorker) else None
            if isinstance(body, t.CommitSealed):
                continue
            if not isinstance(body, _ABOUT_A_GENERATION) or body.generation >= before.generation:
                return
        after, effects, _ = self.transition
        changes = [effect for effect in effects if not isinstance(effect, t.Note)]
        has_effect = bool(changes) or after.phase != before.phase
        assert not has_effect, "I1: a message about an older generation has an effect"

    def _carry_out(self, effect: t.Effect) -> None:
        match effect:
            case t.StartAgent(host):
                self.agents[host] = "asked"
            case t.StopAgent(host) if self.agents.get(host) in ("up", "asked"):
                self._clear(host, with_memory=True)
                self.agents[host] = "stopping"
            case t.StartWorker(worker) if self.agents.get(worker.host) == "up":
                self.workers[worker.slot_id] = Worker(worker.incarnation)
            case t.World():
                self._enter(effect)
            case t.StopWorker(worker, kill=kill):
                self._order(worker, order="stop", signal=9 if kill else 15)
            case t.Leave(worker):
                self._takes_nothing_with_it(worker)
                self._order(worker, order="leave")
            case t.ConfirmOwnError(worker):
                self._order(worker, order="own")
            case t.Sever(worker, generation):
                if self.workers[worker.slot_id].generation == generation:
                    self._order(worker, end=NOW)
            case t.Hold(generation, number):
                self._order_all(generation, hold=number, answered=None)
            case t.Release(generation):
                self._order_all(generation, hold=0, answered=None)
            case t.End(generation, at_tick):
                self._order_all(generation, end=NOW if at_tick is None else at_tick)
            case t.OpenGate(generation):
                self._order_all(generation, order="open")
            case t.Terminate(generation):
                self._order_all(generation, order="stop", signal=15)
            case t.ProbeLinks(number, peers):
                self.probes = tuple(t.LinksProbed(host, number, its if self.is_parted else ()) for host, its in peers)

    def _order(self, worker: t.WorkerId, **changes: Any) -> None:
        known = self.workers.get(worker.slot_id)
        if known is None or known.incarnation != worker.incarnation or known.at == "dead":
            return
        if self.agents.get(worker.host) == "up":
            self.workers[worker.slot_id] = known._replace(**changes)

    def _order_all(self, generation: int, **changes: Any) -> None:
        for slot_id, worker in list(self.workers.items()):
            if worker.generation == generation and worker.at in ("in", "gate"):
                self._order(t.WorkerId(*slot_id, worker.incarnation), **changes)

    def _enter(self, world: t.World) -> None:
        self._nothing_made_is_lost(world)
        ticks: dict[t.SlotId, int] = {}
        cut = set()
        for member in world.members:
            slot_id = member.worker.slot_id
            known = self.workers.get(slot_id)
            is_there = known is not None and known.incarnation == member.worker.incarnation and known.at == "ready"
            if is_there and self.agents.get(slot_id.host) == "up":
                assert known is not None
                self.workers[slot_id] = Worker(known.incarnation, "in", world.generation)
                ticks[slot_id] = -1
            else:
                ticks[slot_id] = -2
                cut.add(slot_id)
        self.groups[world.generation] = Group(ticks, frozenset(cut))
        self._forget_groups()

    def _forget_groups(self) -> None:
        living = {w.generation for w in self.workers.values() if w.at in ("in", "gate", "frozen")}
        for generation in [g for g in self.groups if g not in living and g != self.m.generation]:
            del self.groups[generation]

    def _nothing_made_is_lost(self, world: t.World) -> None:
        """Check I3: a commit of all members is the start of the next world, if it is in the memory of a slot that the
        core knows of, unless the core has waited for the slot for --regroup-timeout."""
        root = world.members[world.root].worker
        made, held, known = self.made, self.memory.get(root.slot_id), self.workers.get(root.slot_id)
        if made is None or (held is not None and held >= made):
            return
        if known is None or known.incarnation != root.incarnation or known.at != "ready":
            return  # the root has died, and the core cannot know it yet
        left = [
            slot_id
            for slot_id, commit in self.reported.items()
            if commit >= made and self.memory.get(slot_id, commit) >= made and not self.m.hosts[slot_id.host].draining
        ]
        has_waited = self.waits_since is not None and self.now >= self.waits_since + self.m.policy.regroup_timeout_s
        assert not left or has_waited, f"I3: a commit of all is lost: {made}, retained by {left}"
        self.made = None

    def _takes_nothing_with_it(self, leaver: t.WorkerId) -> None:
        """Check I15: a worker that leaves has no commit that the staying ones lack."""
        commit, worker = self.memory.get(leaver.slot_id), self.workers.get(leaver.slot_id)
        if commit is None or worker is None or 0 < worker.generation < self.m.generation:
            return
        if set(self.agents.values()) - {"up", "asked"} or any(w.at == "dead" for w in self.workers.values()):
            return  # a death that the core cannot know of
        stay = [s for s, w in self.workers.items() if s != leaver.slot_id and w.order not in ("leave", "stop")]
        held = [self.memory[slot_id] for slot_id in stay if slot_id in self.memory]
        assert not held or max(held) >= commit, "I15: the drained worker takes a commit with it"

    # ------------------------------------------------------------------------------------------------- agents and time

    def _joins(
        self, host: str, workers: tuple[tuple[t.WorkerId, int], ...] = (), more: tuple[t.Event, ...] = ()
    ) -> None:
        self.agents[host] = "up"
        held = {slot_id: commit for slot_id, commit in self.memory.items() if slot_id.host == host}
        self.reported = {slot_id: c for slot_id, c in self.reported.items() if slot_id.host != host} | held
        commits = tuple((slot_id.slot, commit) for slot_id, commit in sorted(held.items()))
        self.tell(t.AgentJoined(host, commits, workers), *more)

    def _agent_gone(self, host: str) -> None:
        del self.agents[host]
        self.tell(t.AgentLost(host, "is gone"))

    def _time(self, deadline: float, is_late: bool) -> None:
        if is_late:
            self.budget = self.budget._replace(late=self.budget.late - 1)
        self.now, self.beaten = deadline, False
        for host, at in list(self.dies_at.items()):
            if self.now >= at and self.agents.get(host) in ("cut", "away"):
                self._clear(host, with_memory=False)
                del self.dies_at[host]
        self.tell(t.TimePassed())

    def _beat(self) -> None:
        self.beaten = True
        beats = [
            t.FromWorker(
                t.WorkerId(*slot_id, worker.incarnation),
                t.Stamp(t.Place.TRAIN, worker.generation, max(0, worker.told), None),
            )
            for slot_id, worker in self.workers.items()
            if worker.at in ("in", "gate") and self.agents.get(slot_id.host) == "up"
        ]
        self.tell(*(beats or [t.TimePassed()]))

    def _clear(self, host: str, *, with_memory: bool) -> None:
        """End all processes of a host. Nobody reports their exits."""
        for slot_id in [slot_id for slot_id in self.workers if slot_id.host == host]:
            self._dies(slot_id)
            del self.workers[slot_id]
        if with_memory:
            for slots in (self.memory, self.reported):
                for slot_id in [slot_id for slot_id in slots if slot_id.host == host]:
                    del slots[slot_id]
        self._forget_groups()

    def _dies(self, slot_id: t.SlotId) -> None:
        worker = self.workers[slot_id]
        if worker.at in ("in", "gate", "frozen"):
            self._closes(slot_id, worker.generation)

    def _closes(self, slot_id: t.SlotId, generation: int) -> None:
        group = self.groups.get(generation)
        if group is not None and slot_id in group.ticks:
            self.groups[generation] = group._replace(cut=group.cut | {slot_id})

    # -------------------------------------------------------------------------------------------------------- workers

    def _id(self, slot_id: t.SlotId) -> t.WorkerId:
        return t.WorkerId(*slot_id, self.workers[slot_id].incarnation)

    def _change(self, slot_id: t.SlotId, **changes: Any) -> Worker:
        self.workers[slot_id] = changed = self.workers[slot_id]._replace(**changes)
        return changed

    def _may_tick(self, slot_id: t.SlotId, worker: Worker) -> bool:
        """Return True if the worker may end a tick: its collective has all members. After the last one of the script
        there is one more only if all leave there: then the script was longer. A tick that ends while END is on its way
        differs in nothing from one that ended before."""
        group = self.groups[worker.generation]
        ticks = group.ticks[slot_id]
        if worker.left or worker.raised or worker.end in (ticks, NOW) or type(self.m.phase) is Finishing:
            return False
        if self._is_split(worker) and all(other <= ticks for other in group.ticks.values()):
            return False  # a collective that has ended for one member ends for all
        if worker.answered is not None and worker.end is None and ticks > worker.answered:
            return False
        if ticks >= self.bounds.ticks:
            others = (self.workers.get(member) for member in group.ticks)
            in_gate = any(w is not None and w.at == "gate" and w.generation == worker.generation for w in others)
            if in_gate or worker.end is None or worker.end <= ticks:
                return False
        return all(other >= ticks for other in group.ticks.values())

    def all_is_well(self) -> bool:
        """Return True if no fault is on its way to the core."""
        is_well = all(w.at not in ("dead", "frozen") and not w.raised for w in self.workers.values())
        is_well = is_well and all(w.gone != "failed" for w in self.m.workers.values())
        return is_well and set(self.agents.values()) <= {"up", "asked", "stopping"} and not self.is_parted

    def _is_fair(self, worker: Worker) -> bool:
        """Return True if nothing can come between a tick and its report that would make a difference."""
        is_well = worker.end is None and not self.groups[worker.generation].cut and not self.budget.faults
        return is_well and self.all_is_well()

    def _tick(self, slot_id: t.SlotId, *, reports: bool = False) -> None:
        generation = self.workers[slot_id].generation
        group = self.groups[generation]
        ticks = group.ticks[slot_id] + 1
        self.groups[generation] = group = group._replace(ticks={**group.ticks, slot_id: ticks})
        self.memory[slot_id] = t.CommitId(generation, ticks)
        made = group.made(generation)
        if made is not None and (self.made is None or made > self.made):
            self.made = made
        if self.agents.get(slot_id.host) in ("cut", "away") and generation < self.m.generation:
            unseen = all(self.agents.get(member.host) in ("cut", "away") for member in group.ticks)
            assert not unseen, "I16: a world that is unreachable as a whole has trained after a newer world"
        if reports:
            self._report(slot_id)

    def _may_leave(self, slot_id: t.SlotId, worker: Worker) -> bool:
        return not worker.left and bool(self.groups[worker.generation].cut - {slot_id})

    def _leaves(self, slot_id: t.SlotId) -> None:
        """An unreachable worker finds its world broken, and waits for the next one."""
        worker = self._change(slot_id, left=True)
        self._closes(slot_id, worker.generation)

    def _ready_message(self, slot_id: t.SlotId) -> t.FromWorker:
        worker = self.workers[slot_id]
        group = self.groups.get(worker.generation)
        ticks = group.ticks[slot_id] if group is not None else 0
        name = self._id(slot_id)
        commit = self.memory.get(slot_id)
        return t.FromWorker(name, t.Ready(worker.generation, commit, None, f"{name}:1", max(0, ticks)))

    def _ready(self, slot_id: t.SlotId) -> None:
        message = self._ready_message(slot_id)
        worker = self.workers[slot_id]
        self.workers[slot_id] = Worker(worker.incarnation, "ready", worker.generation)
        if worker.generation:
            self._closes(slot_id, worker.generation)
        self._forget_groups()
        if slot_id in self.memory:
            self.reported[slot_id] = self.memory[slot_id]
        self.tell(message)

    def _report(self, slot_id: t.SlotId) -> None:
        worker = self.workers[slot_id]
        commit = t.CommitId(worker.generation, self.groups[worker.generation].ticks[slot_id])
        name = self._id(slot_id)
        self._change(slot_id, told=commit.tick)
        self.reported[slot_id] = commit
        if worker.told < 1:
            self.tell(t.FromWorker(name, t.CommitSealed(commit)), t.FromWorker(name, t.First(worker.generation)))
        else:
            self.tell(t.FromWorker(name, t.Stamp(t.Place.TRAIN, worker.generation, commit.tick, commit)))

    def _answer(self, slot_id: t.SlotId) -> None:
        worker = self.workers[slot_id]
        ticks = max(0, self.groups[worker.generation].ticks[slot_id])
        in_gate = worker.at == "gate"
        self._change(slot_id, hold=0, answered=ticks)
        self.tell(t.FromWorker(self._id(slot_id), t.HoldAnswer(worker.generation, ticks, in_gate, worker.hold)))

    def _gate(self, slot_id: t.SlotId) -> None:
        worker = self._change(slot_id, at="gate")
        self.tell(t.FromWorker(self._id(slot_id), t.Gate(worker.generation)))

    def _broken(self, slot_id: t.SlotId) -> None:
        worker = self._change(slot_id, left=True)
        self._closes(slot_id, worker.generation)
        self.tell(t.FromWorker(self._id(slot_id), t.GenerationFailure(worker.generation, True, "closed by peer")))

    def _ends(self, slot_id: t.SlotId) -> None:
        """Let a worker end as it was asked to."""
        order = self.workers[slot_id].order
        self._dies(slot_id)
        if order == "stop":
            self._change(slot_id, at="dead")
        else:
            self._change(slot_id, at="dead", code=1 if order == "own" else 0, signal=None)
        self._exited(slot_id)

    def _exited(self, slot_id: t.SlotId) -> None:
        worker, name = self.workers[slot_id], self._id(slot_id)
        del self.workers[slot_id]
        self._forget_groups()
        commit = self.memory.get(slot_id)
        if commit is not None:
            self.reported[slot_id] = commit
        commits = (commit,) if commit is not None else ()
        self.tell(t.WorkerExited(name, 1, worker.code, worker.signal, commits=commits))

    def _unresponsive(self, slot_id: t.SlotId) -> None:
        self._dies(slot_id)
        self._change(slot_id, at="dead", code=None, signal=9)
        self.tell(t.WorkerUnresponsive(self._id(slot_id), "no stamp"))

    # --------------------------------------------------------------------------------------------------------- faults

    def _kill(self, slot_id: t.SlotId) -> None:
        self.budget = self.budget._replace(crashes=self.budget.crashes - 1, kills=self.budget.kills - 1)
        self._dies(slot_id)
        self.workers[slot_id] = Worker(
            self.workers[slot_id].incarnation, "dead", self.workers[slot_id].generation, signal=9
        )

    def _lose(self, host: str, with_memory: bool) -> None:
        self.budget = self.budget._replace(crashes=self.budget.crashes - 1, losses=self.budget.losses - 1)
        self._clear(host, with_memory=with_memory)
        self.agents[host] = "lost"

    def _freeze(self, slot_id: t.SlotId) -> None:
        self.budget = self.budget._replace(freezes=self.budget.freezes - 1)
        self._change(slot_id, at="frozen")

    def _raises(self, slot_id: t.SlotId) -> None:
        self.budget = self.budget._replace(errors=self.budget.errors - 1)
        worker = self._change(slot_id, raised=True)
        self.tell(t.FromWorker(self._id(slot_id), t.GenerationFailure(worker.generation, False, "ValueError")))

    def _cut_off(self, host: str) -> None:
        self.budget = self.budget._replace(cuts=self.budget.cuts - 1)
        self.agents[host] = "cut"
        for slot_id, worker in list(self.workers.items()):
            if slot_id.host == host and worker.at in ("in", "gate"):
                self._change(slot_id, hold=0, answered=None)  # its agent ends a hold

    def _unreachable(self, host: str) -> None:
        self.agents[host] = "away"
        self.dies_at[host] = self.now + lease_s(self.m.policy) / LEASE_MARGIN
        self.tell(t.AgentLost(host, "sent no heartbeat", may_live=True))

    def _returns(self, host: str) -> None:
        self.dies_at.pop(host, None)
        living = [(slot_id, w) for slot_id, w in sorted(self.workers.items()) if slot_id.host == host]
        workers, more = [], []
        for slot_id, worker in living:
            name = self._id(slot_id)
            if worker.at in ("dead", "frozen"):
                self._dies(slot_id)
                del self.workers[slot_id]
                continue
            workers.append((name, worker.generation))
            if worker.left:
                more.append(self._ready_message(slot_id))
                self.workers[slot_id] = Worker(worker.incarnation, "ready", worker.generation)
            elif worker.at == "ready":
                more.append(self._ready_message(slot_id))
            elif worker.at == "gate":
                more.append(t.FromWorker(name, t.Gate(worker.generation)))
        self._forget_groups()
        self._joins(host, tuple(workers), tuple(more))

    def _part(self) -> None:
        self.budget, self.is_parted = self.budget._replace(links=self.budget.links - 1), True

    def _unite(self) -> None:
        self.is_parted = False

    def _stand(self, slot_id: t.SlotId) -> None:
        worker, known = self.workers[slot_id], self.m.workers[self._id(slot_id)]
        stamp = t.Stamp(t.Place.TRAIN, worker.generation, known.ticks, known.commit, still_s=1.0)
        self.tell(t.FromWorker(self._id(slot_id), stamp))

    def _notice(self, host: str) -> None:
        self.budget = self.budget._replace(notices=self.budget.notices - 1)
        self.tell(t.HostDraining(host, "SIGTERM"))

    def _discovery(self, named: frozenset[str]) -> None:
        if len(named) < len(self.named):
            self.budget = self.budget._replace(removals=self.budget.removals - 1)
        self.named = named
        self.tell(t.HostsDiscovered(tuple(host for host in self.hosts if host.name in named)))

    def _stop(self) -> None:
        self.budget = self.budget._replace(stops=self.budget.stops - 1)
        self.tell(t.StopRequested("SIGTERM"))


def _copied(checker: Checker) -> Checker:
    other = object.__new__(Checker)
    values = {
        name: value.copy() if isinstance(value, dict | set) and name != "reached" else value
        for name, value in checker.__dict__.items()
    }
    values["_ended"] = {generation: list(ends) for generation, ends in checker._ended.items()}
    other.__dict__.update(values)
    return other


# ----------------------------------------------------------------------------------------------------- canonical form


class Key:
    """The canonical form of a state: all that decisions read, and nothing else.

    Generations are numbered from the newest, without gaps, because they are only compared with each other. Counters of
    failures do not matter when nothing can fail any more: the budgets are smaller than the limits of the counters.
    """

    def __init__(self, world: World) -> None:
        self._world, self._m, self._now = world, world.m, world.now
        m = world.m
        policy = m.policy
        self._more_faults = bool(world.budget.faults) or not world.all_is_well()
        self._windows = policy.join_window_s > 0 or policy.preemption_window_s > 0
        self._distance = policy.min_interrupt_distance_s > 0
        used = {commit.generation for commit in world.memory.values()}
        used.update(commit.generation for commit in world.reported.values())
        used.update(slot.retained.generation for slot in m.slots.values() if slot.retained is not None)
        used.update(worker.joined for worker in m.workers.values())
        used.update(worker.generation for worker in world.workers.values())
        used.update(world.groups)
        used.update(commit.generation for commit in (world.made, m.ledger.highest) if commit is not None)
        used.update(w.ready.commit.generation for w in m.workers.values() if w.ready is not None and w.ready.commit)
        if m.ledger.highest is not None and self._more_faults:
            newest = m.ledger.highest.generation
            used.update(worker.first_joined for worker in m.workers.values() if worker.first_joined > newest)
        used.add(m.generation)
        used.discard(0)
        self._numbers = {generation: -place for place, generation in enumerate(sorted(used, reverse=True))}
        self._numbers[0] = 1

        self._at = {slot_id: tuple(slot_id) for slot_id in world.slot_ids}
        if world.bounds.symmetric:
            for host in {slot_id.host for slot_id in world.slot_ids}:
                slot_ids = [slot_id for slot_id in world.slot_ids if slot_id.host == host]
                slot_ids.sort(key=self._signature)
                self._at.update((slot_id, (host, place)) for place, slot_id in enumerate(slot_ids))

    def _signature(self, slot_id: t.SlotId) -> str:
        """Return a text that is the same for slots in the same situation."""
        world, m = self._world, self._m
        worker, slot = world.workers.get(slot_id), m.slots.get(slot_id)
        known = m.workers.get(slot.worker) if slot is not None and slot.worker is not None else None
        ticks = [group.ticks.get(slot_id) for _, group in sorted(world.groups.items())]
        found = (
            None if worker is None else worker._replace(incarnation=0),
            None if known is None else (known.age, known.joined, known.gone, known.ready is not None, known.in_gate),
            world.memory.get(slot_id),
            world.reported.get(slot_id),
            ticks,
            None if slot is None else (slot.failures, slot.retained),
        )
        return repr(found)

    def digest(self) -> bytes:
        return blake2b(marshal.dumps(self.value(), 0), digest_size=16).digest()

    def value(self) -> Any:
        if isinstance(self._m.phase, Over):
            return self._phase()
        return self._core(), self._around(), self._checked()

    def _since(self, at: float | None) -> float | None:
        """Return a time as seconds from now on. Times long ago are all the same."""
        if at is None:
            return None
        return -inf if at <= self._now - _OLD_S else at if at == inf else round(at - self._now, 6)

    def _until(self, at: float) -> float | None:
        return round(at - self._now, 6) if at > self._now else None

    def _generation(self, generation: int) -> int:
        return self._numbers.get(generation, 2)

    def _commit(self, commit: t.CommitId | None) -> Any:
        return None if commit is None else (self._generation(commit.generation), commit.tick)

    # ------------------------------------------------------------------------------------------------------- the core

    def _core(self) -> Any:
        m = self._m
        ledger = m.ledger
        if isinstance(m.phase, Finishing):  # no world follows
            return self._phase(), _in_order(
                (
                    *self._at[w.id.slot_id],
                    w.joined == m.generation,
                    w.gone,
                    w.booting,
                    w.draining != "",
                    w.ready is not None,
                    w.in_gate,
                )
                for w in m.workers.values()
            )
        ages = {age: place for place, age in enumerate(sorted({w.age for w in m.workers.values()}))}
        row = ledger.no_progress if m.policy.max_no_progress < _MANY else 0
        distance = (self._since(ledger.planned_at), self._since(ledger.released_at), ledger.down_since is not None)
        return (
            m.generation > 0,
            self._phase(),
            tuple(self._host(m.hosts[name]) for name in sorted(m.hosts)),
            _in_order(self._slot(slot_id, slot) for slot_id, slot in m.slots.items()),
            _in_order(self._worker(worker, ages) for worker in m.workers.values()),
            None
            if m.world is None
            else _in_order((*self._at[p.worker.slot_id], p.worker in m.workers) for p in m.world.members),
            None if m.generation else self._since(ledger.started_at),
            (ledger.ever_ready, ledger.kind, self._round(), self._since(ledger.enough_since)),
            None if ledger.highest is None else self._generation(ledger.highest.generation),
            (row, ledger.own_errors, ledger.own_error is not None),
            distance if self._distance else None,
            self._until(ledger.quiet_until),
            ledger.is_broken,
            self._links(),
        )

    def _links(self) -> Any:
        links = self._m.ledger.links
        timeout_s = self._m.policy.heartbeat_timeout_s
        next_at = links.asked_at + (0.65 if links.asked else 0.4) * timeout_s
        for_all_at = next_at if links.all_asked_at == links.asked_at else links.all_asked_at + 0.4 * timeout_s
        still = any(w.still_s for w in self._m.workers.values() if w.joined == self._m.generation)
        apart = tuple(sorted((host, self._until(until)) for host, until in links.apart.items()))
        asked = tuple(sorted(links.asked)), links.unanswered
        return tuple(sorted(links.cut)), apart, asked, self._until(next_at), self._until(for_all_at), still

    def _phase(self) -> Any:
        m = self._m
        match m.phase:
            case Waiting(since, _, retained_since):
                return "waiting", self._since(since), self._since(retained_since)
            case Forming(_, ended, at_tick, _, failure, clock, drains):
                why = _failure(failure)
                return "forming", self._generation(ended), at_tick, why, self._since(clock), drains
            case Running() as phase:
                return "running", phase.first_tick, self._since(phase.hold_since), phase.gate_since is not None
            case Stopping() as phase:
                return "stopping", self._since(phase.since), phase.is_open, _failure(phase.failure)
            case Finishing(since, failure):
                return "finishing", self._since(since), _failure(failure)
            case Together(since):
                return "together", self._since(since)
            case _:
                return "over", isinstance(m.phase, Over) and m.phase.succeeded

    def _round(self) -> Any:
        present = self._m.ledger.round
        if present is None:
            return None
        members = _in_order(self._at[p.worker.slot_id] for p in present.members)
        times = self._since(present.since), self._since(present.ends_at), self._since(present.exits_since)
        return members, *times, _failure(present.failure), bool(present.end)

    def _host(self, h: Host) -> Any:
        asked = self._since(h.reported_at) if h.agent == "asked" else None
        until = self._until(h.cooldown_until), self._until(h.gives_way_at)
        row = (
            h.deaths,
            tuple(sorted(self._at[t.SlotId(h.name, slot)] for slot in h.dead_slots)),
            h.cooldowns,
            self._since(max(h.last_death, h.cooldown_until)),
        )
        may_live = self._since(h.may_live_until)
        named = (h.name, h.order, h.slots, h.slots_ever, h.agent, bool(h.draining), asked, h.notices, may_live)
        return (*named, *until, row if self._more_faults else None)

    def _slot(self, slot_id: t.SlotId, s: Slot) -> Any:
        until = self._until(s.not_before), self._until(s.gives_way_at)
        failures = s.failures if self._more_faults else s.failures >= FAILURES_IN_A_ROW
        failed = s.failure is not None and bool(s.failure.exit_code)
        return (
            *self._at[slot_id],
            s.worker is not None,
            failures,
            *until,
            s.finished,
            failed,
            self._commit(s.retained),
        )

    def _worker(self, w: KnownWorker, ages: dict[int, int]) -> Any:
        m = self._m
        ready: Any = None
        if w.ready is not None:
            earlier = sum(o.ready_at < w.ready_at and o.age == w.age for o in m.workers.values() if o.ready is not None)
            ready = self._generation(w.ready.generation), self._commit(w.ready.commit), earlier
            ready = (*ready, self._since(w.ready_at)) if self._windows else ready
        commit = None if w.ready is not None or w.commit is None else w.commit.generation == m.generation
        suspect: Any = None
        if m.count.suspects:
            suspect = self._since(w.suspect_at), self._since(w.confirmed_at), self._since(w.reported_at), w.rank
        booting = self._since(w.started_at) if w.booting else None
        drain = self._since(w.draining_since) if w.draining and w.ready is None else None
        first = None
        if self._more_faults:
            highest = m.ledger.highest
            has_seen_a_commit = highest is not None and 0 < w.first_joined <= highest.generation
            first = True if has_seen_a_commit else self._generation(w.first_joined)
        flags = (w.late, w.lacked, w.keeps, bool(w.draining), w.gone, w.in_gate, w.uses_run, w.in_round)
        where = (*self._at[w.id.slot_id], ages[w.age], self._generation(w.joined), first)
        return (*where, *flags, ready, booting, suspect, drain, w.answer, commit)

    # ------------------------------------------------------------------------------------------- what is really there

    def _around(self) -> Any:
        world, made = self._world, self._world.made
        rest = (
            tuple(world.budget),
            tuple(sorted(world.agents.items())),
            _in_order(self._process(slot_id, worker) for slot_id, worker in world.workers.items()),
            tuple(sorted((host, self._since(at)) for host, at in world.dies_at.items())),
            tuple(sorted(world.named)),
            world.beaten,
            world.is_parted,
        )
        groups = tuple(
            (
                self._generation(generation),
                _in_order((*self._at[slot_id], n, slot_id in group.cut) for slot_id, n in group.ticks.items()),
            )
            for generation, group in sorted(world.groups.items())
        )
        if type(self._m.phase) is Finishing:
            return rest
        if isinstance(self._m.phase, Stopping):
            return *rest, groups
        return (
            *rest,
            groups,
            _in_order((*self._at[slot_id], self._commit(commit)) for slot_id, commit in world.memory.items()),
            _in_order(
                (*self._at[slot_id], self._commit(commit) if made is not None and commit >= made else None)
                for slot_id, commit in world.reported.items()
            ),
            self._commit(made),
            self._since(world.waits_since),
        )

    def _process(self, slot_id: t.SlotId, w: Worker) -> Any:
        m = self._m
        known = m.slots.get(slot_id)
        is_known = known is not None and known.worker is not None and known.worker.incarnation == w.incarnation
        hold = 0 if not w.hold else 1 if w.hold == m.ledger.holds else 2
        rest = (w.told, w.end, w.left, hold, w.answered, w.order, w.raised, w.code, w.signal)
        return (*self._at[slot_id], is_known, w.at, self._generation(w.generation), *rest)

    def _checked(self) -> Any:
        """Return what the checker knows beside the core."""
        c = self._world.checker
        if isinstance(self._m.phase, Finishing):
            return c._over, c._stopped
        ages = {age: place for place, age in enumerate(sorted(c._ages.values()))}
        return (
            _in_order(
                (
                    *self._at[slot_id],
                    ages.get(c._ages.get(worker, -1)),
                    self._generation(c._joined.get(worker, 0)),
                    self._commit(c._held.get(worker)),
                    worker in c._unresponsive,
                )
                for slot_id, worker in c._living.items()
            ),
            c._committed,
            tuple(c._ended.get(self._m.generation, ())),
            self._since(c._planned_at) if self._distance else None,
            tuple(sorted((host, self._since(at)) for host, at in c._leases.items())),
            tuple(sorted((host, self._since(at)) for host, at in c._notices.items())),
            (c._over, c._stopped, c._stands_still),
            tuple(sorted(c._cut)),
            tuple(sorted(c._unanswered)),
        )


def _in_order(rows: Iterable[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """Return rows of slots, which begin with host and number, in the order of these."""
    return tuple(sorted(rows, key=lambda row: row[:2]))


def _failure(failure: Failure | None) -> Any:
    return None if failure is None else (failure.kind, failure.own_error, failure.cause.worker is not None)


# --------------------------------------------------------------------------------------------------------- the search


class Violation(AssertionError):
    """An invariant that is broken. The text has the shortest story that leads there."""


@dataclass
class Found:
    """Figures of a complete search."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    ends: int = 0  # states in which the job is over
    widest: int = 0
    proven: int = 0  # equal keys whose successors were compared
    reached: Counter[str] | None = None

    def __str__(self) -> str:
        return (
            f"{self.states:,} states ({self.ends:,} ends of the job), {self.transitions:,} transitions, depth "
            f"{self.depth}; {self.proven:,} pairs with equal keys have equal successors"
        )


class Search:
    """A breadth-first search of all states within ``bounds``. ``sample``: every so many states the successors are
    compared with those of each other state with the same key."""

    def __init__(self, bounds: Bounds, sample: int = 50, most: float = inf) -> None:
        self.bounds = bounds
        self.sample = sample
        self.most = most
        self.found = Found()
        self._places: dict[bytes, int] = {}
        self._parents, self._choices = array("i"), array("h")
        self._before, self._after = array("i"), array("i")  # ends of the edges without faults, for I7
        self._ends: list[int] = []
        self._samples: dict[int, World] = {}

    def run(self) -> Found:
        """Visit all states. Raises Violation."""
        found, first = self.found, World(self.bounds)
        self._add(Key(first).digest(), -1, 0)
        found.reached = first.checker.reached
        level = deque([(0, first)])
        while level:
            found.depth += 1
            found.widest = max(found.widest, len(level))
            following: deque[tuple[int, World]] = deque()
            while level:
                place, world = level.popleft()
                self._expand(place, world, following)
                if found.states > self.most:
                    raise RuntimeError(f"more than {self.most:,} states: {found}")
            level = following
        found.depth -= 1
        self._all_can_end()
        return found

    def _expand(self, place: int, world: World, following: deque[tuple[int, World]]) -> None:
        found = self.found
        if isinstance(world.m.phase, Over):
            found.ends += 1
            self._ends.append(place)
            return
        if self.sample and place % self.sample == 0:
            self._samples[place] = world
        choice = -1
        for choice, (what, act) in enumerate(world.actions()):
            after = world.copy()
            try:
                act(after)
            except AssertionError as error:
                raise Violation(f"{error}\n{self.story(place, choice)}") from error
            found.transitions += 1
            key = Key(after).digest()
            known = self._places.get(key)
            if known is None:
                known = self._add(key, place, choice)
                following.append((known, after))
            elif known in self._samples:
                self._compare(known, after, place, choice)
            if not what[1].isupper():  # no fault
                self._before.append(place)
                self._after.append(known)
        if choice < 0:
            raise Violation(f"I7: nothing can happen any more in {world.m.phase_name}\n{self.story(place)}")

    def _add(self, key: bytes, parent: int, choice: int) -> int:
        place = self._places[key] = len(self._parents)
        self._parents.append(parent)
        self._choices.append(choice)
        self.found.states += 1
        return place

    def _compare(self, known: int, other: World, place: int, choice: int) -> None:
        """Check that two states with the same key have the same successors."""
        sample = self._samples[known]
        for one, two in ((sample, other), (other, sample)):
            values = {key: (what, value) for what, key, value in self._successors(two)}
            for what, key, value in self._successors(one):
                if key not in values:
                    other_value = next((value for w, value in values.values() if w == what), None)
                    raise Violation(
                        f"the key lacks something: equal states have unlike successors\n{self.story(known)}\n--- and\n"
                        f"{self.story(place, choice)}\n--- after {what}:\n{_unlike(value, other_value)}"
                    )
        self.found.proven += 1

    def _successors(self, world: World) -> Iterator[tuple[str, bytes, Any]]:
        for what, act in world.actions():
            after = world.copy()
            act(after)
            key = Key(after)
            yield what, key.digest(), key.value()

    def _all_can_end(self) -> None:
        """Check I7: from every state the job can end without another fault."""
        states = self.found.states
        into: list[list[int]] = [[] for _ in range(states)]
        for before, after in zip(self._before, self._after, strict=True):
            into[after].append(before)
        reached = bytearray(states)
        todo = list(self._ends)
        for place in todo:
            reached[place] = 1
        while todo:
            for before in into[todo.pop()]:
                if not reached[before]:
                    reached[before] = 1
                    todo.append(before)
        stuck = reached.find(0)
        if stuck >= 0:
            raise Violation(f"I7: the job cannot end any more\n{self.story(stuck)}")

    def story(self, place: int, *more: int) -> str:
        """Return what has happened on the way to a state, and what the core did."""
        choices: list[int] = list(more)
        while place > 0:
            choices.insert(0, self._choices[place])
            place = self._parents[place]
        world, lines = World(self.bounds), []
        for choice in choices:
            what, act = list(world.actions())[choice]
            world.transition = None
            lines.append(f"{world.now:g} {what}")
            try:
                act(world)
            except AssertionError as error:
                lines.append(f"      !! {error}")
            if world.transition is not None:
                effects = [e for e in world.transition.effects if not isinstance(e, t.Note)]
                lines += [f"      {_short(effect)}" for effect in effects]
                lines.append(f"      {world.transition.next.phase_name}: {world.transition.reason}")
        return "\n".join(lines)


def _unlike(one: Any, other: Any, where: str = "") -> str:
    """Return the first place at which two keys differ."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return next(
            (_unlike(a, b, f"{where}.{i}") for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), ""
        )
    return f"{where}: {one} and {other}"


def _short(effect: t.Effect) -> str:
    if isinstance(effect, t.World):
        members = " ".join(str(member.worker) for member in effect.members)
        return f"World {effect.generation}: {members}; root {effect.root}, lacking {effect.lacking}"
    return str(effect)
