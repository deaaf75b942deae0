"""Assignment of ranks. The ranks of a host are contiguous. Hosts are ordered by their oldest worker, the workers of a
host by age, then by slot. Rank 0 is the oldest worker."""

from __future__ import annotations

from collections.abc import Sequence

from elasticstate.core.types import Placement, WorkerId

NEWCOMER = 1 << 62
"""Age of a worker that was not in the last world: younger than every survivor."""


def assign(workers: Sequence[tuple[WorkerId, int]]) -> tuple[Placement, ...]:
    """Place ``(worker, age)`` pairs. A smaller age is older. Hosts with equal ages keep their order in ``workers``.

    So survivors keep their order within a host, and hosts keep their order as long as their oldest worker lives.
    """
    hosts: dict[str, list[tuple[int, int, WorkerId]]] = {}
    for worker, age in workers:
        hosts.setdefault(worker.host, []).append((age, worker.slot, worker))
    for members in hosts.values():
        members.sort()
    ordered = sorted(hosts.values(), key=lambda members: members[0][0])
    placements: list[Placement] = []
    for cross_rank, members in enumerate(ordered):
        for position, (_, slot, worker) in enumerate(members):
            placements.append(
                Placement(
                    worker=worker,
                    rank=len(placements),
                    local_rank=slot,
                    local_size=len(members),
                    local_leader=position == 0,
                    cross_rank=cross_rank,
                    cross_size=len(ordered),
                )
            )
    return tuple(placements)


def fixed_placement(places: Sequence[tuple[str, int]], rank: int) -> Placement:
    """Return the placement of ``rank`` in a world of another launcher. ``places``: host and local rank of each rank."""
    hosts = list(dict.fromkeys(host for host, _ in places))
    host, local_rank = places[rank]
    members = [other for other, (name, _) in enumerate(places) if name == host]
    return Placement(
        worker=WorkerId(host, local_rank, 1),
        rank=rank,
        local_rank=local_rank,
        local_size=len(members),
        local_leader=rank == members[0],
        cross_rank=hosts.index(host),
        cross_size=len(hosts),
    )
