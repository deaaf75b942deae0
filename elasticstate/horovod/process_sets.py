"""Process sets: subsets of the ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from elasticstate.horovod import world
from elasticstate.horovod.calls import CallUsageError, Members


class ProcessSet:
    """A subset of the ranks. Pass it to ``init`` or ``add_process_set``, then to collectives as ``process_set=``.

    The ranks stay the same in each world, and the workers that have them may change.

    Args:
        ranks: ranks of the world, in any order.

    Raises ValueError if they are not numbers from 0 on, or repeated, or none.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        given: list[Any] = list(ranks) if isinstance(ranks, Iterable) else [None]
        if not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in given):
            raise ValueError(f"ProcessSet({ranks!r}): must be ranks, numbers from 0 on. Pass a list, such as [0, 2].")
        if len(set(given)) < len(given) or not given:
            raise ValueError(f"ProcessSet({ranks!r}): must be at least one rank, and each only once.")
        self._ranks: tuple[int, ...] = tuple(sorted(given))
        self._id: int | None = None

    @property
    def process_set_id(self) -> int | None:
        """Number of the process set: 0 for ``global_process_set``. None before ``add_process_set``."""
        return self._id

    @property
    def ranks(self) -> list[int] | None:
        """Ranks of the world, ascending; None after ``remove_process_set``."""
        return list(self._ranks) or None

    def included(self) -> bool | None:
        """Return True if this worker's rank is in the set; None before ``add_process_set``. Joins the world."""
        return None if self._id is None else world.rank() in self._ranks

    def size(self) -> int | None:
        """Return the number of ranks; None before ``add_process_set``. Joins the world."""
        if self._id is None:
            return None
        world.size()
        return len(self._ranks)

    def rank(self) -> int | None:
        """Return the index of this worker's rank in the set; None before ``add_process_set``. Joins the world.

        Raises ValueError if this worker's rank is not in the set.
        """
        if self._id is None:
            return None
        own = world.rank()
        if own not in self._ranks:
            raise ValueError(f"{self}: rank {own} is not in the set. Call included() first.")
        return self._ranks.index(own)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self._id}, ranks={list(self._ranks)})"


class _GlobalProcessSet(ProcessSet):
    """The process set of all ranks."""

    def __init__(self) -> None:
        self._id = world.GLOBAL

    @property
    def ranks(self) -> list[int]:
        """All ranks of the world. Joins the world."""
        return list(range(world.size()))

    def included(self) -> bool:
        return True

    def size(self) -> int:
        return world.size()

    def rank(self) -> int:
        return world.rank()

    def __repr__(self) -> str:
        return "ProcessSet(process_set_id=0)"


global_process_set = _GlobalProcessSet()
_added: list[ProcessSet] = []


def init(comm: object = None, process_sets: object = None) -> None:
    """Enable the functions of this package. The first function that needs a world joins it later.

    So a new worker can load its data before the others wait for it. In a world that another launcher has started, such
    as mpirun, this function joins the world at once.

    Args:
        comm: for old scripts only: must be None.
        process_sets: process sets to add, the same on all ranks; None, or "dynamic": none.

    Raises UsageError for a ``comm``, and if the processes of another launcher cannot form a world.
    """
    world.init(comm)
    if process_sets is None or isinstance(process_sets, str):
        return
    given_sets: list[Any] = list(process_sets) if isinstance(process_sets, Iterable) else [process_sets]
    for given in given_sets:
        wanted = given if isinstance(given, ProcessSet) else ProcessSet(given)
        if wanted.process_set_id is None:  # else: init() is called again
            add_process_set(wanted)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set, and return it. All ranks must add the same process sets in the same order.

    Its process groups are made when all ranks are in a world, and again in each new world. A script may add it anew in
    each world; it is the same process set then.

    Raises:
        ValueError: the ranks are wrong, there is a process set of these ranks in this world already, or this one was
            removed.
        UsageError: on all ranks: they add different process sets.
        The errors of a collective.
    """
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if wanted.process_set_id == world.GLOBAL:
        raise ValueError(f"add_process_set({wanted}): it exists in each world. Use it without adding it.")
    ranks = tuple(wanted.ranks or ())
    if not ranks:
        raise ValueError(f"add_process_set({wanted}): it was removed. Make a new ProcessSet.")
    number = world.find(ranks)
    if number is not None and world.is_added(number):
        raise ValueError(f"add_process_set({wanted}): there is a process set of these ranks already. Use that one.")
    wanted._id = world.add(ranks)
    if wanted not in _added:
        _added.append(wanted)
    if world.is_in_use():
        world.ready()
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, on all ranks. Return False for ``global_process_set``, and for one that was not added."""
    if process_set.process_set_id in (None, world.GLOBAL):
        return False
    number = process_set.process_set_id
    world.remove(number or 0)
    for removed in [added for added in _added if added.process_set_id == number]:
        _added.remove(removed)
        removed._id, removed._ranks = None, ()
    return True


def process_sets() -> list[ProcessSet]:
    """Return all process sets, by their ids."""
    return [global_process_set, *{added.process_set_id: added for added in _added}.values()]


def need_process_set(process_set: object) -> None:
    """Raise UsageError unless the argument is a ProcessSet or None."""
    if process_set is not None and not isinstance(process_set, ProcessSet):
        raise CallUsageError(f"process_set={process_set!r}: must be a ProcessSet")


def is_member(process_set: ProcessSet | None) -> bool:
    """Return True if this worker's rank is in the process set (None: all ranks). Joins the world."""
    return process_set is None or bool(process_set.included())


def members_of(process_set: ProcessSet | None) -> Members:
    """Return the members of a process set (None: all ranks) for a call of this worker. Joins a world.

    Raises UsageError for anything that is not an added process set, and if this worker's rank is not in it.
    """
    number = world.GLOBAL
    if process_set is not None:
        need_process_set(process_set)
        if process_set.process_set_id is None:
            raise CallUsageError(
                f"process_set={process_set}: it was not added. Call hvd.add_process_set() on all ranks first."
            )
        number = process_set.process_set_id
    world.ready()
    members = world.members_of(number)
    if members.index < 0:
        raise CallUsageError(
            f"process_set={process_set}: rank {world.rank()} is not in it. Call the collective on its ranks only: "
            "if process_set.included()."
        )
    return members
