"""Plan of a durable copy: which agent saves which commits.

A replicated state is one part: the newest commit of the root. A sharded state has a part for each shard digest, all of
one commit. An agent that holds it saves it: in the buffers of a slot, or as a kept copy. The load of the hosts is even.

Workers overwrite a commit with the second one after it. If they commit often, the commit that all have sealed, as last
reported, may be gone when the orders arrive. So the orders then name an id that is still to come, and all agents save
the first commit from there on. If they commit rarely, that would be a long wait, and the last commit is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from elasticstate.core.layouts import ShardLayout
from elasticstate.core.line import find_line, is_sharded
from elasticstate.core.membership import Membership
from elasticstate.core.records import Over, Running, Worker
from elasticstate.core.types import CommitId, CopyOf, ShardSource, SlotId, WorkerId
from elasticstate.net.messages import DurablePart

_RARELY_S = 10.0  # between two commits
_PACE_S = 1.0


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Parts of a copy, by the host that saves them."""

    parts: dict[str, tuple[DurablePart, ...]]
    total: int
    first: CommitId | None = None  # the first commit from this one on is saved; None: the newest one


class Pace:
    """Recent ticks per second of the present world."""

    def __init__(self) -> None:
        self._since = (0, 0.0, 0)  # generation, time, ticks
        self.ticks_per_s = 0.0

    def look(self, m: Membership, now: float) -> None:
        """Measure. Call it several times per second."""
        ticks = max((worker.ticks for worker in _members(m)), default=0)
        generation, at, before = self._since
        if generation != m.generation:
            self._since, self.ticks_per_s = (m.generation, now, ticks), 0.0
        elif now - at >= _PACE_S:
            self._since, self.ticks_per_s = (m.generation, now, ticks), (ticks - before) / (now - at)


def plan_copy(m: Membership, ticks_per_s: float, now: float, lead_s: float, saved: CommitId | None) -> CopyPlan | None:
    """Return the plan of a copy of the running job; None if there is nothing to save now.

    ``lead_s``: time for the orders to arrive. ``saved``: the commit in the last copy of this job.
    """
    if not isinstance(m.phase, Running) or m.ledger.highest is None:
        return None
    if not is_sharded(m):
        return _plan_of_one(_source(m))
    layout = m.shards.layouts[-1]
    if layout.generation != m.generation or m.world is None or len(_members(m)) < m.world.size:
        return None  # the world attaches its values, or ends
    line = m.shards.line
    if line is None or line.generation != m.generation:
        return None
    every_s = _seconds_between_commits(m, layout, line, ticks_per_s, now)
    if every_s is None:
        return None
    if every_s >= _RARELY_S:
        return _plan_of_shards(_holders(m, layout, line), line) if line != saved else None
    member = max(_members(m), key=lambda worker: worker.ticks)
    lead = ceil(ticks_per_s * (now - member.ticks_at + lead_s))
    to_come = CommitId(m.generation, member.ticks + 1 + lead)
    return _plan_of_shards(_in_slots(layout, to_come), to_come)


def plan_last(m: Membership) -> CopyPlan | None:
    """Return the plan of the last copy, of a job that makes no more commits."""
    if m.ledger.highest is None:
        return None
    if is_sharded(m):
        found = find_line(m)
        return _plan_of_shards(list(found[1]), found[0]) if found is not None else None
    return _plan_of_one(_newest_retained(m) if isinstance(m.phase, Over) else _source(m))


def _plan_of_one(slot: SlotId | None) -> CopyPlan | None:
    return CopyPlan({slot.host: (DurablePart(slot, 1, 0),)}, 1) if slot is not None else None


def _plan_of_shards(sources: list[ShardSource], first: CommitId) -> CopyPlan | None:
    """Return a plan in which each digest is saved once, each by the host that saves least so far."""
    copies: dict[int, list[CopyOf]] = {}
    for source in sources:
        copies.setdefault(source.digest, []).append(source.copy)
    load: Counter[str] = Counter()
    parts: dict[str, list[DurablePart]] = {}
    for number, (digest, same) in enumerate(copies.items(), start=1):
        copy = min(same, key=lambda copy: load[copy.host])
        load[copy.host] += 1
        parts.setdefault(copy.host, []).append(DurablePart(copy.slot, number, digest))
    return CopyPlan({host: tuple(found) for host, found in parts.items()}, len(copies), first) if parts else None


# -------------------------------------------------------------------------------------------------------- shards


def _members(m: Membership) -> list[Worker]:
    return [worker for worker in m.workers.values() if 0 < worker.joined == m.generation and not worker.gone]


def _seconds_between_commits(
    m: Membership, layout: ShardLayout, line: CommitId, ticks_per_s: float, now: float
) -> float | None:
    """Return the time between two commits, as far as it is known; None: it will be known soon."""
    slot = m.slots[layout.digests[0][0]]
    newest = slot.retained if slot.retained is not None and slot.retained >= line else line
    age_s = now - m.shards.line_at
    if not newest.tick or not ticks_per_s:
        return age_s if age_s >= _RARELY_S else None
    before = slot.previous.tick if slot.previous is not None and slot.previous.generation == m.generation else 0
    return max((newest.tick - before) / ticks_per_s, age_s)


def _in_slots(layout: ShardLayout, commit: CommitId) -> list[ShardSource]:
    return [ShardSource(digest, CopyOf(slot_id.host, slot_id, commit)) for slot_id, digest in layout.digests]


def _holders(m: Membership, layout: ShardLayout, commit: CommitId) -> list[ShardSource]:
    """Return the copies of a commit that all members have sealed: in their buffers, and kept ones."""
    digests = dict(layout.digests)
    kept = [
        ShardSource(digests[slot_id], CopyOf(host.name, slot_id, commit))
        for host in m.hosts.values()
        for slot_id, of in sorted(host.kept)
        if host.agent == "joined" and of == commit and slot_id in digests
    ]
    return [*_in_slots(layout, commit), *kept]


# ----------------------------------------------------------------------------------------------- a replicated state


def _source(m: Membership) -> SlotId | None:
    """Return the slot whose commit is saved: the root's if it lives."""
    if m.world is None:
        return None
    for placement in _root_first(m):
        worker = m.workers.get(placement)
        if worker is not None and worker.commit is not None and not worker.gone and worker.joined == m.generation:
            return worker.id.slot_id
    return None


def _root_first(m: Membership) -> Iterator[WorkerId]:
    assert m.world is not None
    yield m.world.members[m.world.root].worker
    yield from (placement.worker for placement in m.world.members)


def _newest_retained(m: Membership) -> SlotId | None:
    """Return the slot with the newest commit in memory, after the end of all workers."""
    held = [
        (slot.retained, slot_id)
        for slot_id, slot in m.slots.items()
        if slot.retained is not None and m.hosts[slot_id.host].agent == "joined"
    ]
    return max(held, key=lambda item: item[0])[1] if held else None
