"""A model of a worker process: main thread and sentinel as two sequences of atomic steps.

The content of a state is its history: who made it, how many batches it has seen, and a hash over the generations and
ticks in which it saw them. Two replicas that have diverged once never agree again, so every collective can tell (I11).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from elasticstate.core import types as t

HOLD = 1 << 63


class Content(NamedTuple):
    """What a replica holds: equal means bitwise equal."""

    origin: str
    batches: int
    history: int


@dataclass
class Script:
    """The user's program: ``batches`` steps, a commit every ``every`` of them, a check on the others."""

    batches: int
    every: int
    bug_at: int | None = None  # all ranks raise in this batch, whenever they come to it


class Group:
    """The process group of a generation: collectives complete when all members have arrived."""

    def __init__(self, world: t.World) -> None:
        self.world = world
        self.arrived: dict[object, dict[t.WorkerId, Content]] = {}
        self.cut: set[t.WorkerId] = set()  # members whose sockets are closed
        self.synced: dict[t.WorkerId, Content] = {}  # what each began to train from
        self.sealed: dict[t.WorkerId, t.CommitId] = {}  # the newest commit that each has made here
        self.ticks: dict[t.WorkerId, int] = {}  # how many each has counted
        self.in_reach: bool | None = None  # whether any member has been since it was ended; None: not ended
        self.ticks_after: int | None = None  # completed since there is a newer world; None: there is none

    def arrive(self, key: object, worker: t.WorkerId, content: Content) -> None:
        was_complete = self.complete(key)
        self.arrived.setdefault(key, {})[worker] = content
        if self.ticks_after is None or was_complete or not self.complete(key) or not isinstance(key, tuple):
            return
        self.ticks_after += 1
        assert self.in_reach, f"I16: {key} of {self.world.generation}, all of it out of reach, after a newer world"
        assert self.ticks_after <= 1, f"I16: {key} of {self.world.generation}, the second after a newer world"

    def count(self, worker: t.WorkerId, ticks: int) -> None:
        """``worker`` has completed its tick number ``ticks``."""
        assert ticks == self.ticks.get(worker, 0) + 1, f"I16: {worker} counts {ticks} after {self.ticks.get(worker)}"
        self.ticks[worker] = ticks

    def made(self) -> t.CommitId | None:
        """The newest commit that all members have sealed."""
        return min(self.sealed.values()) if len(self.sealed) == self.world.size else None

    def complete(self, key: object) -> bool:
        return len(self.arrived.get(key, ())) == self.world.size


class Failed(Exception):
    """CollectiveError, or what Gloo raises."""


class Interrupted(Exception):
    """HostsUpdatedInterrupt."""


class OwnError(Exception):
    """An exception of the user's code."""


@dataclass
class Sentinel:
    """What the sentinel of a worker knows; the same words as the real one."""

    generation: int = 0
    word: int = 0
    held: bool = False
    end_tick: int | None = None
    ended: int = 0
    own_error: int = 0
    open_gate: int = 0
    world: t.World | None = None
    leave: bool = False
    place: str = "boot"


@dataclass
class Memory:
    """The two buffers of a slot: they outlive its workers."""

    commit: tuple[t.CommitId, Content] | None = None
    previous: tuple[t.CommitId, Content] | None = None


@dataclass(eq=False)
class Worker:
    """One process. ``step`` runs the main thread to its next wait or atomic action; ``receive`` one message."""

    id: t.WorkerId
    script: Script
    groups: dict[int, Group]
    rng: random.Random
    content: Content
    memory: Memory
    sentinel: Sentinel = field(default_factory=Sentinel)
    up: deque[t.Event] = field(default_factory=deque)  # to the core, in order
    down: deque[t.Effect] = field(default_factory=deque)  # from the core, in order
    exit: t.WorkerExited | None = None  # set: dead
    frozen: bool = False
    busy_until: float = 0.0  # its batch takes so long
    crash: bool = False  # fault: the next batch raises an exception of this worker's own
    words: list[t.Event] = field(default_factory=list)  # the lasting ones: its agent can say them again
    restored: int = 0
    passed_gate: bool = False

    def __post_init__(self) -> None:
        self._main = self._run()
        self._restore()  # what the last one in its slot has left
        self.noticed = self.rng.random() < 0.5  # whether it sees a cut of another's socket by itself

    # ------------------------------------------------------------------------------------------ the main thread

    def step(self) -> bool:
        """One step of the main thread. False: it could only wait."""
        moved = next(self._main, None)
        return bool(moved)

    def die(self, exit_code: int | None, signal: int | None, error: str = "") -> None:
        self.exit = t.WorkerExited(self.id, exit_code, signal, error)
        self._cut()

    def _cut(self) -> None:
        group = self.groups.get(self.sentinel.generation)
        if group is not None:
            group.cut.add(self.id)

    def _run(self) -> Iterator[bool]:
        """The loop of ``run``. Yields True after something was done, False while it waits."""
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
                if self.commit is None or self.commit[0] != here:
                    self._seal(here)
            except Failed:
                self._restore()
                yield True
            except OwnError:
                self._say(t.FailureReported(self.id, generation, False, "ValueError: own"))
                while self.sentinel.ended < generation and self.sentinel.own_error < generation:
                    yield False
                if self.sentinel.own_error >= generation:
                    self.die(1, None, "ValueError: own")
                    return
                self._restore()
            self._cut()
            yield True

    def _say(self, word: t.Event) -> None:
        self.up.append(word)
        self.words.append(word)

    @property
    def commit(self) -> tuple[t.CommitId, Content] | None:
        return self.memory.commit

    @property
    def ticks(self) -> int:
        return self.sentinel.word & (HOLD - 1)

    def _seal(self, commit: t.CommitId) -> None:
        self.memory.previous, self.memory.commit = self.memory.commit, (commit, self.content)
        group = self.groups[commit.generation]
        group.sealed[self.id] = commit
        if commit.tick == 1:
            self.up.append(t.CommitSealed(self.id, commit))

    def _restore(self) -> None:
        if self.commit is not None:
            self.content = self.commit[1]
            self.restored += 1

    def _ready(self) -> Iterator[bool]:
        sentinel = self.sentinel
        sentinel.place = "regroup"
        commit, previous = self.memory.commit, self.memory.previous
        if commit is not None:
            assert self.content == commit[1], "I10: READY, but the live state is not the commit"
        self._say(
            t.WorkerReady(
                self.id,
                sentinel.generation,
                commit[0] if commit else None,
                previous[0] if previous else None,
                f"{self.id}:1",
                self.ticks,
            )
        )
        joined = sentinel.generation
        while sentinel.world is None or sentinel.world.generation <= joined:
            if sentinel.leave:
                self.die(0, None)
                return
            yield False
        world = sentinel.world
        sentinel.generation, sentinel.word, sentinel.held, sentinel.end_tick = world.generation, 0, False, None
        yield True

    def _collective(self, key: object) -> Iterator[bool]:
        """Arrive, and wait for all; or fail, when the generation is severed or a peer is seen to be gone."""
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
                self._say(t.FailureReported(self.id, generation, True, "Connection closed by peer"))
                raise Failed
            yield False

    def _sync(self, generation: int) -> Iterator[bool]:
        group = self.groups[generation]
        world = group.world
        yield from self._collective("init")
        if world.lacking:
            yield from self._collective("sync")
            members = [placement.worker for placement in world.members]
            if members.index(self.id) in world.lacking:
                self.content = Content("half written", 0, 0)
                yield True
                self.content = group.arrived["sync"][members[world.root]]
        self._seal(t.CommitId(generation, 0))
        group.synced[self.id] = self.content
        assert len(set(group.synced.values())) == 1, f"I11: different states begin to train in {generation}"
        yield True

    def _train(self, generation: int) -> Iterator[bool]:
        yield from self._sync(generation)
        self.sentinel.place = "train"
        while self.content.batches < self.script.batches:
            if self.crash or self.script.bug_at == self.content.batches:
                self.crash = False
                raise OwnError
            key = ("tick", self.ticks)
            yield from self._collective(key)
            contents = self.groups[generation].arrived[key]
            assert len(set(contents.values())) == 1, f"I11: the replicas have diverged: {contents}"
            history = hash((self.content.history, generation, self.ticks))
            self.content = Content(self.content.origin, self.content.batches + 1, history)
            yield True
            if self.content.batches % self.script.every == 0:
                self._seal(t.CommitId(generation, self.ticks + 1))
                yield True
            yield from self._tick(generation)

    def _tick(self, generation: int) -> Iterator[bool]:
        """The end of a tick: fetch_add, and a look at the returned word."""
        sentinel = self.sentinel
        old = sentinel.word
        sentinel.word += 1
        ticks = (old & (HOLD - 1)) + 1
        self.groups[generation].count(self.id, ticks)
        yield True
        if not (old & HOLD or old == 0):
            return
        if ticks == 1:
            self.up.append(t.FirstTick(self.id, generation))
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
        self.sentinel.place = "gate"
        self._say(t.GateEntered(self.id, generation))
        while self.sentinel.open_gate < generation:
            if self.sentinel.ended >= generation:
                raise Failed
            yield False
        self.passed_gate = True
        yield True

    # ------------------------------------------------------------------------------------------ the sentinel

    def receive(self) -> None:
        """Take one message, as the sentinel does at any moment between two steps of the main thread."""
        sentinel, message = self.sentinel, self.down.popleft()
        match message:
            case t.PublishWorld(world):
                sentinel.world = world
            case t.Hold(generation, number) if generation == sentinel.generation:
                sentinel.held = True
                ticks, sentinel.word = self.ticks, sentinel.word | HOLD
                self.up.append(t.HoldAnswered(self.id, generation, ticks, sentinel.place == "gate", number))
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
                assert sentinel.place == "regroup", "told to leave out of a generation"
                sentinel.leave = True
            case t.StopWorker(kill=kill):
                self.die(None, 9 if kill else 15)

    # ------------------------------------------------------------------------------------------ its agent

    def lose_messages(self) -> None:
        """Its host is out of reach: of what is on its way to it a random rest is lost, and the agent ends a hold."""
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

    def report(self) -> tuple[int, list[t.Event]]:
        """The newest generation that it was given a world of, and its lasting words since then."""
        worlds = [message.world for message in self.down if isinstance(message, t.PublishWorld)]
        world = worlds[-1] if worlds else self.sentinel.world
        given = world.generation if world is not None else 0
        return given, [word for word in self.words if getattr(word, "generation", -1) == given]

    def heartbeat(self) -> t.Heartbeat:
        commit = self.commit[0] if self.commit else None
        return t.Heartbeat(self.id, self.sentinel.place, self.sentinel.generation, self.ticks, commit)
