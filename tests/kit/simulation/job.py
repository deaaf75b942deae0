"""A model of a whole job: the real core, links with random delays (each in its order), workers, and faults.

``Job(seed).run(actions)`` plays a schedule that depends only on the arguments. The order of actions is random. After
the time of faults all hosts return, and the job must end.
"""

from __future__ import annotations

import random
from collections import Counter

from elasticstate.core import types as t
from elasticstate.core.step import (
    Transition,
    new_membership,
    next_deadline,
    step,
)
from tests.kit.policy import in_pairs, policy_of
from tests.kit.simulation.books import Books
from tests.kit.simulation.invariants import Checker, each
from tests.kit.simulation.judge import Judge
from tests.kit.simulation.partition import HOSTS, Links, Partition
from tests.kit.simulation.restart import Restart
from tests.kit.simulation.verified import Verified
from tests.kit.simulation.workers import Content, Group, Retained, Script, Worker

FAULTS = (
    *("kill", "kill", "several", "all", "exit", "own", "all own", "freeze"),
    *("notice", "host notice", "hosts", "agent", "host"),
    *("cut", "cut two", "cut the world", "cut all", "cut ones gone", "links", "links"),
    *("driver", "driver in the middle"),
)
MAX_ACTIONS = 30_000


class Job:
    faults = FAULTS

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        np = rng.randint(1, 4)
        self.policy = policy_of(
            np=np,
            min_np=rng.randint(1, np),
            max_np=rng.choice((np, np + 1, None)),
            elastic_timeout_s=200.0,
            regroup_timeout_s=rng.choice((20.0, 20.0, 2.0)),
            failure_grace_s=rng.choice((0.0, 1.0)),
            drain_timeout_s=10.0,
            preemption_window_s=rng.choice((0.0, 1.0)),
            preemption_cooldown_s=rng.choice((1.0, 20.0)),
            driver_timeout_s=rng.choice((2.0, 10.0)),
            heartbeat_timeout_s=0.5,
            stop_timeout_s=0.5,
            hold_timeout_s=2.0,
            join_window_s=rng.choice((0.0, 2.0)),
            min_interrupt_distance_s=rng.choice((0.0, 0.5)),
            max_no_progress=rng.choice((3, 8)),
            cooldown_range_s=(1.0, 4.0),
            spares=rng.choice((0, 0, 1)),
        )
        if seed % 4 == 1:
            self.policy = in_pairs(self.policy)
        self.script = Script(batches=rng.randint(3, 12), every=rng.choice((1, 1, 2, 3)), uneven=rng.random() < 0.2)
        self.m = new_membership(self.policy)
        self.now = 0.0
        self.events = Verified(self.policy)
        self.checker, self.books = Checker(), Books()
        self.reached = self.checker.reached
        self.groups: dict[int, Group] = {}
        self.workers: dict[t.WorkerId, Worker] = {}
        self.exits: list[t.WorkerExited] = []
        self.agents: dict[str, str] = {}  # host: "asked", "up"
        self.lost: list[str] = []  # agents whose loss the core has not received yet
        self.partition = Partition(self)
        self.links = Links(self)
        self.restart = Restart(self)
        self.deaf: set[str] = set()  # hosts that receive no more effects, because the driver dies
        self.retained: dict[t.SlotId, Retained] = {}
        self.judge = Judge(self)
        self.hosts = tuple(t.HostSlots(host, rng.randint(1, 2)) for host in HOSTS[: rng.randint(1, 3)])
        self.end: t.EndJob | None = None
        self.log: list[tuple[float, t.Event, Transition]] = []

    def story(self, last: int = 60) -> str:
        """Return the last events and the core's answers as text."""
        lines: list[str] = []
        for now, event, (after, effects, reason) in self.log[-last:]:
            lines += [f"{now:.3f} {event}", f"      {after.phase_name}: {reason}"]
            lines += [f"      {effect}" for effect in effects]
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------- the schedule

    def run(self, actions: int) -> None:
        """Run ``actions`` random actions with faults, then actions without faults until the job ends."""
        self.deliver(t.HostsDiscovered(self.hosts))
        for _ in range(actions):
            if self.end is not None:
                break
            if self.rng.random() < 0.02 and not self.restart.is_down:
                self._fault()
            self._act()
        while self.restart.is_down:
            self.restart.act()
        if self.end is None:
            self._all_is_well_again()
        for _ in range(MAX_ACTIONS):
            if self.end is not None:
                break
            self._act()
        assert self.end is not None, f"the job does not end: {self.m.phase_name}"

    def _act(self) -> None:
        """Take one action: a main thread runs, a message arrives, a death is detected, or only time passes."""
        if self.restart.is_down:
            self.restart.act()
            return
        self.now += 0.001
        if self.partition.cuts:
            self.partition.time_passes()
        living = list(self.workers.values())
        if self.copies_act():
            return
        for _ in range(3):
            kind = self.rng.random()
            if kind < 0.15:
                if self._agents_and_exits():
                    return
            elif living:
                worker = self.rng.choice(living)
                if self._worker_acts(worker, kind):
                    return
        cuts = self.partition.cuts
        quiet = not self.exits and not any(
            (w.down and not w.frozen) or (w.up and w.id.host not in cuts) for w in self.workers.values()
        )
        if self.rng.random() < (0.3 if quiet else 0.02):
            self._time_passes()

    def _worker_acts(self, worker: Worker, kind: float) -> bool:
        reachable = worker.id.host not in self.partition.cuts
        if kind < 0.4 and worker.up and reachable:
            self.deliver(worker.up.popleft())
            return True
        if worker.exit is not None or worker.frozen:
            if worker.exit is not None and not (worker.up and reachable):
                self.workers.pop(worker.id, None)
            return False
        moved = True
        if kind < 0.65 and worker.down:
            worker.receive()
        else:
            moved = self.now >= worker.busy_until and worker.step()
        if worker.exit is not None:
            self._has_ended(worker.exit)
        return moved or worker.exit is not None

    def _agents_and_exits(self) -> bool:
        if self.exits and self.rng.random() < 0.6:
            left = self.rng.choice(self.exits)
            dead = self.workers.get(left.worker)
            if dead is not None and dead.up:  # an agent reads all that a worker has sent, and then reports its exit
                self.deliver(dead.up.popleft())
                return True
            self.exits.remove(left)
            self.deliver(t.Several((*self._last_lines(left.worker), left)))
            return True
        if self.lost:
            host = self.lost.pop()
            self.deliver(t.AgentLost(host, "is unreachable: connection closed"))
            return True
        for host, state in self.agents.items():
            if state == "asked" and host not in self.partition:
                self.agent_joins(host)
                return True
            if state == "asked" and self.rng.random() < 0.1:
                del self.agents[host]
                self.deliver(t.AgentLost(host, "is unreachable by ssh"))
                return True
        return self.links.something_happens() or self.partition.something_happens()

    def _has_ended(self, exited: t.WorkerExited) -> None:
        """Record an exit. The agent detects it, and the core receives it later if the host is reachable."""
        self.restart.host_reports.ended(exited)
        if exited.worker.host not in self.partition and not self.restart.is_down:
            self.exits.append(exited)

    def agent_joins(
        self, host: str, workers: tuple[tuple[t.WorkerId, int], ...] = (), messages: tuple[t.Event, ...] = ()
    ) -> None:
        """Connect an agent with its host's retained commits. ``messages``: the messages of surviving ``workers``."""
        self.agents[host] = "up"
        group = self.groups.get(self.m.generation)
        if group is not None and group.reachable is False:
            group.reachable = any(placement.worker.host == host for placement in group.world.members)
        joined = self.joined(host, workers)
        messages = (*self.attached_on(host), *messages)
        self.deliver(t.Several((joined, *messages)) if messages else joined)
        is_taken = host in self.m.hosts and self.m.hosts[host].agent == "joined"
        is_over = self.end is not None or self.restart.is_down
        assert is_taken or is_over or host not in self.agents, f"the agent of {host} is neither used nor stopped"

    def joined(self, host: str, workers: tuple[tuple[t.WorkerId, int], ...]) -> t.AgentJoined:
        """Return the report of an agent about its host, where these workers live."""
        slots = [(slot_id.slot, retained) for slot_id, retained in self.retained.items() if slot_id.host == host]
        commits = tuple((slot, retained.commit[0]) for slot, retained in slots if retained.commit)
        previous = tuple((slot, retained.previous[0]) for slot, retained in slots if retained.previous)
        incarnations = tuple(self.restart.host_reports.incarnations.get(host, {}).items())
        return t.AgentJoined(host, commits, workers, incarnations, previous, self.kept_on(host))

    # a sharded job (sharded.py) has more of these

    def copies_act(self) -> bool:
        return False

    def kept_on(self, host: str) -> tuple[tuple[t.SlotId, t.CommitId], ...]:
        return ()

    def attached_on(self, host: str) -> list[t.Event]:
        return []

    def new_worker(self, worker: t.WorkerId, content: Content, retained: Retained) -> Worker:
        return Worker(worker, self.script, self.groups, self.rng, content, retained)

    def workers_on(self, host: str) -> list[Worker]:
        """Return the living workers on a host."""
        return [worker for worker in self.workers.values() if worker.id.host == host and worker.exit is None]

    def _last_lines(self, worker: t.WorkerId) -> list[t.Event]:
        """Return the agent's last reading of a dead worker's slot."""
        held = self.retained.get(worker.slot_id, Retained())
        commit, previous = (sealed[0] if sealed else None for sealed in (held.commit, held.previous))
        return (
            [t.FromWorker(worker, t.Stamp(t.Place.TRAIN, -1, 0, commit, previous=previous))]
            if commit is not None
            else []
        )

    def _time_passes(self) -> None:
        """Advance the clock by a second at most, up to the deadline. Agents report the liveness of their workers."""
        deadline = next_deadline(self.m)
        self.now = min(self.now + 1.0, deadline if deadline is not None else self.now + 1.0)
        self.partition.time_passes()
        beats: list[t.Event] = [t.TimePassed()]
        for worker in self.workers.values():
            if worker.exit is not None:
                continue
            if not worker.frozen:
                if worker.id.host not in self.partition:
                    worker.up.append(worker.heartbeat(self.now))
                    assert worker.id in self.m.workers or worker.down, f"{worker.id} lives, and the core knows nothing"
            elif self.rng.random() < 0.2:
                if worker.id.host not in self.partition:
                    beats.append(t.WorkerUnresponsive(worker.id, "no stamp"))
                self.kill(worker)
        self.deliver(t.Several(tuple(beats)))

    # ------------------------------------------------------------------------------------------------- the core

    def deliver(self, event: t.Event) -> None:
        if self.end is not None:
            return
        for part in each(event):
            self.judge.record(part)
        transition = step(self.m, event, self.now)
        self.reached["events"] += 1
        self.log.append((self.now, event, transition))
        self.checker.see(self.m, event, self.now, transition)
        self.books.see(self.now, transition)
        self.replace(transition)
        self.judge.see(transition)

    def replace(self, transition: Transition) -> None:
        """Carry out the core's effects in their order, unless the driver dies in the middle."""
        had_commit, layouts = self.m.ledger.highest is not None, self.m.shards.layouts
        self.m, effects = transition.next, transition.effects
        has_new_layout = self.m.shards.layouts is not layouts
        if effects or has_new_layout or (self.m.ledger.highest is not None and not had_commit):
            self.restart.keep()
        dies = self.restart.is_about_to_die and effects and not isinstance(effects[-1], t.EndJob)
        last = self.rng.randrange(len(effects)) if dies else len(effects)
        for effect in effects[:last]:
            self._carry_out(effect)
        if dies:
            self.deaf = {host for host in HOSTS if self.rng.random() < 0.5}
            self._carry_out(effects[last])
            self.deaf = set(HOSTS)
            for effect in effects[last + 1 :]:
                if isinstance(effect, t.World):
                    self._carry_out(effect)
            self.deaf = set()
            self.restart.die()

    def _carry_out(self, effect: t.Effect) -> None:
        if not self.restart.is_down:
            self.events.see(self.now, effect, self.m)
        match effect:
            case t.StartAgent(host) | t.StopAgent(host) | t.StartWorker(t.WorkerId(host)) if host in self.deaf:
                pass
            case t.StartAgent(host):
                self.agents[host] = "asked"
            case t.StopAgent(host) if host in self.partition:
                if self.agents.pop(host, None) is not None:
                    self.partition.stop(host)
                    self.judge.forget(host)
            case t.StopAgent(host):
                self._stop_agent(host, with_commits=True)
            case t.StartWorker(worker) if self.agents.get(worker.host) == "up" and worker.host not in self.partition:
                content = Content(str(worker), 0, 0)
                retained = self.retained.setdefault(worker.slot_id, Retained())
                self.workers[worker] = self.new_worker(worker, content, retained)
                self.restart.host_reports.started(worker)
            case t.World() as world:
                if world.generation - 1 in self.groups:
                    self.groups[world.generation - 1].ticks_after = 0
                self.groups[world.generation] = Group(world, self.links.cut)
                for placement in world.members:
                    self._send(placement.worker, effect)
                    if self._reaches(placement.worker.host):
                        self.restart.host_reports.exits.pop(placement.worker.host, None)
                self.judge.nothing_made_is_lost(world)
            case t.StopWorker(worker) | t.ConfirmOwnError(worker) | t.Leave(worker) | t.Sever(worker):
                if isinstance(effect, t.Leave):
                    self.judge.draining_worker_holds_nothing_back(worker)
                self._send(worker, effect)
                if isinstance(effect, t.Sever) and self._reaches(worker.host):
                    self.restart.host_reports.ends[worker.host] = effect.generation
            case t.Hold() | t.Release() | t.End() | t.OpenGate():
                group = self.groups[effect.generation]
                if isinstance(effect, t.End) and group.reachable is None:
                    group.reachable = any(p.worker.host not in self.partition for p in group.world.members)
                for worker in self.workers:
                    self._send(worker, effect)
                reached = {host: effect.generation for host in self.agents if self._reaches(host)}
                if isinstance(effect, t.OpenGate):
                    self.restart.host_reports.gates.update(reached)
                elif isinstance(effect, t.End) and effect.at_tick is None:
                    self.restart.host_reports.ends.update(reached)
            case t.ProbeLinks():
                self.links.order(effect)
            case t.EndJob():
                self.end = effect
                self.judge.end(effect)

    def _send(self, worker: t.WorkerId, message: t.Effect) -> None:
        if worker in self.workers and self._reaches(worker.host):
            self.workers[worker].down.append(message)

    def _reaches(self, host: str) -> bool:
        return host not in self.partition and host not in self.deaf

    def _stop_agent(self, host: str, *, with_commits: bool) -> None:
        """End the agent and its workers. Their commits remain, unless the host dies, too (``with_commits``)."""
        if self.agents.pop(host, None) is not None:
            self.restart.host_reports.forget(host)
            for worker in [worker for worker in self.workers.values() if worker.id.host == host]:
                self.vanish(worker)
            self.exits = [left for left in self.exits if left.worker.host != host]
            self.lost.append(host)
            if with_commits:
                self.host_is_cleared(host)

    def host_is_cleared(self, host: str) -> None:
        """Remove all workers and commits of a host."""
        for worker in self.workers_on(host):
            self.vanish(worker)
        for slot_id in [slot_id for slot_id in self.retained if slot_id.host == host]:
            del self.retained[slot_id]
        self.judge.forget(host)

    def vanish(self, worker: Worker) -> None:
        """End a worker together with its agent: no exit is reported."""
        if worker.exit is None:
            worker.die(None, 9)
        self.workers.pop(worker.id, None)

    def kill(self, worker: Worker, signal: int | None = 9, exit_code: int | None = None) -> None:
        if worker.exit is None:
            worker.die(exit_code, signal)
            assert worker.exit is not None
            self._has_ended(worker.exit)

    # ------------------------------------------------------------------------------------------------- faults

    def _fault(self) -> None:
        living = [worker for worker in self.workers.values() if worker.exit is None]
        kind = self.rng.choice(self.faults)
        agents = [host for host in self.agents if host not in self.partition]
        if kind == "hosts":
            hosts = [t.HostSlots(host, self.rng.randint(1, 2)) for host in HOSTS if self.rng.random() < 0.8]
            self.deliver(t.HostsDiscovered(tuple(hosts)))
        elif kind == "cut ones gone":
            self.deliver(t.HostsDiscovered(tuple(t.HostSlots(host, 2) for host in HOSTS if host not in self.partition)))
        elif kind == "links":
            self.links.strike()
        elif kind == "driver":
            self.restart.die()
        elif kind == "driver in the middle":
            self.restart.is_about_to_die = True
        elif kind == "host notice" and agents:
            for host in self.rng.sample(agents, self.rng.randint(1, len(agents))):
                notice = self.restart.host_reports.notices[host] = t.HostDraining(host, "SIGTERM to its agent")
                if not self.restart.is_down:
                    self.deliver(notice)
        elif kind in ("agent", "host") and agents:
            self._stop_agent(self.rng.choice(agents), with_commits=kind == "host")
        elif kind.startswith("cut") and agents:
            members = {placement.worker.host for placement in self.m.world.members} if self.m.world else set(agents)
            count = {"cut": 1, "cut two": 2, "cut all": len(agents)}.get(kind, 0)
            self.partition.cut(self.rng.sample(agents, min(count, len(agents))) if count else sorted(members))
        elif kind == "all own" and self.rng.random() < 0.2:
            self.script.bug_at = self.rng.randrange(self.script.batches)
        elif living:
            victim = self.rng.choice(living)
            if kind == "kill":
                self.kill(victim)
            elif kind == "several":
                for worker in living:
                    if self.rng.random() < 0.6:
                        self.kill(worker)
            elif kind == "all":
                for worker in living:
                    self.kill(worker)
            elif kind == "exit":
                self.kill(victim, signal=None, exit_code=self.rng.choice((0, 1)))
            elif kind == "own":
                victim.crash = True
            elif kind == "freeze":
                victim.frozen = True
            elif kind == "notice":
                victim.up.append(t.FromWorker(victim.id, t.WorkerPreemptionNotice(15)))
        self.reached[f"fault {kind}"] += 1

    def _all_is_well_again(self) -> None:
        self.links.cut.clear()
        while self.partition.cuts and self.end is None:
            self.partition.heal(self.rng.choice(list(self.partition.cuts)))
            while self.restart.is_down:  # the driver was about to die
                self.restart.act()
        self.deliver(t.HostsDiscovered(tuple(t.HostSlots(host, 2) for host in HOSTS)))


def play(seed: int, actions: int) -> Counter[str]:
    """Play one schedule. Return the counted situations."""
    job = Job(seed)
    try:
        job.run(actions)
    except AssertionError as error:
        raise AssertionError(f"{job.story()}\n{error}") from error
    for group in job.groups.values():
        if group.ticks_after is not None:
            job.reached["I16 with 1"] += group.ticks_after
            job.reached["I16 with 0"] += not group.reachable
    job.reached.update(job.books.reached)
    job.reached["restored"] += sum(worker.restored for worker in job.workers.values())
    return job.reached
