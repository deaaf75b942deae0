"""Sharded jobs: the replication of shards, and the commit line, the newest commit of which all shards can be read.

The layout of a generation names the shard digest of each slot; slots with equal digests hold the same shards. A commit
is reachable if, for each digest, some host that the driver reaches has a copy: in a slot's own two buffers, or a kept
copy. The newest reachable commit is the line, and each world of a sharded job starts from it.

A layout counts when a member is behind the barrier of ``attach``, where all members have sealed ``(g, 0)``: until then
the line of the last world must stay. The barrier gives each member the digests of all, so the report of one agent is
enough. In each later tick all members take part in a collective, so no member is more than one commit ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import ceil, inf

from msgspec.structs import replace

from elasticstate.core import links, types as t
from elasticstate.core.commits import Copies, copies_on, has_job_state, may_be_rejected, newest_whole, reachable
from elasticstate.core.state import Draft, Host, Membership, Over, Running, Worker
from elasticstate.core.types import Replication, ShardLayout

_LAYOUTS_KEPT = 16


def is_sharded(m: Draft | Membership) -> bool:
    """Return True if all members of some world have attached shards."""
    return bool(m.shards.layouts)


def shards_attached(d: Draft, reporter: t.WorkerId, report: t.Attached) -> None:
    """Record the layout of a world. The first report makes it, from a member that may have died since then.

    It may come late, with an agent that was unreachable while the next worlds were formed.
    """
    world = d.world if report.generation == d.generation else None
    members = dict(d.shards.ended).get(report.generation, ()) if world is None else _members(world)
    if reporter not in members or len(report.digests) != len(members) or not all(report.digests):
        return
    if any(layout.generation == report.generation for layout in d.shards.layouts):
        return
    if world is not None:
        _record_starts(d, world)
    slots = (member.slot_id for member in members)
    layout = ShardLayout(report.generation, tuple(zip(slots, report.digests, strict=True)))
    in_order = sorted((*d.shards.layouts, layout), key=lambda each: each.generation)
    d.update_shards(layouts=_that_count(d, tuple(in_order)))
    if world is not None:
        d.update_shards(line=t.CommitId(report.generation, 0), line_at=d.now)


def world_is_over(d: Draft) -> None:
    """Keep the members of the newest world of a sharded job, which another one replaces, if no report that all have
    attached has come: one may still come."""
    layouts, ended = d.shards.layouts, d.shards.ended
    if d.world is not None and layouts and layouts[-1].generation != d.generation:
        d.update_shards(ended=(*ended, (d.generation, _members(d.world)))[-_LAYOUTS_KEPT:])


def _members(world: t.World) -> tuple[t.WorkerId, ...]:
    return tuple(placement.worker for placement in world.members)


def _record_starts(d: Draft, world: t.World) -> None:
    """Record the first commit of each member whose agent may not have told of it."""
    for member in _members(world):
        worker, host = d.workers.get(member), d.hosts.get(member.host)
        is_away = host is not None and host.agent != "joined"  # its memory may return with the next agent
        if is_away or (worker is not None and d.breaks(worker)):  # else its agent has reported the commits since then
            _record_start(d, world, member.slot_id)


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


def find_line(m: Draft | Membership) -> tuple[t.CommitId, tuple[t.ShardSource, ...]] | None:
    """Return the commit line and its readable copies; None: no commit is reachable.

    Copies on hosts that the next world cannot reach count only if there is no line without them.
    """
    copies, beyond = copies_on(m, reachable(m)), links.cut_off(m)
    return newest_whole(m, copies, beyond) or (newest_whole(m, copies) if beyond else None)


def awaited_copies(m: Draft | Membership) -> list[t.CopyOf]:
    """Return the copies that complete a newer commit than the line, and that may be on unreachable hosts, or in slots
    whose workers are late; [] if the next world should not wait for them.

    As with retained commits, an older line is enough while a member of the newest world lives.
    """
    if not is_sharded(m):
        return []
    found = copies_on(m, reachable(m))
    line = newest_whole(m, found)
    if line is not None and any(has_job_state(m, worker) for worker in m.workers.values()):
        return []
    best = newest_whole(m, _possible_copies(m))
    if best is None or (line is not None and best[0] <= line[0]):
        return []
    return [source.copy for source in best[1] if source.digest not in found.get(best[0], {})]


def _possible_copies(m: Draft | Membership) -> Copies:
    """Return the copies on all hosts. A slot of an unreachable host, or of a worker that is not READY, may hold newer
    commits than the last report says: each of its generation that another slot holds."""
    found = copies_on(m, list(m.hosts.values()))
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
        found = copies_on(d, reachable(d))
        return {copy.host for copies in found.values() for same in copies.values() for copy in same}
    return set() if d.phase.first_tick else _source_hosts(d)


def reads_from(d: Draft, host: str) -> bool:
    """Return True if members may be reading shards on this host: the loss of it ends the world, because they would wait
    for its silence, one copy after the other, and the next world names copies on other hosts."""
    return isinstance(d.phase, Running) and not d.phase.first_tick and host in _source_hosts(d)


def _source_hosts(d: Draft) -> set[str]:
    return {source.copy.host for source in d.world.sources} if d.world is not None else set()


# -------------------------------------------------------------------------------------------------------- replica hosts
# Hosts that keep the copies of a shard digest: its own ones, then others, in other racks if possible.


class ReplicaHosts:
    """Choice of hosts. All have about the same number of copies, also if racks have different numbers of hosts.

    The hosts form a ring in which each rack is spread evenly, so the next host is in another rack, or soon follows.
    Without racks the ring has the order of discovery.
    """

    def __init__(self, racks: Mapping[str, str], usable: Sequence[str], count: int) -> None:
        """``racks``: of all hosts; "": not known, so no other host shares it. ``usable``: hosts, in the order of
        discovery. ``count``: of copies."""
        self._racks, self._count = racks, count
        self._ring = _ring({name: racks[name] for name in usable})
        self._positions = {name: position for position, name in enumerate(self._ring)}
        self._chosen: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __call__(self, own: tuple[str, ...]) -> tuple[str, ...]:
        """Return the hosts for a digest that ``own`` hosts have."""
        if own not in self._chosen:  # each host has many slots
            self._chosen[own] = self._choose(own)
        return self._chosen[own]

    def _choose(self, own: tuple[str, ...]) -> tuple[str, ...]:
        chosen = self._in_other_racks((), own)
        if len(chosen) < self._count:
            at = self._positions.get(own[0], -1) + 1
            others = chain(self._ring[at:], self._ring[:at])
            chosen = self._in_other_racks(chosen, (name for name in others if name not in own))
        return chosen

    def _in_other_racks(self, chosen: tuple[str, ...], names: Iterable[str]) -> tuple[str, ...]:
        """Add hosts of racks that have no copy yet, then any others, until there are enough."""
        found, used = list(chosen), {self._racks.get(name, "") for name in chosen} - {""}
        rest = []
        for name in names:
            if len(found) == self._count:
                break
            rack = self._racks.get(name, "")
            if rack in used:
                rest.append(name)
                continue
            found.append(name)
            used |= {rack} - {""}
        return (*found, *rest[: self._count - len(found)])


def _ring(racks: Mapping[str, str]) -> list[str]:
    """Return the hosts such that those of each rack have equal distances."""
    hosts_of: dict[str, list[str]] = {}
    for name, rack in racks.items():
        hosts_of.setdefault(rack or f" {name}", []).append(name)
    if len(hosts_of) == len(racks):
        return list(racks)
    places = {name: (i + 0.5) / len(names) for names in hosts_of.values() for i, name in enumerate(names)}
    return sorted(racks, key=lambda name: places[name])


# ---------------------------------------------------------------------------------------------------------- replication
# Replication: each shard digest of a commit is kept on ``--replicas`` + 1 hosts (docs/decisions/replication.md).
#
# Workers may commit so often that the last reports of all slots have no commit in common, or that the agents find a
# commit overwritten. Then the next attempt names a commit that is still to come, for whose seals the agents wait (see
# replicas/pusher.py). It may never come, because training pauses, so agents keep copies of the newest commit that all
# have sealed.


_FIRST_PAUSE_S = 0.5  # before another attempt; it doubles
_LONGEST_PAUSE_S = 30.0
_LEAD_S = 0.5  # for orders to arrive before a commit to come
_FAILURES_TO_WARN = 3
_COMING_S = 10.0  # after that time without it, such a commit is given up
_IS_LATE = 2.0  # intervals between commits without one: training pauses
_FREQUENT_S = 5.0  # between two commits: if it is longer, a commit lasts until it is copied
_REFUSAL_S = 60.0  # for which other hosts come first


def host_reports(d: Draft, host: str, kept: tuple[tuple[t.SlotId, t.CommitId], ...]) -> None:
    """Record all copies that a connected agent keeps. It may have missed that it should forget some."""
    wanted = frozenset(copy for copy in kept if not _is_forgotten(d, copy[1]))
    if wanted or d.hosts[host].kept:
        d.put_host(d.hosts[host], kept=wanted)
    if d.shards.forgotten is not None:
        d.effects.append(t.ForgetCopies(d.shards.forgotten, _kept_besides(d), host))


def host_lost(d: Draft, host: str, with_copies: bool) -> None:
    """Record the loss of an agent. ``with_copies``: it has removed its copies. Otherwise the host may keep copies that
    were not reported any more."""
    present, kept = d.shards.replication, d.hosts[host].kept
    if present is not None:
        kept |= {(slot_id, present.commit) for slot_id, keeper in present.missing if keeper == host}
    if with_copies:
        kept = frozenset()
    if kept != d.hosts[host].kept:
        d.put_host(d.hosts[host], kept=kept)
    if present is not None and any(host in (keeper, slot_id.host) for slot_id, keeper in present.copies):
        _give_up(d, present, f"host {host} was lost")


def copy_kept(d: Draft, event: t.CopyKept) -> None:
    host = d.hosts.get(event.host)
    if host is None or host.agent != "joined" or _is_forgotten(d, event.commit):
        return
    d.put_host(host, kept=host.kept | {(event.slot, event.commit)})
    present = d.shards.replication
    if present is None or event.commit != present.commit:
        return
    _go_on(d, replace(present, missing=present.missing - {(event.slot, event.host)}))


def _go_on(d: Draft, present: Replication) -> None:
    """Record the progress of a replication, or its end."""
    if present.missing:
        d.update_shards(replication=present)
        return
    d.update_shards(replication=None, replicated=present.commit, replicated_at=d.now)
    d.update_shards(failures=0, trouble="", not_before=-inf)
    _forget(d, present.commit)


def copy_dropped(d: Draft, event: t.CopyDropped) -> None:
    host = d.hosts.get(event.host)
    if host is None:
        return
    if (event.slot, event.commit) in host.kept:
        d.put_host(host, kept=host.kept - {(event.slot, event.commit)})
        d.warn(f"host {event.host} has lost its copy of commit {event.commit} of slot {event.slot}: {event.reason}")
    present = d.shards.replication
    if present is not None and event.commit == present.commit and (event.slot, event.host) in present.copies:
        if event.host != event.slot.host and (event.slot, event.host) in present.missing:
            others = (refusal for refusal in d.shards.refusals if refusal[0] != event.host and refusal[1] > d.now)
            d.update_shards(refusals=(*others, (event.host, d.now + _REFUSAL_S)))
        _give_up(d, present, f"slot {event.slot} on host {event.host}: {event.reason}")


def _give_up(d: Draft, present: Replication, why: str) -> None:
    """End a replication. Warn about a row of such ends once: others pass by themselves."""
    pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**d.shards.failures)
    failures = d.shards.failures + 1
    d.update_shards(replication=None, failures=failures, trouble=why, not_before=d.now + pause_s)
    if failures == _FAILURES_TO_WARN:
        since = (
            f"the newest replicated commit is {d.shards.replicated}" if d.shards.replicated else "none is replicated"
        )
        d.warn(f"{failures} replications in a row have failed, and {since}. Reason of the last failure: {why}")
    d.effects.append(t.StopReplication())


def _forget(d: Draft, before: t.CommitId) -> None:
    """Let agents forget all copies of commits older than ``before``, except of the replicated one. No replication of
    such a commit begins afterwards."""
    if d.shards.forgotten is not None and before < d.shards.forgotten:
        return
    d.update_shards(forgotten=before)
    for host in _keepers_of_older(d, before):
        d.put_host(host, kept=frozenset(kept for kept in host.kept if not _is_older(d, kept[1], before)))
    d.effects.append(t.ForgetCopies(before, _kept_besides(d)))


def _kept_besides(d: Draft) -> t.CommitId | None:
    """Return the replicated commit, if it is older than those that are not forgotten."""
    done, forgotten = d.shards.replicated, d.shards.forgotten
    return done if done is not None and forgotten is not None and done < forgotten else None


def _keepers_of_older(d: Draft, before: t.CommitId) -> list[Host]:
    """Return the hosts whose agents keep copies of older commits than ``before``, besides the replicated one."""
    joined = (host for host in d.hosts.values() if host.agent == "joined")
    return [host for host in joined if any(_is_older(d, commit, before) for _, commit in host.kept)]


def _is_older(d: Draft, commit: t.CommitId, before: t.CommitId) -> bool:
    return commit < before and commit != d.shards.replicated


def _is_forgotten(d: Draft, commit: t.CommitId) -> bool:
    return d.shards.forgotten is not None and _is_older(d, commit, d.shards.forgotten)


def replicate(d: Draft) -> None:
    """Record the newest commit that all members have sealed, and begin to replicate it if no replication is in
    progress."""
    if isinstance(d.phase, Over):
        return
    layout, present = _present_layout(d), d.shards.replication
    will_not_come = present is not None and (layout is None or d.now >= _coming_until(present))
    if present is not None and will_not_come and not _is_sealed(d, present.commit):
        _give_up(d, present, f"commit {present.commit} has not come")
    if layout is None:
        return
    line = min(d.slots[slot_id].sealed for slot_id, _ in layout.digests)
    if line.generation == layout.generation and (d.shards.line is None or line > d.shards.line):
        d.update_shards(line=line, line_at=d.now)
    shards = d.shards
    if shards.replication is not None or d.now < shards.not_before:
        return
    commit = _held_by_all(d, layout)
    if commit is None or shards.failures % 2:  # the last reports of frequent commits have none in common
        commit = _to_come(d, layout) or commit
    if commit is None or _is_forgotten(d, commit) or (shards.replicated is not None and commit <= shards.replicated):
        return
    copies = frozenset(_placed(d, layout))
    if not copies:
        return
    _forget_attempts(d, commit if _is_sealed(d, commit) else line)
    missing = frozenset(copy for copy in copies if (copy[0], commit) not in d.hosts[copy[1]].kept)
    if missing:
        d.effects.append(t.Replicate(commit, tuple(sorted(missing))))
    _go_on(d, Replication(commit, copies, missing, d.now))


def _forget_attempts(d: Draft, sealed: t.CommitId) -> None:
    """Let agents forget copies that failed attempts have left, of commits older than one that all members have
    sealed."""
    forgotten = d.shards.forgotten
    if sealed.generation != d.generation or (forgotten is not None and sealed <= forgotten):
        return
    if d.shards.failures or _keepers_of_older(d, sealed):
        _forget(d, sealed)


def replication_deadlines(d: Draft) -> Iterator[tuple[str, float]]:
    """Yield the time of the next attempt."""
    present = d.shards.replication
    if d.shards.layouts and present is None:
        yield "replication", d.shards.not_before
    elif present is not None and not _is_sealed(d, present.commit):
        yield "commit to replicate", _coming_until(present)


def replicas_of(m: Draft | Membership, layout: ShardLayout) -> int:
    """Return the number of other hosts that keep a copy of each digest: 0 if each digest is on enough hosts anyway.

    Default: 1 if the world is on several hosts, and some digest is on one of them only.
    """
    hosts: dict[int, set[str]] = {}
    for slot_id, digest in layout.digests:
        hosts.setdefault(digest, set()).add(slot_id.host)
    fewest = min(map(len, hosts.values()))
    if m.policy.replicas is None:
        return int(fewest == 1 and len({slot_id.host for slot_id, _ in layout.digests}) > 1)
    return m.policy.replicas if fewest <= m.policy.replicas else 0


def _present_layout(d: Draft) -> ShardLayout | None:
    """Return the layout of the present world, if all its members live and have attached."""
    layouts = d.shards.layouts
    if not layouts or layouts[-1].generation != d.generation or not isinstance(d.phase, Running):
        return None
    return layouts[-1] if d.world is not None and len(d.members()) == d.world.size else None


def _held_by_all(d: Draft, layout: ShardLayout) -> t.CommitId | None:
    """Return the newest commit that all slots of the layout hold, as last reported."""
    common: set[t.CommitId | None] = set()
    for number, (slot_id, _) in enumerate(layout.digests):
        held = {d.slots[slot_id].retained, d.slots[slot_id].previous}
        common = common & held if number else held
        if not common:
            return None
    of_layout = (commit for commit in common if commit and commit.generation == layout.generation)
    return max((commit for commit in of_layout if not may_be_rejected(d, commit)), default=None)


def _is_sealed(d: Draft, commit: t.CommitId) -> bool:
    """Return True if all slots of its layout are known to have sealed this commit."""
    layouts = (layout for layout in d.shards.layouts if layout.generation == commit.generation)
    return all(d.slots[slot_id].sealed >= commit for layout in layouts for slot_id, _ in layout.digests)


def _coming_until(present: Replication) -> float:
    return present.since + _COMING_S


def _to_come(d: Draft, layout: ShardLayout) -> t.CommitId | None:
    """Return a commit that all members will seal soon, but after the orders for it have arrived, if they commit as
    regularly as before. None: they do not."""
    slot = d.slots[layout.digests[0][0]]
    worker = d.workers[slot.worker] if slot.worker is not None else None
    if d.policy.divergence == "restore":
        return None  # older copies would be forgotten, and that commit may be rejected
    if worker is None or worker.commit is None or worker.commit != slot.retained or not worker.commit.tick:
        return None
    before = slot.previous.tick if slot.previous is not None and slot.previous.generation == layout.generation else 0
    every = worker.commit.tick - before
    phase = d.phase
    if not isinstance(phase, Running):
        return None
    ticks_per_s = max(0, worker.ticks - phase.earlier_ticks) / max(d.now - phase.since, 0.001)
    is_late = ticks_per_s * (d.now - worker.commit_at - _LEAD_S) > _IS_LATE * every
    if is_late or every > ticks_per_s * _FREQUENT_S:
        return None
    lead = ceil(ticks_per_s * (d.now - worker.commit_at + _LEAD_S) / every)
    done = d.shards.replicated
    known = done.tick if done is not None and done.generation == layout.generation else 0
    return t.CommitId(layout.generation, max(known, worker.commit.tick) + every * max(1, lead))


def _placed(d: Draft, layout: ShardLayout) -> Iterator[tuple[t.SlotId, str]]:
    """Yield the copies of a commit with this layout: of each digest, on its own hosts first, then on others.

    A host that has refused a copy gets none of another host's for a while, if there are enough others.
    """
    count = 1 + replicas_of(d, layout)
    usable = [host.name for host in d.by_discovery() if host.agent == "joined" and host.slots and not host.draining]
    if count == 1 or len(usable) < 2:
        return
    full = {host for host, until in d.shards.refusals if until > d.now}
    if len(willing := [name for name in usable if name not in full]) >= count:
        usable = willing
    hosts_of = ReplicaHosts({host.name: host.rack for host in d.hosts.values()}, usable, count)
    slots: dict[int, dict[str, t.SlotId]] = {}
    for slot_id, digest in layout.digests:
        slots.setdefault(digest, {}).setdefault(slot_id.host, slot_id)
    for own in slots.values():
        first = next(iter(own.values()))
        yield from ((own.get(name, first), name) for name in hosts_of(tuple(own)))
