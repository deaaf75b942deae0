"""Construction of a world: its members, its root, the ranks that need the root's state; and its parts for hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import inf

from msgspec.structs import replace

from elasticstate.core import links, types as t
from elasticstate.core.commits import NOTHING, held, newest, only_holder
from elasticstate.core.sharded import world_is_over
from elasticstate.core.state import NEWCOMER, Draft, Ticking, Worker

# ----------------------------------------------------------------------------------------------------------- assignment
# Assignment of ranks. The ranks of a host are contiguous. Hosts are ordered by their oldest worker, the workers of a
# host by age, then by slot. Rank 0 is the oldest worker.


def assign(workers: Sequence[tuple[t.WorkerId, int]]) -> tuple[t.Placement, ...]:
    """Place ``(worker, age)`` pairs. A smaller age is older. Hosts with equal ages keep their order in ``workers``.

    So survivors keep their order within a host, and hosts keep their order as long as their oldest worker lives.
    """
    hosts: dict[str, list[tuple[int, int, t.WorkerId]]] = {}
    for worker, age in workers:
        hosts.setdefault(worker.host, []).append((age, worker.slot, worker))
    for members in hosts.values():
        members.sort()
    ordered = sorted(hosts.values(), key=lambda members: members[0][0])
    placements: list[t.Placement] = []
    for cross_rank, members in enumerate(ordered):
        for position, (_, slot, worker) in enumerate(members):
            placements.append(
                t.Placement(
                    worker=worker,
                    rank=len(placements),
                    local_rank=slot,
                    local_size=len(members),
                    local_place=position,
                    cross_rank=cross_rank,
                    cross_size=len(ordered),
                )
            )
    return tuple(placements)


def fixed_placement(places: Sequence[tuple[str, int]], rank: int) -> t.Placement:
    """Return the placement of ``rank`` in a world of another launcher. ``places``: host and local rank of each rank."""
    hosts = list(dict.fromkeys(host for host, _ in places))
    host, local_rank = places[rank]
    members = [other for other, (name, _) in enumerate(places) if name == host]
    return t.Placement(
        worker=t.WorkerId(host, local_rank, 1),
        rank=rank,
        local_rank=local_rank,
        local_size=len(members),
        local_place=local_rank,
        cross_rank=hosts.index(host),
        cross_size=len(hosts),
    )


# -------------------------------------------------------------------------------------------------------------- keepers
# Keepers: with --one-copy-per-host, the root and one member of each host keep commits; the others are followers.
#
# See docs/decisions/one-copy-per-host.md.


def choose_keepers(
    d: Draft, placements: Sequence[t.Placement], root: int, lacking: Sequence[int], commits: Sequence[t.CommitId]
) -> tuple[int, ...]:
    """Return the ranks that keep commits; (): all ranks do. ``commits``: by rank."""
    if not d.policy.one_copy_per_host:
        return ()
    lack = set(lacking)
    best: dict[str, tuple[bool, bool, int, int, bool, int, int]] = {}
    for rank, (placement, commit) in enumerate(zip(placements, commits, strict=True)):
        worker = placement.worker
        drains = bool(d.workers[worker].draining)
        key = (drains, rank in lack, -commit.generation, -commit.tick, rank != root, worker.slot, rank)
        best[worker.host] = min(key, best.get(worker.host, key))
    return tuple(sorted({root, *(key[-1] for key in best.values())}))


_MOST_SOURCES = 1000


def staying(d: Draft) -> list[Worker]:
    """Return the READY workers that do not drain, of hosts that can reach each other."""
    found = [worker for worker in d.ready_workers() if not worker.draining] if d.ready else []
    beyond = links.beyond(d) if d.ledger.links.cut or d.ledger.links.apart else ()
    return [worker for worker in found if worker.id.host not in beyond] if beyond else found


def candidates(d: Draft) -> list[Worker]:
    """Return the workers that may be in the next world: READY and not draining, oldest first."""
    found = staying(d)
    found.sort(key=lambda w: (w.age, w.ready_at, d.hosts[w.id.host].order, w.id))
    return found


def postponed(d: Draft, stay: Sequence[Worker]) -> Worker | None:
    """Return the draining READY worker that must join one more world: it holds a newer commit than all ``stay`` (I3,
    I15). In a sharded job its agent holds the commit."""
    if d.shards.layouts:
        return None
    draining = [worker for worker in d.ready_workers() if worker.draining] if d.draining else []
    if d.ledger.links.cut and draining:
        hosts = {worker.id.host for worker in stay}
        draining = [worker for worker in draining if not links.enemies(d, worker.id.host) & hosts]
    return only_holder(draining, stay)


def choose(d: Draft) -> list[Worker]:
    """Return the members of the next world: whole groups and at most max_np, oldest first, always with a holder of the
    newest commit, unless the job is sharded. Whole hosts come before older workers, if they hold this commit."""
    found = candidates(d)
    late = postponed(d, found)
    size = d.policy.fitting(len(found) + (late is not None))
    whole = [found[place] for place in whole_hosts([w.id.host for w in found], size, d.policy.np_multiple)]
    if d.shards.layouts:
        return whole
    holder = late or max(found, key=held)
    for chosen in (whole, found[:size]):
        if newest(chosen) >= held(holder):
            return chosen
    return [*found[: size - 1], holder]


def whole_hosts(hosts: Sequence[str], size: int, multiple: int) -> Sequence[int]:
    """Return the places of ``size`` of these workers, whose hosts are given, in their order.

    Groups of ``multiple`` workers of one host come first, then hosts with many of the other workers.
    """
    if multiple == 1 or len(hosts) <= size:
        return range(min(size, len(hosts)))
    on: dict[str, list[int]] = {}
    for place, host in enumerate(hosts):
        on.setdefault(host, []).append(place)
    groups = chain.from_iterable(places[: len(places) - len(places) % multiple] for places in on.values())
    others = sorted((places[len(places) - len(places) % multiple :] for places in on.values()), key=len, reverse=True)
    return sorted([*groups, *chain.from_iterable(others)][:size])


def may_hold_more(d: Draft, ready: Iterable[Worker]) -> list[Worker]:
    """Return living workers that are not READY and were in a generation newer than every commit of the ``ready`` ones.

    They may hold a commit without a report of it. A commit that all members have sealed must not be lost. In a sharded
    job their agents report it; but while no member is known to have left the newest world, its members may train on.
    """
    if d.shards.layouts:
        may_train = not d.ledger.is_broken
        return [w for w in d.workers.values() if may_train and w.ready is None and not w.gone and d.breaks(w)]
    best = newest(ready).generation
    return [w for w in d.workers.values() if w.ready is None and not w.gone and w.joined > best]


def make_world(
    d: Draft, chosen: Sequence[Worker], line: t.CommitId | None, sources: tuple[t.ShardSource, ...]
) -> t.World:
    """Return a world with ranks, root and lacking ranks (I2, I3). The root is the oldest with the newest commit.

    If there is a ``line``, all ranks read their state from its ``sources``, and none receives it from the root.
    """
    in_order = sorted(chosen, key=lambda w: (d.hosts[w.id.host].order, w.id.host, w.id.slot))
    placements = assign([(worker.id, worker.age) for worker in in_order])
    commits = [held(d.workers[placement.worker]) for placement in placements]
    best = newest(chosen)
    root = commits.index(best)
    lacking = [rank for rank, commit in enumerate(commits) if rank != root and (commit != best or commit == NOTHING)]
    first = d.workers[placements[0].worker].ready
    assert first is not None
    world = t.World(
        d.generation + 1,
        placements,
        len(placements),
        root,
        (),
        first.store,
        fresh=not any(worker.joined for worker in chosen),
        line=line,
        sources=sources,
    )
    if line is not None:
        return world
    if resumes_from_copy(d, chosen):
        world = replace(world, durable=durable_source(d, bool(d.shards.layouts) or best != NOTHING))
    if d.shards.layouts:
        return world
    if d.policy.divergence == "restore" and best != NOTHING:
        world = replace(world, start=best)
    keepers = choose_keepers(d, placements, root, lacking, commits)
    world = replace(world, lacking_runs=t.as_runs(lacking), keepers=keepers)
    return replace(world, near_runs=t.as_runs(rank for rank in lacking if _is_near(d, world, rank, best)))


def parts_of(
    world: t.World, options: t.MemberOptions, copy_servers: Mapping[str, str]
) -> Iterator[tuple[str, t.World]]:
    """Yield, by host, the part of a world that its members receive. ``copy_servers``: by host, the address."""
    sources = _first_sources(world.sources)
    hosts = dict.fromkeys(source.copy.host for source in sources)
    world = replace(
        world,
        sources=sources,
        copy_servers=tuple((host, copy_servers.get(host, "")) for host in hosts),
        options=options,
    )
    for host, on_host in groupby(world.members, key=lambda placement: placement.worker.host):
        members = tuple(on_host)
        keepers = set(world.keepers).intersection(member.rank for member in members)
        yield host, replace(world, members=members, keepers=tuple(sorted(keepers)))


def _first_sources(sources: tuple[t.ShardSource, ...]) -> tuple[t.ShardSource, ...]:
    """Return the first copies of each digest, as many as fit into a datagram, in their order."""
    if len(sources) <= _MOST_SOURCES:
        return sources
    number: Counter[int] = Counter()
    places: list[tuple[int, int]] = []
    for source in sources:
        places.append((number[source.digest], len(places)))
        number[source.digest] += 1
    return tuple(sources[place] for place in sorted(place for _, place in sorted(places)[:_MOST_SOURCES]))


def durable_source(d: Draft, is_sharded: bool = False) -> t.DurableSource | None:
    """Return the storage from which a world without a usable commit gets its state; None: the job has none."""
    policy = d.policy
    if policy.durable_dir is None:
        return None
    return t.DurableSource(policy.durable_dir, policy.durable_timeout_s, d.ledger.highest is not None, is_sharded)


def resumes_from_copy(d: Draft, chosen: Iterable[Worker]) -> bool:
    """Return True if a world of ``chosen`` without a commit line starts from a durable copy, if there is one.

    A commit is no use if shards in it are those of one worker: of a sharded job without a line, or of a world of which
    not all members have attached.
    """
    best = newest(chosen)
    if durable_source(d) is None or best == NOTHING or d.shards.layouts:
        return durable_source(d) is not None
    return any(
        worker.ready is not None and worker.ready.has_shards and worker.ready.commit == best for worker in chosen
    )


def _is_near(d: Draft, world: t.World, rank: int, best: t.CommitId) -> bool:
    """Return True if the worker of this rank can read the state from the memory of its host: the commit of its keeper,
    or, if it keeps commits itself, that of the root. ``best``: the newest commit of all members."""
    is_keeper = world.keeps(rank)
    if is_keeper and best == NOTHING:
        return False
    source_rank = world.root if is_keeper else world.keeper_of(rank)
    worker, source = (d.workers[world.members[index].worker] for index in (rank, source_rank))
    if worker.ready is None or source.ready is None or worker.id.host != source.id.host:
        return False
    return worker.ready.names == source.ready.names != 0


def enter(d: Draft, world: t.World) -> None:
    """Enter the members into the new world: their messages from the last one do not count any more. Other workers lose
    their age, and spares their rank."""
    members = {placement.worker for placement in world.members}
    for worker in list(d.workers.values()):
        if worker.age != NEWCOMER and worker.id not in members:
            is_spare = worker.ready is not None and not worker.draining
            d.put(worker, age=NEWCOMER, rank=None if is_spare else worker.rank)
    for slot_id, slot in list(d.slots.items()):
        if slot.age != NEWCOMER:
            d.put_slot(slot_id, age=NEWCOMER)
    age, lacking = d.ledger.next_age, set(world.lacking)
    for placement in world.members:
        worker = d.workers[placement.worker]
        newcomer = worker.age == NEWCOMER
        d.put(
            worker,
            joined=world.generation,
            first_joined=worker.first_joined or world.generation,
            rank=placement.rank,
            age=age if newcomer else worker.age,
            ready=None,
            answer=None,
            in_gate=False,
            lacked=placement.rank in lacking,
            keeps=world.keeps(placement.rank),
            draining_since=d.now if worker.draining else worker.draining_since,
            ticks=0,
            ticks_at=d.now,
            moved_at=d.now,
            still_s=0.0,
            trains_since=None,
            place=t.Place.REGROUP,
            suspect_at=None,
            suspect_error="",
            confirmed_at=None,
            call=None,
            waits_since=inf,
            pace=(),
            digests=(),
        )
        age += newcomer
    ticking = Ticking(at=d.now, times=d.ledger.ticking.times)
    d.update_ledger(next_age=age, own_errors=0, own_error=None, is_broken=False, ticking=ticking)
    world_is_over(d)
    if d.shards.layouts:
        d.update_shards(line=world.line, line_at=d.now if world.line != d.shards.line else d.shards.line_at)
    for host in list(d.hosts.values()):
        if host.may_live_until > -inf:
            d.put_host(host, may_live_until=-inf)  # the old world stands still: reports from it prove nothing
    d.world = world


def survivors_of(d: Draft, chosen: Sequence[Worker]) -> list[t.Ready]:
    """Return the READY messages of the workers that come from the present generation."""
    return [w.ready for w in chosen if w.ready is not None and w.joined == d.generation > 0]
