"""A second implementation of the ranks, slow and simple on purpose: it compares workers pair by pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elasticstate.core.ids import WorkerId
from elasticstate.core.types import Placement


def naive_placements(
    workers: Sequence[WorkerId], ages: Mapping[WorkerId, int], host_order: Sequence[str]
) -> tuple[Placement, ...]:
    """Place ``workers``. Workers without an age are newcomers, younger than all others; see ``assignment.assign``."""

    def oldest(host: str) -> float:
        return min(age_of(worker) for worker in workers if worker.host == host)

    def age_of(worker: WorkerId) -> float:
        return ages.get(worker, float("inf"))

    def host_before(one: str, other: str) -> bool:
        if oldest(one) != oldest(other):
            return oldest(one) < oldest(other)
        return host_order.index(one) < host_order.index(other)

    def before(one: WorkerId, other: WorkerId) -> bool:
        if one.host != other.host:
            return host_before(one.host, other.host)
        if age_of(one) != age_of(other):
            return age_of(one) < age_of(other)
        return one.slot < other.slot

    hosts = {worker.host for worker in workers}
    placements = []
    for worker in workers:
        mates = [mate for mate in workers if mate.host == worker.host]
        placements.append(
            Placement(
                worker=worker,
                rank=sum(before(other, worker) for other in workers if other != worker),
                local_rank=worker.slot,
                local_size=len(mates),
                local_place=sum(before(mate, worker) for mate in mates if mate != worker),
                cross_rank=sum(host_before(host, worker.host) for host in hosts if host != worker.host),
                cross_size=len(hosts),
            )
        )
    return tuple(sorted(placements, key=lambda placement: placement.rank))
