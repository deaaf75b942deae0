"""A model of a job with ``--divergence restore``: bits flip, and no job trains on from what they have spoiled.

The origin of a state's content names the flips in it. A rank with a flip has ``!``; what the others compute from its
gradients has ``~``. Undisturbed values have neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from elasticstate.core import types as t
from elasticstate.core.commits import is_rejected
from elasticstate.core.reattach import Remains
from tests.kit.simulation.job import HOSTS, Job
from tests.kit.simulation.judge import Judge
from tests.kit.simulation.workers import Content, Failed, Group, Worker

FLIPPED, SPOILED = "!", "~"


def is_clean(content: Content) -> bool:
    return not {FLIPPED, SPOILED}.intersection(content.origin)


def digest_of(content: Content) -> int:
    return hash(content) & (1 << 62) - 1


@dataclass(eq=False)
class RestoringWorker(Worker):
    """A worker that awaits verdicts before it overwrites commits, and goes back to a commit that is equal on all."""

    job: RestoringJob | None = None
    verdict: tuple[int, int, int] = (0, 0, 0)  # on its control page
    discarded: t.CommitId | None = None
    omitted: t.CommitId | None = None  # the last commit that was not made for want of a verdict
    last: t.CommitDigests | None = None  # the last message about a commit
    skips: bool = False  # the next commit is discarded, as if a tensor was written meanwhile

    @property
    def _job(self) -> RestoringJob:
        assert self.job is not None
        return self.job

    def _see_batch(self, contents: set[Content]) -> None:
        if len(contents) > 1 and SPOILED not in self.content.origin:
            self.content = self.content._replace(origin=self.content.origin + SPOILED)

    def _has_trained_batch(self) -> None:
        job = self._job
        if job.flips and self.groups[self.sentinel.generation].world.size > 1 and job.rng.random() < 0.05:
            job.flips -= 1
            job.reached["flip"] += 1
            origin = f"{self.content.origin}{FLIPPED}{job.flips}"
            self.content = self.content._replace(origin=origin)

    def _sync(self, generation: int) -> Iterator[bool]:
        world = self.groups[generation].world
        rank = [placement.worker for placement in world.members].index(self.id)
        held = self.commit[0] if self.commit is not None else None
        if world.start is not None and rank not in world.lacking and held != world.start:
            previous = self.retained.previous
            assert previous is not None, f"{self.id} does not hold {world.start}"
            assert previous[0] == world.start, f"{self.id} does not hold {world.start}"
            self.retained.commit, self.retained.previous = previous, None
            self._restore()
            self._job.reached["went back"] += 1
        yield True
        yield from super()._sync(generation)

    def _begins(self, group: Group) -> None:
        super()._begins(group)
        assert is_clean(self.content), f"I22: a world begins with {self.content.origin}"

    def _save(self, here: t.CommitId) -> Iterator[bool]:
        try:
            if self.discarded != here:
                yield from super()._save(here)
        except Failed:
            self._job.reached["no verdict at an interrupt"] += 1
        self._restore()

    def _commits(self, commit: t.CommitId) -> Iterator[bool]:
        job, is_alone = self._job, self.groups[commit.generation].world.size == 1
        newest = self.commit[0] if self.commit is not None else None
        if newest is not None and newest.generation == commit.generation and newest.tick and not is_alone:
            while (verdict := self._verdict(commit.generation))[1] < newest.tick:
                if self.sentinel.ended >= commit.generation:
                    raise Failed
                if job.restart.is_down or self.id.host in job.partition:
                    job.reached["no commit without a driver"] += 1
                    if self.sentinel.end_tick is not None:
                        raise Failed
                    before, self.omitted = self.omitted, commit
                    if before is not None and before.generation == commit.generation and before != commit:
                        self._send_digest(before, t.LACKED)
                    return
                yield False
            if newest.tick > verdict[0]:
                self.retained.commit = self.retained.previous
                job.reached["discarded"] += 1
        self.retained.previous = None
        yield True
        is_last = self.content.batches == self.script.batches  # nothing writes a tensor after it
        if self.skips and not is_alone and not is_last and self.sentinel.end_tick is None:
            self.skips, self.discarded = False, commit
            self._send_digest(commit, t.LACKED)
            return
        self._seal(commit)
        job.contents[self.id, commit] = self.content
        if not is_alone:
            self._send_digest(commit, digest_of(self.content))
        yield True

    def _gate(self, generation: int) -> Iterator[bool]:
        """Make up the last commit, which the driver compares before it opens the gate."""
        here = t.CommitId(generation, self.ticks)
        while self.omitted == here:
            if self.sentinel.ended >= generation:
                raise Failed
            if self._job.restart.is_down or self.id.host in self._job.partition:
                yield False
            else:
                self.omitted = None
                yield from self._commits(here)
                self._job.reached["made up"] += 1
        yield from super()._gate(generation)

    def _send_digest(self, commit: t.CommitId, digest: int) -> None:
        self.last = t.CommitDigests(commit.generation, ((commit.tick - 1, commit.tick, digest),), True)
        self.up.append(t.FromWorker(self.id, self.last))

    def _verdict(self, generation: int) -> tuple[int, int]:
        of, equal, compared = self.verdict
        return (equal, compared) if of == generation else (0, 0)

    def _seal(self, commit: t.CommitId) -> None:
        group = self.groups[commit.generation]
        before = group.sealed.get(self.id, t.CommitId(commit.generation, 0))
        super()._seal(commit)
        if commit.tick and group.world.size > 1:
            group.sealed[self.id] = before  # until it is compared

    def receive(self) -> None:
        if isinstance(message := self.down[0], t.CommitsCompared):
            self.down.popleft()
            self.verdict = message.generation, message.equal, message.compared
        else:
            super().receive()

    def report(self) -> tuple[int, list[t.FromWorker]]:
        """Return what the agent keeps for a new driver: the digests of the commits that are held, and the last one."""
        generation, lasting = super().report()
        held = [commit for commit in (self.retained.previous, self.commit) if commit is not None]
        digests = [
            t.CommitDigests(generation, ((commit.tick - 1, commit.tick, digest_of(content)),), True)
            for commit, content in held
            if commit.generation == generation and commit.tick and self.groups[generation].world.size > 1
        ]
        if self.last is not None and self.last.generation == generation and self.last not in digests:
            digests.append(self.last)
        return generation, [*(t.FromWorker(self.id, each) for each in digests), *lasting]


class RestoringJudge(Judge):
    """Judge of a job in which commits may be rejected."""

    job: RestoringJob

    def __init__(self, job: RestoringJob) -> None:
        super().__init__(job)

    def restart(self, remains: Remains) -> None:
        """Count less as made: nobody tells a new driver the digests of the dead, without which only the commit before
        the newest one in a slot is known to be equal."""
        super().restart(remains)
        job, group = self.job, self.job.groups.get(self.job.m.generation)
        if group is None:
            return
        members = [placement.worker for placement in group.world.members]
        if all(worker in job.workers and job.workers[worker].exit is None for worker in members):
            return
        slots = [job.retained[worker.slot_id] for worker in members if worker.slot_id in job.retained]
        before = [slot.previous[0] for slot in slots if slot.previous is not None]
        proven = max((c for c in before if c.generation == group.world.generation), default=None)
        job.sealed.clear()
        group.sealed = dict.fromkeys(group.sealed, proven) if proven is not None else {}

    def draining_worker_holds_nothing_back(self, draining_worker: t.WorkerId) -> None:
        worker = self.job.workers.get(draining_worker)
        if worker is None or worker.commit is None or not is_rejected(self.job.m, worker.commit[0]):
            super().draining_worker_holds_nothing_back(draining_worker)


class RestoringJob(Job):
    """A job with ``--divergence restore``."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.policy = replace(self.policy, divergence="restore")
        self.m = replace(self.m, policy=self.policy)
        self.script.uneven = False
        self.script.batches -= self.script.batches % self.script.every  # nothing compares what follows the last commit
        self.judge = RestoringJudge(self)
        self.hosts = tuple(t.HostSlots(host, rng.randint(1, 2)) for host in HOSTS[: rng.randint(1, 3)])
        self.flips = rng.choice((0, 1, 1, 2, 3))
        self.contents: dict[tuple[t.WorkerId, t.CommitId], Content] = {}  # of all commits that were sealed
        self.sealed: dict[t.CommitId, set[t.WorkerId]] = {}  # those whose digests of a commit have arrived

    def new_worker(self, worker: t.WorkerId, content: Content, retained: object) -> Worker:
        parts = (worker, self.script, self.groups, self.rng, content, retained)
        made = RestoringWorker(*parts, job=self)  # type: ignore[arg-type]
        made.skips = self.rng.random() < 0.1
        return made

    def deliver(self, event: t.Event) -> None:
        for part in event.events if isinstance(event, t.Several) else (event,):
            self._see_digest(part)
        super().deliver(event)

    def _see_digest(self, event: t.Event) -> None:
        """Count a commit as made when the digests of all have arrived, unless something is wrong with it.

        A digest that arrives after the world has ended, and the next one was formed without it, changes nothing: the
        core has said that the commit is not used.
        """
        if not (isinstance(event, t.FromWorker) and isinstance(event.body, t.CommitDigests)):
            return
        for _, tick, digest in event.body.digests:
            commit = t.CommitId(event.body.generation, tick)
            content = self.contents.get((event.worker, commit))
            if digest >= 0 and content is not None and is_clean(content) and not is_rejected(self.m, commit):
                group, sealed = self.groups[commit.generation], self.sealed.setdefault(commit, set())
                sealed.add(event.worker)
                if len(sealed) == len(group.world.members):
                    group.sealed = dict.fromkeys(sealed, commit)

    def _carry_out(self, effect: t.Effect) -> None:
        if isinstance(effect, t.CommitsCompared):
            self._see_verdict(effect)
            for worker in self.workers:
                self._send(worker, effect)
        super()._carry_out(effect)

    def _see_verdict(self, effect: t.CommitsCompared) -> None:
        commit = t.CommitId(effect.generation, effect.equal)
        members = [placement.worker for placement in self.groups[effect.generation].world.members]
        found = {self.contents.get((worker, commit)) for worker in members if worker in self.m.workers}
        assert not effect.equal or len(found) == 1, f"I22: {commit} counts as equal, and is not: {found}"
        self.reached["verdict on commits"] += 1


def play(seed: int, actions: int) -> Counter[str]:
    """Play one schedule. Return the counted situations."""
    job = RestoringJob(seed)
    try:
        job.run(actions)
        if job.end is not None and job.end.succeeded:
            contents = [worker.content for worker in job.workers.values() if worker.passed_gate]
            assert all(map(is_clean, contents)), f"I22: the job ends with {contents}"
    except AssertionError as error:
        raise AssertionError(f"{job.story()}\n{error}") from error
    job.reached.update(job.books.reached)
    return job.reached
