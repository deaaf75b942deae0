"""Simulation of the core with a fleet of machines on a simulated clock.

Each machine defines how long it takes to connect and to boot, and which of its parts are broken. Nothing is random
here. Events are delivered in the order of their times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Literal

from elasticstate.core import types as t
from elasticstate.core.diagnostics import waiting_for
from elasticstate.core.policy import Policy
from elasticstate.core.state import Over
from elasticstate.core.step import new_membership, next_deadline, step

Slots = Literal["boot", "die", "hang"]
Agents = Literal["connect", "refuse", "hang"]


@dataclass(frozen=True)
class Machine:
    """Model of a host. Before ``up_at`` its agents behave as ``before`` says, then as ``after`` says."""

    name: str
    slots: int = 1
    up_at: float = -inf
    named_at: float = 0.0  # the time at which discovery first names the host
    before: Agents = "refuse"
    after: Agents = "connect"
    answers_in_s: float = 1.0  # until the agent is connected or refused
    boot_s: float = 5.0
    bad_slots: Mapping[int, Slots] | None = None

    def agent(self, now: float) -> Agents:
        return self.after if now >= self.up_at else self.before

    def slot(self, index: int) -> Slots:
        return (self.bad_slots or {}).get(index, "boot")


_IMPORTS_S = 3.0  # after which a script uses run


class Fleet:
    """A job on these machines. ``worlds``: publication time and size of each world; ``ended``: the end of the job."""

    def __init__(self, policy: Policy, machines: list[Machine]) -> None:
        self.policy = policy
        self.machines = {machine.name: machine for machine in machines}
        self.now = 0.0
        self.m = new_membership(policy)
        self.worlds: list[tuple[float, int]] = []
        self.ended: t.EndJob | None = None
        self.starts = 0
        self.given_way = 0  # starts of agents and workers in spite of a cooldown or backoff
        self._coming: list[tuple[float, int, Callable[[], t.Event | None]]] = []
        self._numbers = count()
        for at in sorted({machine.named_at for machine in machines}):
            self.later(at, self._discover)

    def later(self, in_s: float, event: Callable[[], t.Event | None]) -> None:
        heapq.heappush(self._coming, (self.now + in_s, next(self._numbers), event))

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Run until the job ends, ``stop`` returns true, or the clock reaches ``until``."""
        while not (isinstance(self.m.phase, Over) or stop()):
            deadline = next_deadline(self.m)
            at = min(self._coming[0][0] if self._coming else inf, inf if deadline is None else deadline)
            if at > until:
                self.now = until
                return
            self.now = max(self.now, at)
            if self._coming and self._coming[0][0] <= self.now:
                event = heapq.heappop(self._coming)[2]()
                if event is not None:
                    self.deliver(event)
            else:
                self.deliver(t.TimePassed())

    def deliver(self, event: t.Event) -> None:
        before = self.m
        self.m, effects, _ = step(self.m, event, self.now)
        for effect in effects:
            if isinstance(effect, t.StartAgent):
                host = before.hosts.get(effect.host)
                self.given_way += host is not None and host.cooldown_until > self.now
            elif isinstance(effect, t.StartWorker):
                slot = before.slots.get(effect.worker.slot_id)
                self.given_way += slot is not None and slot.not_before > self.now
            self._carry_out(effect)

    def why(self) -> str:
        """Return the text for a failed assertion: time, phase and reason."""
        end = self.ended.root_cause if self.ended is not None else None
        return f"{self.now:.1f} s, {self.m.phase_name}: {end.reason if end else waiting_for(self.m, self.now)}"

    # ------------------------------------------------------------------------------------------ the effects

    def _discover(self) -> t.Event:
        named = [machine for machine in self.machines.values() if machine.named_at <= self.now]
        return t.HostsDiscovered(tuple(t.HostSlots(machine.name, machine.slots) for machine in named))

    def _carry_out(self, effect: t.Effect) -> None:
        match effect:
            case t.StartAgent(host):
                self._start_agent(self.machines[host])
            case t.StopAgent(host):
                self.later(0.1, lambda: t.AgentLost(host, "exited with 0"))
            case t.StartWorker(worker):
                self._start_worker(worker)
            case t.StopWorker(worker) | t.Leave(worker):
                self.later(0.1, lambda: t.WorkerExited(worker, 1, None, 9))
            case t.World() as world:
                self.worlds.append((self.now, world.size))
                self.later(0.1, lambda: t.FromWorker(world.members[0].worker, t.First(world.generation)))
            case t.Hold(generation, number):
                self.later(0.1, lambda: t.Several(tuple(self._answers(generation, number))))
            case t.End(generation, _):
                self.later(0.1, lambda: t.Several(tuple(self._ready_again(generation))))
            case t.EndJob():
                self.ended = effect

    def _start_agent(self, machine: Machine) -> None:
        match machine.agent(self.now):
            case "connect":
                self.later(machine.answers_in_s, lambda: t.AgentJoined(machine.name))
            case "refuse":
                self.later(
                    machine.answers_in_s, lambda: t.AgentLost(machine.name, "is unreachable: connection refused")
                )
            case "hang" if machine.after == "connect":  # the attempt succeeds when the host is up
                self.later(machine.up_at - self.now + 1.0, lambda: t.AgentJoined(machine.name))

    def _start_worker(self, worker: t.WorkerId) -> None:
        self.starts += 1
        machine = self.machines[worker.host]
        self.later(min(machine.boot_s, _IMPORTS_S), lambda: t.WorkerUsesRun(worker))
        match machine.slot(worker.slot):
            case "boot":
                self.later(machine.boot_s, lambda: t.FromWorker(worker, t.Ready(0, None, None, f"{worker}:1")))
            case "die":
                self.later(machine.boot_s, lambda: t.WorkerExited(worker, 1, 1, None))

    def _members(self, generation: int) -> list[t.WorkerId]:
        return [w.id for w in self.m.workers.values() if w.joined == generation and not w.gone and w.ready is None]

    def _answers(self, generation: int, number: int) -> list[t.Event]:
        return [
            t.FromWorker(worker, t.HoldAnswer(generation, 5, False, number)) for worker in self._members(generation)
        ]

    def _ready_again(self, generation: int) -> list[t.Event]:
        """Return a READY for each member, without a commit: no worker here has one, so no commit can be lost."""
        return [
            t.FromWorker(worker, t.Ready(generation, None, None, f"{worker}:1", 6))
            for worker in self._members(generation)
        ]
