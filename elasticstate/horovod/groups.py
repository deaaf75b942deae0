"""The process groups of the present world: of all its ranks, and of each process set. Made again in each world.

A script may add its process sets once, or anew in each world, as in Horovod. On entry into a world with running
members, those that all members know are made again. A newcomer does not know those that a script adds inside
``elastic.run`` yet: their groups are made when all members add them.
"""

from __future__ import annotations

import json
import weakref
import zlib
from typing import Any

import torch.distributed as dist

import elasticstate
from elasticstate.extension import Channel, begin_call, end_call, world_generation, world_is_new
from elasticstate.horovod import headers
from elasticstate.horovod.calls import Call, CallKind
from elasticstate.horovod.failures import CallUsageError
from elasticstate.horovod.members import Members

GLOBAL = 0  # id of the process set of all ranks

_sets: dict[int, tuple[int, ...]] = {}  # id -> ranks: all other process sets, in the order of their creation
_next_id = GLOBAL + 1
_added_in: dict[int, int] = {}  # id -> generation in which the script has added it last; 0: before a world, or init()
_additions = 0
_made: tuple[int, int] | None = None  # generation in which ``make`` was called last, and _additions at that time
_members: dict[int, Members] = {}  # by id of the process set: those of the newest world for which groups were made


def add(ranks: tuple[int, ...]) -> int:
    """Add a process set, which may be known from an earlier world. Return its id. ``make`` makes its groups later."""
    global _next_id, _additions
    number = find(ranks)
    if number is None:
        number, _next_id = _next_id, _next_id + 1
        _sets[number] = ranks
    _added_in[number] = world_generation()
    _additions += 1
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


def is_added(number: int) -> bool:
    """Return True if the script has added the process set in the present world."""
    return _added_in[number] == world_generation()


def begin_anew() -> None:
    """Let the script add its process sets again. They were added before its ``shutdown()``."""
    _added_in.update(dict.fromkeys(_sets, 0))


def open_calls() -> list[str]:
    """Return the calls of this rank that other ranks have not made."""
    return [late.call.lines[0] for members in _members.values() for late in members.earlier.values()]


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
    return _made != (world_generation(), _additions)


def make() -> None:
    """Make the groups of the present world that are missing. All ranks must call this at the same point.

    Raises UsageError, on all ranks, if their process sets differ, and torch's error if a peer dies.
    """
    global _made
    generation, size, rank = elasticstate.generation(), elasticstate.size(), elasticstate.rank()
    everyone = tuple(range(size))
    enters = GLOBAL not in _members or _members[GLOBAL].generation != generation
    if enters:
        _members.clear()
        lane = weakref.ref(_new_groups((), 1)[0]) if size > 1 else None
        _members[GLOBAL] = Members(generation, everyone, rank, None, lane)
    missing = {number: ranks for number, ranks in _sets.items() if number not in _members and ranks[-1] < size}
    if enters and size > 1 and not world_is_new():
        known = _known_to_all()
        missing = {number: ranks for number, ranks in sorted(missing.items(), key=_ranks) if ranks in known}
    else:
        if not enters:
            missing = {number: ranks for number, ranks in missing.items() if is_added(number)}
        if missing:
            lines = [f"process set {list(ranks)}" for ranks in missing.values()]
            headers.agree(Call(CallKind.OTHER, ("the process sets", *lines)), _members[GLOBAL])
    for number, ranks in missing.items():
        index = ranks.index(rank) if rank in ranks else -1
        groups = _new_groups(ranks, 2) if size > 1 else []
        calls, lane = (weakref.ref(group) for group in groups) if groups and index >= 0 else (None, None)
        _members[number] = Members(generation, ranks, index, calls, lane, _common_number(ranks))
        _added_in[number] = _added_in[number] or generation
    _made = generation, _additions


def _ranks(entry: tuple[int, tuple[int, ...]]) -> tuple[int, ...]:
    return entry[1]


def _known_to_all() -> set[tuple[int, ...]]:
    """Return the ranks of the process sets that all members of the world have."""
    begin_call(world_generation(), GLOBAL, (), 0, "the first call, which makes groups")
    try:
        lists = Channel(None, 0).messages_of_all(json.dumps(list(_sets.values())).encode())
    finally:
        end_call()
    return set.intersection(*({tuple(ranks) for ranks in json.loads(each)} for each in lists))


def _common_number(ranks: tuple[int, ...]) -> int:
    """Return the number of a process set for the stall check. Ids may differ between old and new workers."""
    return zlib.crc32(repr(ranks).encode()) + 1 if ranks else GLOBAL


def _new_groups(ranks: tuple[int, ...], count: int) -> list[Any]:
    """Return new groups of ranks (none: all). All ranks of the world must call this, as new_group demands."""
    begin_call(world_generation(), _common_number(ranks), ranks, 0, "the first call, which makes groups")
    try:
        return [dist.new_group(list(ranks) or None) for _ in range(count)]
    finally:
        end_call()


def members_of(number: int) -> Members:
    """Return the members of a process set in the present world. Raises UsageError if it does not exist there."""
    members = _members.get(number)
    if members is None:
        ranks = list(_sets[number])
        if ranks[-1] < elasticstate.size():
            raise CallUsageError(
                f"ProcessSet({ranks}) was added in an earlier world, and a new worker has not added it. Call "
                "hvd.add_process_set() in each world, on all ranks, or on all workers before the elastic function."
            )
        raise CallUsageError(
            f"ProcessSet({ranks}) needs rank {ranks[-1]}, but the world has {elasticstate.size()} ranks. Choose ranks "
            "that are in every world: 0 to --min-np - 1."
        )
    return members
