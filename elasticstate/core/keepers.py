"""Keepers: with --one-copy-per-host, the root and one member of each host keep commits; the others are followers.

A follower restores the commit of its host's keeper. It never counts as a holder of the job's state, because it has no
buffers that outlive a failure. See docs/decisions/one-copy-per-host.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticstate.core import types as t
from elasticstate.core.state import Draft


def keeps(world: t.World, rank: int) -> bool:
    """Return True if this rank keeps commits of its own."""
    return not world.keepers or rank in world.keepers


def keeper_of(world: t.World, rank: int) -> int:
    """Return the rank whose commits this rank restores: itself, or a keeper on its host, the root before others."""
    if keeps(world, rank):
        return rank
    host = world.members[rank].worker.host
    mates = [keeper for keeper in world.keepers if world.members[keeper].worker.host == host]
    return world.root if world.root in mates else mates[0]


def choose_keepers(
    d: Draft, placements: Sequence[t.Placement], root: int, lacking: Sequence[int], commits: Sequence[t.CommitId]
) -> tuple[int, ...]:
    """Return the ranks that keep commits; (): all ranks do. ``commits``: by rank.

    A member that stays is a keeper rather than one that drains; a member with the state rather than one that lacks it;
    a member with an older commit, whose buffers exist, rather than one without; a low slot rather than a high one.
    """
    if not d.policy.one_copy_per_host:
        return ()
    lack = set(lacking)
    best: dict[str, tuple[bool, bool, int, int, int, int]] = {}
    for rank, (placement, commit) in enumerate(zip(placements, commits, strict=True)):
        worker = placement.worker
        drains = bool(d.workers[worker].draining)
        key = (drains, rank in lack, -commit.generation, -commit.tick, worker.slot, rank)
        best[worker.host] = min(key, best.get(worker.host, key))
    return tuple(sorted({root, *(key[-1] for key in best.values())}))
