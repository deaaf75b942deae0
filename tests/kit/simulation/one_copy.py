"""A model of a job with --one-copy-per-host: keepers write commits, followers read those of their host's keeper.

A keeper destroys its older commit when it begins a new one, as state/snapshot.py does, so a follower can meet a buffer
that is being overwritten. The judge is that of other jobs: no commit that all keepers have sealed is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from elasticstate.core import types as t
from tests.kit.simulation.job import HOSTS, Job
from tests.kit.simulation.workers import Content, Failed, Group, OwnError, Retained, Worker


@dataclass(eq=False)
class OneCopyWorker(Worker):
    """A worker that may be a follower."""

    slots: dict[t.SlotId, Retained] = field(default_factory=dict)  # of all hosts
    keeps: bool = True
    compared: int = 0  # the newest generation in which the ranks have compared their states
    is_dirty: bool = False  # the live state is that of no commit, nor the initial one
    reached: Counter[str] = field(default_factory=Counter)

    def _restore(self) -> None:
        super()._restore()
        self.is_dirty = self.is_dirty and self.commit is None

    def _receive(self, group: Group, world: t.World) -> Iterator[bool]:
        rank = [placement.worker for placement in world.members].index(self.id)
        self.keeps = world.keeps(rank)
        if self.keeps:
            if any(world.keeps(lacking) for lacking in world.lacking):
                yield from super()._receive(group, world)
        elif rank in world.lacking:
            yield from self._read(world, world.members[world.keeper_of(rank)].worker.slot_id)

    def _read(self, world: t.World, keeper: t.SlotId) -> Iterator[bool]:
        """Load the keeper's commit into the live state, as soon as it is sealed."""
        assert keeper.host == self.id.host, "a follower reads the memory of its host"
        start = t.CommitId(world.generation, 0)
        while (content := self._held_by(keeper, start)) is None:
            if self.sentinel.ended >= world.generation:
                raise Failed
            yield False
        self.content, self.is_dirty = Content("half written", 0, 0), True
        yield True
        if self._held_by(keeper, start) != content:
            self.reached["torn read"] += 1
            raise Failed
        self.content = content
        self.reached["read from the keeper"] += 1

    def _held_by(self, slot_id: t.SlotId, commit: t.CommitId) -> Content | None:
        retained = self.slots.get(slot_id)
        held = (retained.commit, retained.previous) if retained is not None else ()
        return next((sealed[1] for sealed in held if sealed is not None and sealed[0] == commit), None)

    def _seal_start(self, group: Group) -> Iterator[bool]:
        members = [placement.worker for placement in group.world.members]
        if members[group.world.root] == self.id and self.commit is None and self.is_dirty:
            self.reached["no state to begin with"] += 1
            raise OwnError  # else the job would begin anew from a state that is none
        if self.keeps:
            self.is_dirty = False
            yield from super()._seal_start(group)
        else:
            self.is_dirty = True  # from the first batch on
            self._begins(group)

    def _save(self, here: t.CommitId) -> Iterator[bool]:
        if self.keeps:
            yield from super()._save(here)
        else:
            self._restore()
            yield True

    def _commits(self, commit: t.CommitId) -> Iterator[bool]:
        if self.keeps:
            self.retained.previous = None
            yield True
            self._seal(commit)
            yield True
        if self.sentinel.place == t.Place.TRAIN and self.compared < commit.generation and self.ticks < commit.tick:
            yield from self._collective("compare")
            self.compared = commit.generation
            if not self.keeps:
                self.retained.commit = self.retained.previous = None


class OneCopyJob(Job):
    """A job with --one-copy-per-host."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.policy = replace(self.policy, one_copy_per_host=True)
        self.m = replace(self.m, policy=self.policy)
        self.script.uneven = False
        self.hosts = tuple(t.HostSlots(host, rng.randint(1, 3)) for host in HOSTS[: rng.randint(1, 3)])

    def new_worker(self, worker: t.WorkerId, content: Content, retained: Retained) -> Worker:
        parts = (worker, self.script, self.groups, self.rng, content, retained)
        return OneCopyWorker(*parts, names=7, slots=self.retained, reached=self.reached)

    def _carry_out(self, effect: t.Effect) -> None:
        if isinstance(effect, t.World):
            self._see_world(effect)
        super()._carry_out(effect)

    def _see_world(self, world: t.World) -> None:
        hosts = {placement.worker.host for placement in world.members}
        kept = {world.members[rank].worker.host for rank in world.keepers}
        assert kept == hosts, f"hosts without a keeper: {hosts - kept}"
        assert world.root in world.keepers, "the root keeps commits"
        assert len(world.keepers) <= len(hosts) + 1, f"too many keepers: {world.keepers}"
        if len(world.keepers) > len(hosts):
            assert self.m.workers[world.members[world.root].worker].draining, "only a root that drains has a second one"
            self.reached["keeper beside a draining root"] += 1
        followers = [rank for rank in range(world.size) if rank not in world.keepers]
        assert set(followers).intersection(world.lacking) <= set(world.near), "followers read from their host"
        self.reached["follower"] += bool(followers)
        if self.m.generation > 1 and not any(self._lives(rank, world) for rank in world.keepers):
            self.reached["no keeper survived"] += bool(followers)

    def _lives(self, rank: int, world: t.World) -> bool:
        """Return True if the member was in an earlier world."""
        worker = self.workers.get(world.members[rank].worker)
        return worker is not None and worker.sentinel.generation > 0


def play(seed: int, actions: int) -> dict[str, int]:
    """Play one schedule. Return the counted situations."""
    job = OneCopyJob(seed)
    try:
        job.run(actions)
    except AssertionError as error:
        raise AssertionError(f"{job.story()}\n{error}") from error
    job.reached.update(job.books.reached)
    return job.reached
