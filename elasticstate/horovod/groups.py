"""The process groups of the present world: of all its ranks, and of each process set. Made again in each world."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

import elasticstate
from elasticstate.errors import UsageError
from elasticstate.extension import begin_call, end_call, world_generation
from elasticstate.horovod import headers
from elasticstate.horovod.calls import Call, CallKind
from elasticstate.horovod.members import Members

GLOBAL = 0  # id of the process set of all ranks

_sets: dict[int, tuple[int, ...]] = {}  # id -> ranks: all other process sets, in the order of their creation
_next_id = GLOBAL + 1
_made: tuple[int, int] | None = None  # generation in which ``make`` was called last, and _next_id at that time
_members: dict[int, Members] = {}  # by id of the process set: those of the newest world for which groups were made


def add(ranks: tuple[int, ...]) -> int:
    """Add a process set, and return its id. ``make`` makes its groups later."""
    global _next_id
    number, _next_id = _next_id, _next_id + 1
    _sets[number] = ranks
    return number


def remove(number: int) -> None:
    """Remove a process set, and destroy its groups, if they belong to the present world."""
    _sets.pop(number, None)
    members = _members.pop(number, None)
    if members is None or members.generation != world_generation():
        return
    for group in (members.group, members.lane):
        if group is not None:
            dist.destroy_process_group(group)


def has_sets() -> bool:
    return bool(_sets)


def find(ranks: tuple[int, ...]) -> int | None:
    """Return the id of the process set of these ranks; None: there is none."""
    return next((number for number, known in _sets.items() if known == ranks), None)


def are_made() -> bool:
    """Return True if ``make`` was called in the present world."""
    return _made is not None and _made[0] == world_generation()


def are_missing() -> bool:
    """Return True if ``make`` has groups to make."""
    return _made != (world_generation(), _next_id)


def make() -> None:
    """Make the groups of the present world that are missing. All ranks must call this at the same point.

    Raises UsageError, on all ranks, if their process sets differ, and torch's error if a peer dies.
    """
    global _made
    generation, size, rank = elasticstate.generation(), elasticstate.size(), elasticstate.rank()
    everyone = tuple(range(size))
    if GLOBAL not in _members or _members[GLOBAL].generation != generation:
        _members.clear()
        lane = weakref.ref(_new_groups(GLOBAL, everyone, 1)[0]) if size > 1 else None
        _members[GLOBAL] = Members(generation, everyone, rank, None, lane)
    missing = {number: ranks for number, ranks in _sets.items() if number not in _members and ranks[-1] < size}
    if missing:
        lines = [f"process set {list(ranks)}" for ranks in missing.values()]
        headers.agree(Call(CallKind.OTHER, ("the process sets", *lines)), _members[GLOBAL])
    for number, ranks in missing.items():
        index = ranks.index(rank) if rank in ranks else -1
        groups = _new_groups(number, ranks, 2) if size > 1 else []
        calls, lane = (weakref.ref(group) for group in groups) if groups and index >= 0 else (None, None)
        _members[number] = Members(generation, ranks, index, calls, lane, number)
    _made = generation, _next_id


def _new_groups(number: int, ranks: tuple[int, ...], count: int) -> list[Any]:
    """Return new groups of a process set. All ranks of the world must call this, as new_group demands."""
    begin_call(world_generation(), number, () if number == GLOBAL else ranks, 0, "the first call, which makes groups")
    try:
        return [dist.new_group(None if number == GLOBAL else list(ranks)) for _ in range(count)]
    finally:
        end_call()


def members_of(number: int) -> Members:
    """Return the members of a process set in the present world. Raises UsageError if a rank is missing there."""
    members = _members.get(number)
    if members is None:
        ranks = list(_sets[number])
        raise UsageError(
            f"ProcessSet({ranks}) needs rank {ranks[-1]}, but the world has {elasticstate.size()} ranks. Choose ranks "
            "that are in every world: 0 to --min-np - 1."
        )
    return members
