"""Worlds of plain workers, which do not use ``run``: who is in one, when it starts, and its publication.

All workers of such a world start together, because each reads its place when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from elasticstate.core import accounting, types as t
from elasticstate.core.assignment import NEWCOMER, assign
from elasticstate.core.phases import Round, Together
from elasticstate.core.records import Draft, Waiting
from elasticstate.core.texts import number_of


def may_start(d: Draft) -> bool:
    """Return True if a round may start: the command may be plain, and no worker of the last round lives."""
    return d.ledger.kind != "elastic" and d.ledger.round is None and not d.workers and isinstance(d.phase, Waiting)


def window_end(d: Draft) -> float:
    """Return the time until which a round waits for more slots, when the free slots are enough but fewer than np."""
    return d.ledger.enough_since + d.policy.join_window_s


def chosen(d: Draft, free: Sequence[t.SlotId], are_more_expected: bool) -> list[t.SlotId]:
    """Return the free slots in which a round starts now; [] to wait for more slots."""
    policy = d.policy
    if len(free) < policy.fewest(d.generation):
        return []
    if len(free) < policy.np and are_more_expected and d.now < window_end(d):
        return []
    return list(free[: policy.max_np])


def places(d: Draft, workers: Iterable[t.WorkerId]) -> list[tuple[t.Placement, t.PlainPlace]]:
    """Return the places of ``workers``, which are in the order of their hosts."""
    placements = assign([(worker, NEWCOMER) for worker in workers])
    first: dict[str, int] = {}
    for placement in placements:
        first.setdefault(placement.worker.host, placement.rank)
    return [
        (
            p,
            t.PlainPlace(
                generation=d.generation + 1,
                rank=p.rank,
                size=len(placements),
                local_rank=p.rank - first[p.worker.host],
                local_size=p.local_size,
                group_rank=p.cross_rank,
                group_size=p.cross_size,
                restarts=d.ledger.restarts,
                max_restarts=d.policy.reset_limit,
                store_host=placements[0].worker.host,
            ),
        )
        for p in placements
    ]


def begin_round(d: Draft, members: Iterable[t.Placement]) -> None:
    """Record that these workers have been started together. Publish their world if the command is known to be plain."""
    d.update_ledger(round=Round(tuple(members), d.now), enough_since=inf)
    if d.ledger.kind == "plain":
        publish(d)


def publish(d: Draft) -> None:
    """Enter Together: the present round is a world. A failure, a change of the members or their end ends this phase."""
    present = d.ledger.round
    assert present is not None
    left = [] if d.world is None else [str(member.worker) for member in d.world.members]
    accounting.next_generation(d)
    d.world = t.World(d.generation + 1, present.members, 0, (), "", fresh=True, is_plain=True)
    for member in present.members:
        worker = d.workers.get(member.worker)
        if worker is not None:
            generation = d.world.generation
            d.put(worker, joined=generation, first_joined=generation, rank=member.rank, ready_at=d.now, place="train")
    d.update_ledger(is_broken=False)
    for host in list(d.hosts.values()):
        if host.may_live_until > -inf:
            d.put_host(host, may_live_until=-inf)
    d.note(
        "world_formed",
        size=d.world.size,
        hosts=d.world.members[0].cross_size,
        joined=[str(member.worker) for member in present.members],
        left=left,
        root=0,
        synced=0,
        plain=True,
    )
    d.phase = Together(since=present.since)
    d.reason = f"world {d.world.generation}: {number_of(d.world.size, 'worker')} without run"
