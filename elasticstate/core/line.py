"""The commit line of a sharded job: the newest commit of which all shards can be read.

A commit holds the shards of one slot. The layout of a generation names the shard digest of each slot; slots with equal
digests hold the same shards. A commit is reachable if, for each digest of its generation's layout, some host that the
driver reaches has a copy: in a slot's own two buffers, or a kept copy (see replication.py). The newest reachable commit
is the line, and each world of a sharded job starts from it.

A layout counts when a member is behind the barrier of ``attach``, where all members have sealed ``(g, 0)``. Before
that, at least one member may not have sealed it, so the line of the last world must stay. The barrier gives each member
the digests of all, and each reports them before its next collective: so the report of one agent is enough, and others
may die with theirs. In each later tick all members take part in a collective, so no member is more than one commit
ahead, and its other buffer holds the commit before.
"""

from __future__ import annotations

from collections.abc import Iterator

from elasticstate.core import types as t
from elasticstate.core.layouts import ShardLayout
from elasticstate.core.records import Draft, Host, Membership, Over, Running, Worker
from elasticstate.core.retained import has_job_state

_LAYOUTS_KEPT = 16
Copies = dict[t.CommitId, dict[int, list[t.CopyOf]]]
"""Copies by commit and digest."""


def is_sharded(m: Draft | Membership) -> bool:
    """Return True if all members of some world have attached shards."""
    return bool(m.shards.layouts)


# ------------------------------------------------------------------------------------------------------------ layouts


def shards_attached(d: Draft, event: t.ShardsAttached) -> None:
    """Record the layout of the newest world. The first report makes it, from a member that may have died since then."""
    world = d.world
    if world is None or event.generation != d.generation or len(event.digests) != world.size or not all(event.digests):
        return
    has_layout = bool(d.shards.layouts) and d.shards.layouts[-1].generation == event.generation
    if has_layout or not any(placement.worker == event.worker for placement in world.members):
        return
    for member in (placement.worker for placement in world.members):
        worker, host = d.workers.get(member), d.hosts.get(member.host)
        is_away = host is not None and host.agent != "joined"  # its memory may return with the next agent
        if is_away or (worker is not None and d.breaks(worker)):  # else its agent has reported the commits since then
            _record_start(d, world, member.slot_id)
    members = zip(world.members, event.digests, strict=True)
    layout = ShardLayout(event.generation, tuple((placement.worker.slot_id, digest) for placement, digest in members))
    layouts = _that_count(d, (*d.shards.layouts, layout))
    d.update_shards(layouts=layouts, line=t.CommitId(event.generation, 0), line_at=d.now)


def _record_start(d: Draft, world: t.World, slot_id: t.SlotId) -> None:
    """Record the first commit that a member has sealed, unless newer reports from its slot have arrived. The commit
    before it is the line of the world, if the slot holds it."""
    slot, start = d.slots[slot_id], t.CommitId(world.generation, 0)
    if slot.retained is not None and slot.retained >= start:
        return
    previous = world.line if world.line in (slot.retained, slot.previous) else None
    d.put_slot(slot_id, retained=start, previous=previous, sealed=max(slot.sealed, start))


def _that_count(d: Draft, layouts: tuple[ShardLayout, ...]) -> tuple[ShardLayout, ...]:
    """Return the newest layout, and those of generations of which some slot or copy store holds a commit."""
    used = {commit.generation for slot in d.slots.values() for commit in (slot.retained, slot.previous) if commit}
    used.update(commit.generation for host in d.hosts.values() for _, commit in host.kept)
    return tuple(layout for layout in layouts[-_LAYOUTS_KEPT:] if layout.generation in used or layout is layouts[-1])


# --------------------------------------------------------------------------------------------------------------- line


def find_line(m: Draft | Membership) -> tuple[t.CommitId, tuple[t.ShardSource, ...]] | None:
    """Return the commit line and its readable copies; None: no commit is reachable."""
    return _newest_whole(m, _copies(m, _reachable(m)))


def _reachable(m: Draft | Membership) -> list[Host]:
    return [host for host in m.hosts.values() if host.agent == "joined"]


def _newest_whole(m: Draft | Membership, copies: Copies) -> tuple[t.CommitId, tuple[t.ShardSource, ...]] | None:
    """Return the newest commit with a copy for each digest of its layout."""
    layouts = {layout.generation: layout for layout in m.shards.layouts}
    for commit in sorted(copies, reverse=True):
        needed = dict.fromkeys(digest for _, digest in layouts[commit.generation].digests)
        found = copies[commit]
        if len(found) == len(needed):
            return commit, tuple(t.ShardSource(digest, copy) for digest in needed for copy in found[digest])
    return None


def _copies(m: Draft | Membership, hosts: list[Host]) -> Copies:
    """Return the copies on these hosts: those in a slot's own buffer before the kept ones."""
    digests = {
        (layout.generation, slot_id): digest for layout in m.shards.layouts for slot_id, digest in layout.digests
    }
    found: Copies = {}
    for host, slot_id, commit in (*_in_buffers(m, hosts), *_in_stores(hosts)):
        digest = digests.get((commit.generation, slot_id))
        if digest is not None:
            found.setdefault(commit, {}).setdefault(digest, []).append(t.CopyOf(host, slot_id, commit))
    return found


def _in_buffers(m: Draft | Membership, hosts: list[Host]) -> Iterator[tuple[str, t.SlotId, t.CommitId]]:
    for host in hosts:
        for index in range(host.slots_ever):
            slot_id = t.SlotId(host.name, index)
            slot = m.slots.get(slot_id)
            for commit in (slot.retained, slot.previous) if slot is not None else ():
                if commit is not None:
                    yield host.name, slot_id, commit


def _in_stores(hosts: list[Host]) -> Iterator[tuple[str, t.SlotId, t.CommitId]]:
    return ((host.name, slot_id, commit) for host in hosts for slot_id, commit in sorted(host.kept))


# ---------------------------------------------------------------------------------------------------- awaited, needed


def awaited_copies(m: Draft | Membership) -> list[t.CopyOf]:
    """Return the copies that complete a newer commit than the line, and that may be on unreachable hosts, or in slots
    whose workers are late; [] if the next world should not wait for them.

    As with retained commits, an older line is enough while a member of the newest world lives.
    """
    if not is_sharded(m):
        return []
    reachable = _copies(m, _reachable(m))
    line = _newest_whole(m, reachable)
    if line is not None and any(has_job_state(m, worker) for worker in m.workers.values()):
        return []
    best = _newest_whole(m, _possible_copies(m))
    if best is None or (line is not None and best[0] <= line[0]):
        return []
    return [source.copy for source in best[1] if source.digest not in reachable.get(best[0], {})]


def _possible_copies(m: Draft | Membership) -> Copies:
    """Return the copies on all hosts. A slot of an unreachable host, or of a worker that is not READY, may hold newer
    commits than the last report says: each of its generation that another slot holds."""
    found = _copies(m, list(m.hosts.values()))
    layouts = {layout.generation: layout for layout in m.shards.layouts}
    for commit, copies in found.items():
        for slot_id, digest in layouts[commit.generation].digests:
            slot = m.slots.get(slot_id)
            if slot is None or slot.retained is None or slot.retained >= commit or slot_id.host not in m.hosts:
                continue
            if commit in slot.damaged:
                continue
            worker = m.workers.get(slot.worker) if slot.worker is not None else None
            is_late = worker is not None and worker.ready is None and worker.joined >= commit.generation
            if is_late or m.hosts[slot_id.host].agent != "joined":
                copies.setdefault(digest, []).append(t.CopyOf(slot_id.host, slot_id, commit))
    return found


def exiting(d: Draft) -> list[Worker]:
    """Return the members of the newest world that are being killed, or leave: at their ends, agents report what is in
    their buffers."""
    return [w for w in d.workers.values() if w.gone and d.breaks(w) and d.hosts[w.id.host].agent == "joined"]


def hosts_of(copies: list[t.CopyOf]) -> list[str]:
    """Return the hosts of these copies, each once."""
    return list(dict.fromkeys(copy.host for copy in copies))


def needed_hosts(d: Draft) -> set[str]:
    """Return the hosts whose copies the next or present world needs: until its first tick, because by then all members
    have sealed a commit of their own."""
    if not is_sharded(d) or isinstance(d.phase, Over):
        return set()
    if not isinstance(d.phase, Running):
        found = _copies(d, _reachable(d))
        return {copy.host for copies in found.values() for same in copies.values() for copy in same}
    return set() if d.phase.first_tick else _source_hosts(d)


def reads_from(d: Draft, host: str) -> bool:
    """Return True if members may be reading shards on this host: the loss of it ends the world, because they would wait
    for its silence, one copy after the other, and the next world names copies on other hosts."""
    return isinstance(d.phase, Running) and not d.phase.first_tick and host in _source_hosts(d)


def _source_hosts(d: Draft) -> set[str]:
    return {source.copy.host for source in d.world.sources} if d.world is not None else set()
