"""Workers of a sharded job that attach shards, and the copy stores of their agents. See sharded.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from elasticstate.core import types as t
from elasticstate.core.types import ShardLayout
from tests.kit.simulation.workers import Content, Failed, Group, Retained, Worker

Held = tuple[Content, int]
"""Content of a commit, and the digest of its shards."""


def is_attached(event: t.Event) -> bool:
    """Return True if a worker reports that all members have attached their shards."""
    return isinstance(event, t.FromWorker) and isinstance(event.body, t.Attached)


@dataclass
class Stores:
    """The copy stores of all agents, and the buffers that they read."""

    retained: dict[t.SlotId, Retained]
    kept: dict[str, dict[tuple[t.SlotId, t.CommitId], Held]] = field(default_factory=dict)
    attached: dict[str, tuple[t.WorkerId, t.Attached]] = field(
        default_factory=dict
    )  # by host: the report that its agent can repeat
    layouts: dict[int, ShardLayout] = field(default_factory=dict)  # of all worlds whose members have all attached
    damaged_copies: set[t.CopyOf] = field(default_factory=set)
    damaged_buffers: set[t.CopyOf] = field(default_factory=set)
    reports: list[tuple[str, t.CopyDropped | t.CommitDamaged]] = field(default_factory=list)  # of damage, on their way

    def look(self, copy: t.CopyOf) -> Held | None:
        """Return the content of a copy; None: it cannot be read."""
        kept = self.kept.get(copy.host, {}).get((copy.slot, copy.commit))
        if kept is not None and copy not in self.damaged_copies:
            return kept
        return self._in_buffer(copy) if copy not in self.damaged_buffers else None

    def _in_buffer(self, copy: t.CopyOf) -> Held | None:
        own = self.retained.get(copy.slot) if copy.host == copy.slot.host else None
        for sealed in (own.commit, own.previous) if own is not None else ():
            if sealed is not None and sealed[0] == copy.commit and own is not None:
                return sealed[1], own.digests.get(copy.commit, 0)
        return None

    def read(self, copy: t.CopyOf) -> Held | None:
        """Read a copy as its copy server does: damage is reported, and a damaged kept copy is removed."""
        if copy in self.damaged_copies:
            self.damaged_copies.discard(copy)
            if self.kept.get(copy.host, {}).pop((copy.slot, copy.commit), None) is not None:
                self.reports.append((copy.host, t.CopyDropped(copy.host, copy.slot, copy.commit, "damaged")))
        found = self.look(copy)
        if found is None and copy in self.damaged_buffers and self._in_buffer(copy) is not None:
            self.reports.append((copy.host, t.CommitDamaged(copy.slot, copy.commit)))
        return found

    def untold(self) -> set[t.CopyOf]:
        """Return the kept copies whose damage is found, but not reported yet."""
        dropped = (report for _, report in self.reports if isinstance(report, t.CopyDropped))
        return {t.CopyOf(report.host, report.slot, report.commit) for report in dropped}

    def resume(self, slot_id: t.SlotId) -> None:
        """Let a new worker verify the buffers of its slot."""
        own = self.retained[slot_id]
        intact = [
            sealed
            for sealed in (own.commit, own.previous)
            if sealed is not None and t.CopyOf(slot_id.host, slot_id, sealed[0]) not in self.damaged_buffers
        ]
        own.commit, own.previous = (*intact, None, None)[:2]


@dataclass(eq=False)
class ShardedWorker(Worker):
    """A worker whose state has attached values. ``shards``: number of different digests; None: one for each rank."""

    stores: Stores = field(default_factory=lambda: Stores({}))
    shards: int | None = None
    unread: int = 0  # sources that were gone when the worker wanted to read them
    digest: int = 0

    def _receive(self, group: Group, world: t.World) -> Iterator[bool]:
        if world.line is None:
            yield from super()._receive(group, world)
            return
        yield True
        self._go_to(group, world.line, world.sources)
        yield True
        yield from self._read_all(group, world.line)
        yield from self._collective("opened")  # nobody drops an older commit before all have verified the line
        if self.retained.commit is not None and self.rng.random() < 0.5:  # the older buffer grows while shards are read
            self.retained.previous = None
            yield True
        yield from self._read_all(group, world.line)

    def _read(self, group: Group, sources: Iterable[t.ShardSource]) -> list[Held]:
        """Read the copies of these sources on the hosts that this worker reaches."""
        copies = [source.copy for source in sources if group.has_link(self.id.host, source.copy.host)]
        return [held for copy in copies if (held := self.stores.read(copy)) is not None]

    def _read_all(self, group: Group, line: t.CommitId) -> Iterator[bool]:
        """Read a copy of each digest."""
        by_digest: dict[int, list[t.ShardSource]] = {}
        for source in group.world.sources:
            by_digest.setdefault(source.digest, []).append(source)
        for digest, sources in by_digest.items():
            found = self._read(group, sources)
            if not found:
                self.unread += 1
                raise Failed
            assert all(held == (self.content, digest) for held in found), f"other shards of {line} than named: {found}"
            yield True

    def _go_to(self, group: Group, line: t.CommitId, sources: tuple[t.ShardSource, ...]) -> None:
        """Make the plain values of the line the live state."""
        retained = self.retained
        if retained.commit is not None and retained.previous is not None and retained.previous[0] == line:
            retained.commit, retained.previous = retained.previous, None
        if retained.commit is not None and retained.commit[0] == line:
            self.content = retained.commit[1]
            return
        found = self._read(group, sources)
        if not found:
            self.unread += 1
            raise Failed
        self.content = found[0][0]

    def _seal_start(self, group: Group) -> Iterator[bool]:
        """Attach: seal (g, 0), wait for all, report the digests."""
        members = [placement.worker for placement in group.world.members]
        count = min(self.shards or len(members), len(members))
        digests = tuple(100 * count + rank % count + 1 for rank in range(len(members)))
        self.digest = digests[members.index(self.id)]
        start = t.CommitId(group.world.generation, 0)
        yield from self._commits(start)
        self._begins(group)
        yield from self._collective("attach")
        slots = (member.slot_id for member in members)
        self.stores.layouts[start.generation] = ShardLayout(start.generation, tuple(zip(slots, digests, strict=True)))
        report = t.Attached(start.generation, digests)
        self.up.append(t.FromWorker(self.id, report))
        self.stores.attached[self.id.host] = self.id, report
        yield True

    def _commits(self, commit: t.CommitId) -> Iterator[bool]:
        self.retained.previous = None
        yield True
        self.retained.digests[commit] = self.digest
        self._seal(commit)
        yield True
