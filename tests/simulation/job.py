"""A model of a whole job: the real core, links that deliver when they like (each in its order), workers, and faults.

``Job(seed).run(actions)`` plays a schedule; everything follows from its arguments. While faults are injected the order
of all things is random; then they stop, all hosts come back, and the job must end.
"""

from __future__ import annotations

import random
from collections import Counter

from elasticstate.core import types as t
from elasticstate.core.membership import Transition, new_membership, next_deadline, step
from tests.simulation.invariants import Checker, each
from tests.simulation.workers import Content, Group, Memory, Script, Worker

HOSTS = ("a", "b", "c")
FAULTS = ("kill", "kill", "several", "all", "exit", "own", "all own", "freeze", "notice", "hosts", "agent", "host")
MAX_ACTIONS = 30_000


class Job:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        np = rng.randint(1, 4)
        self.policy = t.Policy(
            np=np,
            min_np=rng.randint(1, np),
            max_np=rng.choice((np, np + 1, None)),
            elastic_timeout_s=200.0,
            regroup_timeout_s=rng.choice((20.0, 20.0, 2.0)),
            failure_grace_s=rng.choice((0.0, 1.0)),
            drain_timeout_s=10.0,
            hold_timeout_s=2.0,
            join_window_s=rng.choice((0.0, 2.0)),
            min_interrupt_distance_s=rng.choice((0.0, 0.5)),
            max_no_progress=rng.choice((3, 8)),
            cooldown_min_s=1.0,
            cooldown_max_s=4.0,
        )
        self.script = Script(batches=rng.randint(3, 12), every=rng.choice((1, 1, 2, 3)))
        self.m = new_membership(self.policy)
        self.now = 0.0
        self.checker = Checker()
        self.reached = self.checker.reached
        self.groups: dict[int, Group] = {}
        self.workers: dict[t.WorkerId, Worker] = {}
        self.exits: list[t.WorkerExited] = []
        self.agents: dict[str, str] = {}  # host: "asked", "up"
        self.lost: list[str] = []  # agents whose loss is not yet known
        self.memory: dict[t.SlotId, Memory] = {}
        self.heard: dict[t.SlotId, t.CommitId] = {}  # what the core has been told of it, and is still there
        self.waits_since: float | None = None  # for what is in memory
        self.given_up = t.CommitId(0, 0)  # what was made up to here may be lost
        self.hosts = tuple(t.HostSlots(host, rng.randint(1, 2)) for host in HOSTS[: rng.randint(1, 3)])
        self.end: t.EndJob | None = None
        self.log: list[tuple[float, t.Event, Transition]] = []

    def story(self, last: int = 60) -> str:
        """The last events and what the core said to them."""
        lines: list[str] = []
        for now, event, (after, effects, reason) in self.log[-last:]:
            lines += [f"{now:.3f} {event}", f"      {after.phase_name}: {reason}"]
            lines += [f"      {effect}" for effect in effects]
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------- the play

    def run(self, actions: int) -> None:
        """``actions`` random ones with faults among them, then as many fair ones as the end of the job takes."""
        self._tell(t.HostsDiscovered(self.hosts))
        for _ in range(actions):
            if self.end is not None:
                break
            if self.rng.random() < 0.02:
                self._fault()
            self._act()
        if self.end is None:
            self._all_is_well_again()
        for _ in range(MAX_ACTIONS):
            if self.end is not None:
                break
            self._act()
        assert self.end is not None, f"the job does not end: {self.m.phase_name}"
        self._judge_the_end(self.end)

    def _act(self) -> None:
        """One thing happens: a main thread goes on, a message arrives, a death is seen, or nothing but time passes."""
        self.now += 0.001
        living = list(self.workers.values())
        for _ in range(3):
            kind = self.rng.random()
            if kind < 0.15:
                if self._agents_and_exits():
                    return
            elif living:
                worker = self.rng.choice(living)
                if self._worker_acts(worker, kind):
                    return
        quiet = not self.exits and not any(w.up or (w.down and not w.frozen) for w in self.workers.values())
        if self.rng.random() < (0.3 if quiet else 0.02):
            self._time_passes()

    def _worker_acts(self, worker: Worker, kind: float) -> bool:
        if kind < 0.4 and worker.up:
            self._tell(worker.up.popleft())
            return True
        if worker.exit is not None or worker.frozen:
            if worker.exit is not None and not worker.up:
                self.workers.pop(worker.id, None)
            return False
        moved = True
        if kind < 0.65 and worker.down:
            worker.receive()
        else:
            moved = worker.step()
        if worker.exit is not None:
            self.exits.append(worker.exit)
        return moved or worker.exit is not None

    def _agents_and_exits(self) -> bool:
        if self.exits and self.rng.random() < 0.6:
            left = self.exits.pop(self.rng.randrange(len(self.exits)))
            self._tell(t.Several((*self._last_words(left.worker), left)))
            return True
        if self.lost:
            host = self.lost.pop()
            self._tell(t.AgentLost(host, "connection closed"))
            return True
        for host, state in self.agents.items():
            if state == "asked":
                self.agents[host] = "up"
                found = [(seat.slot, m.commit[0]) for seat, m in self.memory.items() if seat.host == host and m.commit]
                self._tell(t.AgentJoined(host, tuple(found)))
                return True
        return False

    def _last_words(self, worker: t.WorkerId) -> list[t.Event]:
        """The agent looks once more at what a dead worker has left."""
        held = self.memory[worker.seat].commit if worker.seat in self.memory else None
        return [t.Heartbeat(worker, "train", -1, 0, held[0])] if held is not None else []

    def _time_passes(self) -> None:
        """A second at most, up to the deadline; the agents tell who lives, and who does not respond."""
        deadline = next_deadline(self.m)
        self.now = min(self.now + 1.0, deadline if deadline is not None else self.now + 1.0)
        beats: list[t.Event] = [t.TimePassed()]
        for worker in self.workers.values():
            if worker.exit is not None:
                continue
            if not worker.frozen:
                worker.up.append(worker.heartbeat())
            elif self.rng.random() < 0.2:
                beats.append(t.WorkerUnresponsive(worker.id, "no stamp"))
                self._kill(worker)
        self._tell(t.Several(tuple(beats)))

    # ------------------------------------------------------------------------------------------------- the core

    def _tell(self, event: t.Event) -> None:
        if self.end is not None:
            return
        for part in each(event):
            self._note_what_is_heard(part)
        transition = step(self.m, event, self.now)
        self.reached["events"] += 1
        self.log.append((self.now, event, transition))
        self.checker.see(self.m, event, self.now, transition)
        self.m = transition.next
        for effect in transition.effects:
            self._carry_out(effect)
        waits = "whose memory holds the newest commit" in transition.reason
        self.reached["memory awaited"] += waits
        if not waits and self.end is None:
            self.waits_since = None
        elif waits and self.waits_since is None:
            self.waits_since = self.now

    def _carry_out(self, effect: t.Effect) -> None:
        match effect:
            case t.StartAgent(host):
                self.agents[host] = "asked"
            case t.StopAgent(host):
                self._stop_agent(host, with_memory=True)
            case t.StartWorker(worker):
                content = Content(str(worker), 0, 0)
                memory = self.memory.setdefault(worker.seat, Memory())
                self.workers[worker] = Worker(worker, self.script, self.groups, self.rng, content, memory)
            case t.PublishWorld(world):
                self.groups[world.generation] = Group(world)
                for placement in world.members:
                    self._send(placement.worker, effect)
                self._nothing_made_is_lost(world)
            case t.StopWorker(worker) | t.ConfirmOwnError(worker) | t.Leave(worker):
                if isinstance(effect, t.Leave):
                    self._leaver_holds_nothing_back(worker)
                self._send(worker, effect)
            case t.Hold() | t.Release() | t.End() | t.OpenGate():
                for worker in self.workers:
                    self._send(worker, effect)
            case t.EndJob():
                self.end = effect

    def _send(self, worker: t.WorkerId, message: t.Effect) -> None:
        if worker in self.workers:
            self.workers[worker].down.append(message)

    def _stop_agent(self, host: str, *, with_memory: bool) -> None:
        """The agent and its workers die. What they have committed is still there, unless the host dies, too."""
        if self.agents.pop(host, None) is not None:
            for worker in [worker for worker in self.workers.values() if worker.id.host == host]:
                self._vanish(worker)
            self.exits = [left for left in self.exits if left.worker.host != host]
            self.lost.append(host)
            if with_memory:
                for seat in [seat for seat in self.memory if seat.host == host]:
                    del self.memory[seat]
                    self.heard.pop(seat, None)

    def _vanish(self, worker: Worker) -> None:
        """It dies with its agent: nobody hears of it again."""
        if worker.exit is None:
            worker.die(None, 9)
        self.workers.pop(worker.id, None)

    def _kill(self, worker: Worker, signal: int | None = 9, exit_code: int | None = None) -> None:
        if worker.exit is None:
            worker.die(exit_code, signal)
            assert worker.exit is not None
            self.exits.append(worker.exit)

    # ------------------------------------------------------------------------------------------------- faults

    def _fault(self) -> None:
        living = [worker for worker in self.workers.values() if worker.exit is None]
        kind = self.rng.choice(FAULTS)
        if kind == "hosts":
            hosts = [t.HostSlots(host, self.rng.randint(1, 2)) for host in HOSTS if self.rng.random() < 0.8]
            self._tell(t.HostsDiscovered(tuple(hosts)))
        elif kind in ("agent", "host") and self.agents:
            self._stop_agent(self.rng.choice(list(self.agents)), with_memory=kind == "host")
        elif kind == "all own" and self.rng.random() < 0.2:
            self.script.bug_at = self.rng.randrange(self.script.batches)
        elif living:
            victim = self.rng.choice(living)
            if kind == "kill":
                self._kill(victim)
            elif kind == "several":
                for worker in living:
                    if self.rng.random() < 0.6:
                        self._kill(worker)
            elif kind == "all":
                for worker in living:
                    self._kill(worker)
            elif kind == "exit":
                self._kill(victim, signal=None, exit_code=self.rng.choice((0, 1)))
            elif kind == "own":
                victim.crash = True
            elif kind == "freeze":
                victim.frozen = True
            elif kind == "notice":
                victim.up.append(t.WorkerLeaving(victim.id))
        self.reached[f"fault {kind}"] += 1

    def _all_is_well_again(self) -> None:
        self._tell(t.HostsDiscovered(tuple(t.HostSlots(host, 2) for host in HOSTS)))

    # ------------------------------------------------------------------------------------------------- judgement

    def _note_what_is_heard(self, event: t.Event) -> None:
        match event:
            case (
                t.Heartbeat(worker, commit=commit)
                | t.CommitSealed(worker, commit)
                | t.WorkerReady(worker, commit=commit)
            ):
                known = self.m.workers.get(worker) is not None
                if known and commit is not None and worker.seat in self.memory:
                    self.heard[worker.seat] = commit
            case t.AgentJoined(host, commits):
                self.heard.update((t.SlotId(host, slot), commit) for slot, commit in commits)

    def _has_waited(self) -> bool:
        """Whether the core has waited for what is in memory as long as it must."""
        limit_s = self.policy.regroup_timeout_s
        return self.waits_since is not None and self.now >= self.waits_since + limit_s

    def _nothing_made_is_lost(self, world: t.World) -> None:
        """I3: what all members of a generation have sealed is in the next world, if it is still in anybody's memory,
        and the core has heard of it; unless it was waited for, for the regroup time-out."""
        made = max(
            (c for g, group in self.groups.items() if g < world.generation and (c := group.made())), default=None
        )
        root = world.members[world.root].worker
        if root not in self.workers or self.workers[root].exit is not None:
            return  # it has died, and the core cannot know yet
        held = self.memory[root.seat].commit
        if made is None or made <= self.given_up or (held is not None and held[0] >= made):
            self.reached["nothing lost"] += made is not None
            return
        holders = [
            seat
            for seat, commit in self.heard.items()
            if commit >= made
            and (m := self.memory[seat].commit)
            and m[0] >= made
            and not self.m.hosts[seat.host].leaving
        ]
        assert not holders or self._has_waited(), f"a commit of all is lost: {made}, in the memory of {holders}"
        self.given_up = max(self.given_up, made)
        self.reached["given up"] += bool(holders)

    def _leaver_holds_nothing_back(self, leaver: t.WorkerId) -> None:
        """I15: whoever leaves has no commit that is newer than what those who stay have."""
        worker = self.workers.get(leaver)
        stay = [w for w in self.workers.values() if w.id != leaver and w.exit is None and not w.sentinel.leave]
        if worker is None or worker.commit is None or self.exits or self.lost:
            return  # or a death that the core cannot know of yet
        held = [w.commit[0] for w in stay if w.commit is not None]
        if held:
            assert max(held) >= worker.commit[0], "I15: the leaver takes a commit with it"
            self.reached["I15"] += 1

    def _judge_the_end(self, end: t.EndJob) -> None:
        if end.succeeded:
            contents = {worker.content for worker in self.workers.values() if worker.passed_gate}
            assert len(contents) <= 1, f"I11: different results {contents}"
            assert all(content.batches == self.script.batches for content in contents)
            return
        assert end.root_cause is not None
        reason = end.root_cause.reason
        if "StateLostError" in reason:
            holders = [w for w in self.workers.values() if w.exit is None and not w.frozen and w.commit is not None]
            assert not [w for w in holders if not self.m.workers.get(w.id) or not self.m.workers[w.id].gone], reason
            left = [seat for seat in self.heard if self.memory[seat].commit and not self.m.hosts[seat.host].leaving]
            assert not left or self._has_waited(), f"{reason}; but in memory of {left}"


def play(seed: int, actions: int) -> Counter[str]:
    """One schedule; what it came by."""
    job = Job(seed)
    try:
        job.run(actions)
    except AssertionError as error:
        raise AssertionError(f"{job.story()}\n{error}") from error
    job.reached["restored"] += sum(worker.restored for worker in job.workers.values())
    return job.reached
