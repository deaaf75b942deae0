"""A model of a sharded job: workers that attach shards, agents that keep copies, and a judge of the commit line.

A worker destroys its older commit when it begins a new one, as state/snapshot.py does. Kept copies, and buffers without
a worker, are damaged at random; a copy server detects that when it reads them. Hosts refuse copies, and agents die with
reports that they have not forwarded. The judge knows all buffers and copy stores, so it knows which commits can really
be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elasticstate.core import types as t
from elasticstate.core.policy import Policy
from elasticstate.core.reattach import Remains
from elasticstate.core.step import Transition
from elasticstate.core.types import ShardLayout
from tests.kit.simulation.job import HOSTS, Job
from tests.kit.simulation.judge import Judge
from tests.kit.simulation.recovery import stale_facts_have_no_effect
from tests.kit.simulation.sharded_workers import ShardedWorker, Stores, is_attached
from tests.kit.simulation.workers import Content, Retained, Worker


class LineJudge(Judge):
    """Judge of a sharded job."""

    job: ShardedJob

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.lost: set[str] = set()  # hosts that were lost since the last complete replication
        self.replicated: t.CommitId | None = None
        self.replicas = 0  # of that commit
        self.damages = 0  # of its copies, since then
        self.told: set[t.CopyOf] = set()  # damaged copies that the core has been told of

    def see(self, transition: Transition) -> None:
        super().see(transition)
        shards = transition.next.shards
        if shards.replicated is not None and shards.replicated != self.replicated:
            self._replication_is_complete(shards.replicated, shards.layouts)
        self.job.reached["line awaited"] += "with shards of commit" in transition.reason

    def restart(self, remains: Remains) -> None:
        super().restart(remains)
        self.told.clear()

    def record(self, event: t.Event) -> None:
        super().record(event)
        match event:
            case t.CommitDamaged(slot_id, commit):
                self.told.add(t.CopyOf(slot_id.host, slot_id, commit))
                self.job.reached["damaged buffer reported"] += 1
            case t.CopyDropped(reason="damaged"):
                self.job.reached["damaged copy reported"] += 1

    @property
    def _losses(self) -> int:
        return len(self.lost) + self.damages

    def _replication_is_complete(self, commit: t.CommitId, layouts: tuple[ShardLayout, ...]) -> None:
        keepers: dict[int, set[str]] = {}
        digests = next(dict(layout.digests) for layout in layouts if layout.generation == commit.generation)
        for host, copies in self.job.stores.kept.items():
            for slot_id, kept in copies:
                if kept == commit:
                    keepers.setdefault(digests[slot_id], set()).add(host)
        if set(keepers) != set(digests.values()):
            assert self.lost, f"{commit} counts as replicated, but only on {keepers}"
            return
        self.replicas = min(len(hosts) for hosts in keepers.values()) - 1
        self.replicated, self.lost = commit, {*self.job.partition.cuts, *self.job.lost}
        self.damages = sum(copy.commit == commit for copy in self.job.stores.damaged_copies)
        self.job.reached["replicated"] += 1
        self.job.reached[f"replicas {self.replicas}"] += 1

    def host_is_lost(self, host: str) -> None:
        self.lost.add(host)

    def readable(self, hosts: Sequence[str] = ()) -> t.CommitId | None:
        """Return the newest commit whose shards can all be read on the hosts that the core reaches.

        With ``hosts``, on these, which may have copies that nobody knows of: those of an incomplete replication do not
        count there.
        """
        job, reaches_all = self.job, not hosts
        agents = job.m.hosts
        hosts = hosts or [
            h for h, at in job.agents.items() if at == "up" and agents[h].agent == "joined" and self._up(h)
        ]
        newest = None
        for layout in self._layouts():
            commits = {
                sealed[0]
                for slot_id, _ in layout.digests
                if (held := job.retained.get(slot_id)) is not None
                for sealed in (held.commit, held.previous)
                if sealed is not None
            }
            commits |= {commit for copies in job.stores.kept.values() for _, commit in copies}
            for commit in (commit for commit in commits if commit.generation == layout.generation):
                copies = [
                    (digest, t.CopyOf(host, slot_id, commit)) for slot_id, digest in layout.digests for host in hosts
                ]
                own = [copy for copy in copies if copy[1].host == copy[1].slot.host]
                copies = copies if reaches_all or commit == self.replicated else own
                found = {digest for digest, copy in copies if job.stores.look(copy) is not None}
                if found == {digest for _, digest in layout.digests}:
                    newest = commit if newest is None else max(newest, commit)
        return newest

    def _layouts(self) -> list[ShardLayout]:
        """Return the layouts that the core knows, or that an agent which it reaches has reported of the last world."""
        known = {layout.generation for layout in self.job.m.shards.layouts}
        reported = {report.generation for host, (_, report) in self.job.stores.attached.items() if self._up(host)}
        known |= {generation for generation in reported if generation >= self.job.m.generation - 1}
        return [layout for generation, layout in self.job.stores.layouts.items() if generation in known]

    def _up(self, host: str) -> bool:
        return host not in self.job.partition and host not in self.job.lost

    def nothing_made_is_lost(self, world: t.World) -> None:
        """Check I19: each source of the line can be read, no readable commit is newer, and replicas have kept it."""
        job = self.job
        if world.line is None:
            assert not job.m.shards.layouts, "a sharded job starts from its line"
            return
        job.reached["line"] += 1
        moving = {w.id.slot_id for w in job.workers.values() if w.exit is None and w.sentinel.generation > 0}
        moving -= {placement.worker.slot_id for placement in world.members}  # late, or not known as dead yet
        for source in world.sources:
            if self._up(source.copy.host) and source.copy.slot not in moving:
                held = job.stores.look(source.copy)
                is_damaged = source.copy in job.stores.damaged_copies | job.stores.damaged_buffers | job.stores.untold()
                assert held is not None or is_damaged, f"{source} cannot be read"
                assert held is None or held[1] == source.digest, f"{source} has the shards {held[1]}"
                assert held is not None or source.copy not in self.told, f"{source} is damaged, and the core knows it"
        job.reached["line from a kept copy"] += any(s.copy.host != s.copy.slot.host for s in world.sources)
        own = {placement.worker.slot_id for placement in world.members}
        job.reached["line from a slot that left"] += any(s.copy.slot not in own for s in world.sources)
        newest = self.readable()
        if not moving and not job.exits and not job.lost and not job.partition.cuts and not job.m.ledger.links.cut:
            assert newest is not None or self._is_damaged(), "the core has named a line"
            assert newest is None or world.line >= newest, f"the line is {world.line}, but {newest} can be read"
            job.reached["newest line"] += 1
        if self.replicated is not None and self._losses <= self.replicas:
            assert world.line >= self.replicated, f"{self.replicated} was replicated, but the line is {world.line}"
            job.reached["replicas kept the line"] += bool(self.lost)
            job.reached["replicas kept the line from damage"] += bool(self.damages)

    def _is_damaged(self) -> bool:
        stores = self.job.stores
        return bool(stores.damaged_buffers or stores.damaged_copies or stores.untold())

    def draining_worker_holds_nothing_back(self, draining_worker: t.WorkerId) -> None:
        """Leave I15 out: the agent keeps the commits of a worker that has left."""

    def end(self, end: t.EndJob) -> None:
        if end.succeeded or end.root_cause is None or "StateLostError" not in end.root_cause.reason:
            super().end(end)
            return
        job = self.job
        job.reached["line lost"] += 1
        assert self.replicated is None or self._losses > self.replicas, f"{self.lost} were lost: {end}"
        newest = self.readable() if not job.exits and not job.lost else None
        assert newest is None or self._has_waited(), f"{end}, but {newest} can be read"
        away = self.readable([host for host in HOSTS if host not in job.lost]) if not job.exits else None
        assert away is None or self._has_waited(), f"{end}, but {away} can be read on hosts that may return"


class ShardedJob(Job):
    """A job whose workers attach shards."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.policy = self._with_replicas(self.policy, rng.choice((None, None, 0, 1, 1, 2)))
        self.m = replace(self.m, policy=self.policy)
        self.script.uneven = False
        self.shards = rng.choice((None, None, 1, 2))
        self.has_racks = rng.random() < 0.5
        self.stores = Stores(self.retained)
        self.judge: LineJudge = LineJudge(self)
        self.orders: list[tuple[t.CommitId, t.SlotId, str]] = []
        self.full: set[str] = set()  # hosts that refuse copies
        self.forgotten: dict[str, t.CommitId] = {}  # an agent refuses copies of older commits
        self.has_faults = True

    def _with_replicas(self, policy: Policy, replicas: int | None) -> Policy:
        return replace(policy, replicas=replicas)

    def new_worker(self, worker: t.WorkerId, content: Content, retained: Retained) -> Worker:
        self.stores.resume(worker.slot_id)
        parts = (worker, self.script, self.groups, self.rng, content, retained)
        return ShardedWorker(*parts, stores=self.stores, shards=self.shards)

    def host_is_cleared(self, host: str) -> None:
        super().host_is_cleared(host)
        self.stores.kept.pop(host, None)
        self._agent_is_gone(host)

    def _stop_agent(self, host: str, *, with_commits: bool) -> None:
        if host in self.agents:
            unsent = any(is_attached(e) for worker in self.workers_on(host) for e in worker.up)
            self.reached["attached not forwarded"] += unsent
        super()._stop_agent(host, with_commits=with_commits)
        self._agent_is_gone(host)

    def _agent_is_gone(self, host: str) -> None:
        self.stores.attached.pop(host, None)
        self.forgotten.pop(host, None)
        self.stores.reports = [report for report in self.stores.reports if report[0] != host]
        self.orders = [order for order in self.orders if host not in (order[1].host, order[2])]
        self.judge.host_is_lost(host)

    def deliver(self, event: t.Event) -> None:
        if isinstance(event, t.HostsDiscovered) and self.has_racks:
            event = t.HostsDiscovered(tuple(host._replace(rack=_rack(host.name)) for host in event.hosts))
        if isinstance(event, t.AgentLost):
            self.judge.host_is_lost(event.host)
        super().deliver(event)
        if self.end is None and not self.restart.is_down and self.rng.random() < 0.01:
            stale_facts_have_no_effect(self.rng, self.m, self.now)

    def kept_on(self, host: str) -> tuple[tuple[t.SlotId, t.CommitId], ...]:
        return tuple(self.stores.kept.get(host, ()))

    def attached_on(self, host: str) -> list[t.Event]:
        return [t.FromWorker(*self.stores.attached[host])] if host in self.stores.attached else []

    def _fault(self) -> None:
        kind = self.rng.choice(("", "", "", "", "damage a copy", "damage a buffer", "full host"))
        if not kind:
            super()._fault()
            return
        kept = [t.CopyOf(host, *key) for host, copies in self.stores.kept.items() for key in copies]
        idle = [
            t.CopyOf(slot_id.host, slot_id, sealed[0])
            for slot_id, own in self.retained.items()
            for sealed in (own.commit, own.previous)
            if sealed is not None and not any(w.id.slot_id == slot_id for w in self.workers.values())
        ]
        if kind == "full host":
            self.full ^= {self.rng.choice(HOSTS)}
        elif kind == "damage a copy" and kept:
            copy = self.rng.choice(kept)
            self.judge.damages += copy not in self.stores.damaged_copies and copy.commit == self.judge.replicated
            self.stores.damaged_copies.add(copy)
        elif kind == "damage a buffer" and idle:
            self.stores.damaged_buffers.add(self.rng.choice(idle))
        else:
            return
        self.reached[f"fault {kind}"] += 1

    def _all_is_well_again(self) -> None:
        self.full.clear()
        self.has_faults = False
        super()._all_is_well_again()

    def _carry_out(self, effect: t.Effect) -> None:
        match effect:
            case t.Replicate(commit, copies):
                assert self.m.shards.replication is not None
                self._judge_racks(self.m.shards.replication.copies)
                self.reached["replication begun"] += 1
                self.reached["commit to come"] += self.m.shards.line is not None and commit > self.m.shards.line
                self.orders += [(commit, *copy) for copy in copies if self._is_served(copy[0].host)]
            case t.StopReplication():
                self.orders = [order for order in self.orders if not self._is_served(order[1].host)]
            case t.ForgetCopies(before, besides, host):
                self._forget(before, besides, host)
            case t.Note("training_resumed") if self.reached["fault damage a buffer"]:
                self.events.memory_is_damaged()
                super()._carry_out(effect)
            case _:
                super()._carry_out(effect)

    def _judge_racks(self, copies: frozenset[tuple[t.SlotId, str]]) -> None:
        """Check that a digest of one host has a copy in another rack, if there is another with a usable host.

        Hosts that refuse copies come last, so their rack may have none.
        """
        if any(until > self.now for _, until in self.m.shards.refusals):
            self.reached["refusing hosts come last"] += 1
            return
        hosts, racks = self.m.hosts, {host.name: host.rack for host in self.m.hosts.values()}
        usable = [host.name for host in hosts.values() if host.agent == "joined" and host.slots and not host.draining]
        digests = dict(self.m.shards.layouts[-1].digests)
        for digest in set(digests.values()):
            own = {slot_id.host for slot_id, each in digests.items() if each == digest}
            keepers = {host for slot_id, host in copies if digests[slot_id] == digest}
            # After a restart of the driver, the rack of a host that had left is not known.
            if len(own) == 1 and racks[min(own)] and {racks[host] for host in usable} - {racks[min(own)]}:
                assert len({racks[host] for host in keepers}) > 1, f"{keepers} keep the shards of {own}"
                self.reached["replica in another rack"] += 1

    def _is_served(self, host: str) -> bool:
        return self.agents.get(host) == "up" and self._reaches(host)

    def _forget(self, before: t.CommitId, besides: t.CommitId | None, only: str) -> None:
        for host in filter(self._is_served, [only] if only else list(self.agents)):
            self.forgotten[host] = max(before, self.forgotten.get(host, before))
            kept = self.stores.kept.get(host, {})
            for key in [key for key in kept if key[1] < before and key[1] != besides]:
                del kept[key]
            self.orders = [order for order in self.orders if order[0] >= before or order[1].host != host]

    def copies_act(self) -> bool:
        """Let an agent carry out one order, report damage, or die with a report that it has not forwarded."""
        if self.stores.reports and self.rng.random() < 0.3:
            host, report = self.stores.reports.pop(0)
            self._report(host, report)
            return True
        if self.has_faults and self.rng.random() < 0.02:
            unsent = {w.id.host for w in self.workers.values() if any(is_attached(e) for e in w.up)}
            hosts = [host for host in self.agents if host in unsent and host not in self.partition]
            if hosts:
                self._stop_agent(self.rng.choice(hosts), with_commits=self.rng.random() < 0.5)
                return True
        if not self.orders or self.rng.random() < 0.7:
            return False
        number = self.rng.randrange(len(self.orders))
        commit, slot_id, host = self.orders[number]
        source = self.stores.read(t.CopyOf(slot_id.host, slot_id, commit))
        newest = self.retained[slot_id].commit if slot_id in self.retained else None
        if source is None and newest is not None and newest[0] < commit:
            self.reached["copy waited for"] += 1
            return False
        del self.orders[number]
        is_kept = (slot_id, commit) in self.stores.kept.get(slot_id.host, {})
        if source is None or (self.rng.random() < 0.02 and not is_kept):
            self._report(slot_id.host, t.CopyDropped(slot_id.host, slot_id, commit))
            self.reached["copy dropped"] += 1
        elif self.agents.get(host) != "up":
            self._report(slot_id.host, t.CopyDropped(slot_id.host, slot_id, commit))
        elif commit < self.forgotten.get(host, commit):
            assert not self._is_served(slot_id.host), f"{host} refuses {commit}, which the driver has ordered"
            self.reached["old copy refused"] += 1
        elif host in self.full and host != slot_id.host:
            self._report(slot_id.host, t.CopyDropped(host, slot_id, commit, "no memory is left"))
            self.reached["copy refused"] += 1
        else:
            kept = self.stores.kept.setdefault(host, {})
            kept[slot_id, commit] = source
            commits = {each for slot, each in kept if slot == slot_id}
            assert len(commits) <= 4, f"host {host} keeps {commits} of {slot_id}"
            self.reached[f"{len(commits)} copies of a slot"] += 1
            self.stores.damaged_copies.discard(t.CopyOf(host, slot_id, commit))
            self._report(host, t.CopyKept(host, slot_id, commit))
        return True

    def _report(self, host: str, event: t.Event) -> None:
        if self._is_served(host) and not self.restart.is_down:
            self.deliver(event)


def _rack(host: str) -> str:
    return "first" if host == HOSTS[-1] else "second"


def play(seed: int, actions: int) -> dict[str, int]:
    """Play one schedule. Return the counted situations."""
    job = ShardedJob(seed)
    try:
        job.run(actions)
    except AssertionError as error:
        raise AssertionError(f"{job.story()}\n{error}") from error
    job.reached.update(job.books.reached)
    job.reached["sources gone"] += sum(w.unread for w in job.workers.values() if isinstance(w, ShardedWorker))
    return job.reached
