"""A model of a worker process: main thread and sentinel as two sequences of atomic steps.

The content of a state is its history: its origin, the number of batches seen, and a hash over the generations and ticks
of these batches. Two replicas that have diverged once never agree again, so every collective can detect it (I11).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from elasticstate.core import types as t

HOLD = 1 << 63


class Content(NamedTuple):
    """Content of a replica: equal means bitwise equal."""

    origin: str
    batches: int
    history: int


@dataclass
class Script:
    """The user's program: ``batches`` steps, with a commit after every ``every`` steps and a check after the others."""

    batches: int
    every: int
    bug_at: int | None = None  # all ranks raise in this batch, each time they reach it
    uneven: bool = False  # ranks run out of inputs at different ticks, and end the ticks of the others (torch's Join)


class Group:
    """The process group of a generation: collectives complete when all members have arrived."""

    def __init__(self, world: t.World, cut_links: Collection[frozenset[str]] = ()) -> None:
        """``cut_links``: pairs of hosts that cannot reach each other, as it is now."""
        self.world = world
        self._cut_links = cut_links
        self._hosts = {placement.worker.host for placement in world.members}
        self.arrived: dict[object, dict[t.WorkerId, Content]] = {}
        self.cut: set[t.WorkerId] = set()  # members whose sockets are closed
        self.synced: dict[t.WorkerId, Content] = {}  # the content from which each member began to train
        self.sealed: dict[t.WorkerId, t.CommitId] = {}  # the newest commit of each member in this generation
        self.ticks: dict[t.WorkerId, int] = {}  # the ticks that each member has counted
        self.out: set[t.WorkerId] = set()  # members that are out of inputs: they train nothing and seal nothing
        self.reachable: bool | None = None  # True: a member was reachable since the end; None: not ended
        self.ticks_after: int | None = None  # ticks completed after a newer world was published; None: no newer world

    def arrive(self, key: object, worker: t.WorkerId, content: Content) -> None:
        was_complete = self.complete(key)
        self.arrived.setdefault(key, {})[worker] = content
        if self.ticks_after is None or was_complete or not self.complete(key) or not isinstance(key, tuple):
            return
        self.ticks_after += 1
        assert self.reachable, f"I16: {key} of {self.world.generation}, all of it unreachable, after a newer world"
        assert self.ticks_after <= 1, f"I16: {key} of {self.world.generation}, the second after a newer world"

    def count(self, worker: t.WorkerId, ticks: int) -> None:
        """Record that ``worker`` has completed its tick number ``ticks``."""
        assert ticks == self.ticks.get(worker, 0) + 1, f"I16: {worker} counts {ticks} after {self.ticks.get(worker)}"
        self.ticks[worker] = ticks

    def made(self) -> t.CommitId | None:
        """Return the newest commit that all keepers have sealed, except members that are out of inputs."""
        if len(self.sealed) < len(self.world.keepers or self.world.members):
            return None
        return min(commit for worker, commit in self.sealed.items() if worker not in self.out)

    def has_link(self, host: str, peer: str) -> bool:
        """Return True if two hosts reach each other now."""
        return frozenset((host, peer)) not in self._cut_links

    def complete(self, key: object) -> bool:
        if self._cut_links and any(link <= self._hosts for link in self._cut_links):
            return False
        parties = self.world.keepers if key == "sync" else ()
        return len(self.arrived.get(key, ())) == len(parties or self.world.members)


class Failed(Exception):
    """CollectiveError, or an error raised by Gloo."""


class Interrupted(Exception):
    """HostsUpdatedInterrupt."""


class OwnError(Exception):
    """An exception of the user's code."""


@dataclass
class Sentinel:
    """State of a worker's sentinel, with the same names as in the real one."""

    generation: int = 0
    word: int = 0
    held: bool = False
    end_tick: int | None = None
    ended: int = 0
    own_error: int = 0
    open_gate: int = 0
    world: t.World | None = None
    leave: bool = False
    place: t.Place = t.Place.BOOT


@dataclass
class Retained:
    """The two buffers of a slot, which outlive its workers."""

    commit: tuple[t.CommitId, Content] | None = None
    previous: tuple[t.CommitId, Content] | None = None
    digests: dict[t.CommitId, int] = field(default_factory=dict)  # of the shards in a sharded job's commits


@dataclass(eq=False)
class Worker:
    """One process. ``step`` runs the main thread to its next wait or atomic action; ``receive`` takes one message."""

    id: t.WorkerId
    script: Script
    groups: dict[int, Group]
    rng: random.Random
    content: Content
    retained: Retained
    sentinel: Sentinel = field(default_factory=Sentinel)
    up: deque[t.Event] = field(default_factory=deque)  # to the core, in order
    down: deque[t.Effect] = field(default_factory=deque)  # from the core, in order
    exit: t.WorkerExited | None = None  # set: dead
    frozen: bool = False
    busy_until: float = 0.0  # the end of its present batch
    crash: bool = False  # fault: the next batch raises an exception of this worker's own
    lasting: list[t.FromWorker] = field(default_factory=list)  # the lasting messages: its agent can send them again
    restored: int = 0
    passed_gate: bool = False
    is_out: bool = False  # out of inputs in its last generation
    names: int = 0  # digest of its value names; 0: it reads no commits of other workers

    def __post_init__(self) -> None:
        self._main = self._run()
        self._moved, self._moved_at = (t.Place.BOOT, 0, 0), 0.0
        self._restore()  # from the retained commit of its slot
        self.noticed = self.rng.random() < 0.5  # True: the worker detects the closed socket of another one by itself

    # ------------------------------------------------------------------------------------------ the main thread

    def step(self) -> bool:
        """Run one step of the main thread. Return False if it could only wait."""
        moved = next(self._main, None)
        return bool(moved)

    def die(self, exit_code: int | None, signal: int | None, error: str = "") -> None:
        self.exit = t.WorkerExited(self.id, 1, exit_code, signal, error)
        self._cut()

    def _cut(self) -> None:
        group = self.groups.get(self.sentinel.generation)
        if group is not None:
            group.cut.add(self.id)

    def _run(self) -> Iterator[bool]:
        """Run the loop of ``run``. Yield True after an action, False while the worker waits."""
        self.up.append(t.WorkerUsesRun(self.id))
        yield True  # boot
        while True:
            yield from self._ready()
            if self.exit is not None:
                return
            generation = self.sentinel.generation
            try:
                yield from self._train(generation)
                yield from self._gate(generation)
                self.die(0, None)
                return
            except Interrupted:
                here = t.CommitId(generation, self.ticks)
                if self.is_out:
                    self._restore()
                else:
                    yield from self._save(here)
            except Failed:
                self._restore()
                yield True
            except OwnError:
                self._send(t.FromWorker(self.id, t.GenerationFailure(generation, False, "ValueError: own")))
                while self.sentinel.ended < generation and self.sentinel.own_error < generation:
                    yield False
                if self.sentinel.own_error >= generation:
                    self.die(1, None, "ValueError: own")
                    return
                self._restore()
            self._cut()
            yield True

    def _send(self, message: t.FromWorker) -> None:
        self.up.append(message)
        self.lasting.append(message)

    @property
    def commit(self) -> tuple[t.CommitId, Content] | None:
        return self.retained.commit

    @property
    def ticks(self) -> int:
        return self.sentinel.word & (HOLD - 1)

    def _save(self, here: t.CommitId) -> Iterator[bool]:
        """Save at the tick at which all members leave."""
        if self.commit is None or self.commit[0] != here:
            yield from self._commits(here)

    def _commits(self, commit: t.CommitId) -> Iterator[bool]:
        self._seal(commit)
        yield True

    def _seal(self, commit: t.CommitId) -> None:
        self.retained.previous, self.retained.commit = self.retained.commit, (commit, self.content)
        group = self.groups[commit.generation]
        group.sealed[self.id] = commit
        if commit.tick == 1:
            self.up.append(t.FromWorker(self.id, t.CommitSealed(commit)))

    def _restore(self) -> None:
        if self.commit is not None:
            self.content = self.commit[1]
            self.restored += 1

    def _ready(self) -> Iterator[bool]:
        sentinel = self.sentinel
        sentinel.place = t.Place.REGROUP
        commit, previous = self.retained.commit, self.retained.previous
        if commit is not None:
            assert self.content == commit[1], "I10: READY, but the live state is not the commit"
        self._send(
            t.FromWorker(
                self.id,
                t.Ready(
                    sentinel.generation,
                    commit[0] if commit else None,
                    previous[0] if previous else None,
                    f"{self.id}:1",
                    self.ticks,
                    behind=self.is_out,
                    names=self.names,
                ),
            )
        )
        joined = sentinel.generation
        while sentinel.world is None or sentinel.world.generation <= joined:
            if sentinel.leave:
                self.die(0, None)
                return
            yield False
        world = sentinel.world
        self.is_out = False
        sentinel.generation, sentinel.word, sentinel.held, sentinel.end_tick = world.generation, 0, False, None
        yield True

    def _collective(self, key: object) -> Iterator[bool]:
        """Arrive, and wait for all members. Fail if the generation is severed or the worker detects a lost peer."""
        generation = self.sentinel.generation
        group = self.groups[generation]
        group.arrive(key, self.id, self.content)
        while True:
            if self.sentinel.ended >= generation:
                raise Failed
            if group.complete(key) and not (group.cut and self.rng.random() < 0.3):
                yield True
                return
            if group.cut - {self.id} and self.noticed:
                self.sentinel.ended = max(self.sentinel.ended, generation)
                self._cut()
                self._send(t.FromWorker(self.id, t.GenerationFailure(generation, True, "Connection closed by peer")))
                raise Failed
            yield False

    def _sync(self, generation: int) -> Iterator[bool]:
        group = self.groups[generation]
        world = group.world
        yield from self._collective("init")
        yield from self._receive(group, world)
        yield from self._seal_start(group)
        yield True

    def _receive(self, group: Group, world: t.World) -> Iterator[bool]:
        if not world.lacking:
            return
        yield from self._collective("sync")
        members = [placement.worker for placement in world.members]
        if members.index(self.id) in world.lacking:
            self.content = Content("half written", 0, 0)
            yield True
            self.content = group.arrived["sync"][members[world.root]]

    def _seal_start(self, group: Group) -> Iterator[bool]:
        self._seal(t.CommitId(group.world.generation, 0))
        self._begins(group)
        yield from ()

    def _begins(self, group: Group) -> None:
        group.synced[self.id] = self.content
        assert len(set(group.synced.values())) == 1, "I11: different states begin to train"

    def _train(self, generation: int) -> Iterator[bool]:
        yield from self._sync(generation)
        self.sentinel.place = t.Place.TRAIN
        group = self.groups[generation]
        batches = self.content.batches
        while batches < self.script.batches:
            if self.script.uneven and len(group.out) < group.world.size - 1 and self.rng.random() < 0.1:
                group.out.add(self.id)
                self.is_out = True
            if self.crash or self.script.bug_at == batches:
                self.crash = False
                raise OwnError
            key = ("tick", self.ticks)
            yield from self._collective(key)
            contents = {content for worker, content in group.arrived[key].items() if worker not in group.out}
            batches += 1
            if not self.is_out:
                self._see_batch(contents)
                history = hash((self.content.history, generation, self.ticks))
                self.content = Content(self.content.origin, batches, history)
                self._has_trained_batch()
                yield True
                if batches % self.script.every == 0:
                    yield from self._commits(t.CommitId(generation, self.ticks + 1))
            yield from self._tick(generation)
        if self.script.uneven:
            yield from self._follow_the_last(generation)

    def _see_batch(self, contents: set[Content]) -> None:
        """See the contents of all ranks that train a batch together."""
        assert len(contents) <= 1, f"I11: the replicas have diverged: {contents}"

    def _has_trained_batch(self) -> None:
        """Do nothing: a subclass may have faults here."""

    def _follow_the_last(self, generation: int) -> Iterator[bool]:
        """Send the state to members that ran out of inputs early, as the commit of one more tick."""
        group, key = self.groups[generation], ("join", self.ticks)
        yield from self._collective(key)
        self.content = next(content for worker, content in group.arrived[key].items() if worker not in group.out)
        self._seal(t.CommitId(generation, self.ticks + 1))
        self.is_out = False
        yield True
        yield from self._tick(generation)

    def _tick(self, generation: int) -> Iterator[bool]:
        """End a tick: fetch_add, and a check of the returned word."""
        sentinel = self.sentinel
        old = sentinel.word
        sentinel.word += 1
        ticks = (old & (HOLD - 1)) + 1
        self.groups[generation].count(self.id, ticks)
        yield True
        if not (old & HOLD or old == 0):
            return
        if ticks == 1:
            self.up.append(t.FromWorker(self.id, t.First(generation, self.rng.random(), self.rng.random())))
        while True:
            if sentinel.ended >= generation:
                raise Failed
            if sentinel.end_tick is not None:
                assert ticks <= sentinel.end_tick, "a worker has passed the tick that all leave at"
                if ticks == sentinel.end_tick:
                    raise Interrupted
                return
            if not sentinel.held:
                return
            yield False

    def _gate(self, generation: int) -> Iterator[bool]:
        self.sentinel.place = t.Place.GATE
        self._send(t.FromWorker(self.id, t.Gate(generation)))
        while self.sentinel.open_gate < generation:
            if self.sentinel.ended >= generation:
                raise Failed
            yield False
        self.passed_gate = True
        yield True

    # ------------------------------------------------------------------------------------------ the sentinel

    def receive(self) -> None:
        """Take one message, as the sentinel does at any time between two steps of the main thread."""
        sentinel, message = self.sentinel, self.down.popleft()
        match message:
            case t.World() as world:
                sentinel.world = world
            case t.Hold(generation, number) if generation == sentinel.generation:
                sentinel.held = True
                ticks, sentinel.word = self.ticks, sentinel.word | HOLD
                self.up.append(
                    t.FromWorker(self.id, t.HoldAnswer(generation, ticks, sentinel.place == t.Place.GATE, number))
                )
            case t.Release(generation) if generation == sentinel.generation:
                sentinel.held = False
                if sentinel.end_tick is None and sentinel.ended < generation:
                    sentinel.word &= HOLD - 1
            case t.End(generation, None, _) | t.Sever(_, generation, _):
                sentinel.ended = max(sentinel.ended, generation)
                sentinel.word |= HOLD
                if sentinel.ended >= sentinel.generation:
                    self._cut()
            case t.End(generation, tick, _) if generation == sentinel.generation:
                sentinel.end_tick = tick
                sentinel.word |= HOLD
            case t.ConfirmOwnError(_, generation):
                sentinel.own_error = max(sentinel.own_error, generation)
            case t.OpenGate(generation):
                sentinel.open_gate = max(sentinel.open_gate, generation)
            case t.Leave():
                assert sentinel.place == t.Place.REGROUP, "LEAVE inside a generation"
                sentinel.leave = True
            case t.StopWorker(kill=kill):
                self.die(None, 9 if kill else 15)

    # ------------------------------------------------------------------------------------------ its agent

    def lose_messages(self) -> None:
        """Lose messages of an unreachable host: some of the messages to it, and all from it. The agent ends a hold."""
        for _ in range(self.rng.randint(0, len(self.down))):
            self.down.pop()
        sentinel = self.sentinel
        held = sentinel.generation if sentinel.held and sentinel.end_tick is None else 0
        for message in self.down:
            match message:
                case t.Hold(generation):
                    held = generation
                case t.Release() | t.End():
                    held = 0
        if held:
            self.down.append(t.Release(held))
        self.up.clear()

    def report(self) -> tuple[int, list[t.FromWorker]]:
        """Return the newest generation whose world the worker received, and its lasting messages since then."""
        worlds = [message for message in self.down if isinstance(message, t.World)]
        world = worlds[-1] if worlds else self.sentinel.world
        given = world.generation if world is not None else 0
        return given, [event for event in self.lasting if getattr(event.body, "generation", -1) == given]

    def heartbeat(self, now: float) -> t.FromWorker:
        commit, previous = (held[0] if held else None for held in (self.commit, self.retained.previous))
        place, generation = self.sentinel.place, self.sentinel.generation
        if self._moved != (place, generation, self.ticks):
            self._moved, self._moved_at = (place, generation, self.ticks), now
        stamp = t.Stamp(place, generation, self.ticks, commit, previous=previous, still_s=now - self._moved_at)
        return t.FromWorker(self.id, stamp)
