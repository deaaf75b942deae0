"""``init()``, ``rank()``, ``size()`` and similar functions: elasticstate's present world under Horovod's names.

The file also has the process sets, the process groups of the world and of these, and start and stop of a timeline.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import sys
import weakref
import zlib
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elasticstate
from elasticstate import extension
from elasticstate.errors import CollectiveError
from elasticstate.extension import Channel, begin_call, end_call, world_generation, world_is_new
from elasticstate.horovod import negotiation, timeline
from elasticstate.horovod.calls import (
    ArgumentUsageError,
    Call,
    CallKind,
    CallUsageError,
    Members,
    NotInitializedError,
    failures_named,
)
from elasticstate.horovod.timeline import Recorder

__all__ = [
    "ProcessSet",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

# --------------------------------------------------------------------------------------------------------------- builds
# Features of this installation, for scripts that choose by them.


def mpi_built() -> bool:
    """Return True if torch has its MPI backend."""
    return bool(dist.is_mpi_available())


def gloo_built() -> bool:
    """Return True if torch has its Gloo backend."""
    return bool(dist.is_gloo_available())


def nccl_built() -> bool:
    """Return True if torch has its NCCL backend."""
    return bool(dist.is_nccl_available())


def ccl_built() -> bool:
    """Return False: oneCCL is not supported."""
    return False


def ddl_built() -> bool:
    """Return False: IBM's DDL is not supported."""
    return False


def cuda_built() -> bool:
    """Return True if torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return True if torch was built for ROCm."""
    return torch.version.hip is not None


def mpi_enabled() -> bool:
    """Return True if the present world uses MPI. False outside a world."""
    return dist.is_initialized() and "mpi" in str(dist.get_backend())


def gloo_enabled() -> bool:
    """Return True unless the present world uses MPI."""
    return not mpi_enabled()


def mpi_threads_supported() -> bool:
    """Return False: no code here needs MPI calls from several threads."""
    return False


# --------------------------------------------------------------------------------------------------------------- groups
# The process groups of the present world: of all its ranks, and of each process set. Made again in each world: on entry
# for the sets that all members know. A newcomer does not know those that a script adds inside ``elastic.run`` yet.


GLOBAL = 0  # id of the process set of all ranks

_sets: dict[int, tuple[int, ...]] = {}  # id -> ranks: all other process sets, in the order of their creation
_numbers = itertools.count(GLOBAL + 1)
_added_in: dict[int, int] = {}  # id -> generation in which the script has added it last; 0: before a world, or init()
_additions = 0
_made: tuple[int, int] | None = None  # generation in which ``_make`` was called last, and _additions at that time
_members: dict[int, Members] = {}  # by id of the process set: those of the newest world for which groups were made


def open_calls() -> list[str]:
    """Return the calls of this rank that other ranks have not made."""
    return [late.call.lines[0] for members in _members.values() for late in members.earlier.values()]


def has_sets() -> bool:
    """Return True if there are process sets besides that of all ranks."""
    return bool(_sets)


def _are_missing() -> bool:
    """Return True if ``_make`` has groups to make."""
    return _made != (world_generation(), _additions)


def _make() -> None:
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
        missing = {number: ranks for number, ranks in sorted(missing.items(), key=itemgetter(1)) if ranks in known}
    else:
        if not enters:
            missing = {number: ranks for number, ranks in missing.items() if _added_in[number] == generation}
        if missing:
            lines = [f"process set {list(ranks)}" for ranks in missing.values()]
            negotiation.agree(Call(CallKind.OTHER, ("the process sets", *lines)), _members[GLOBAL])
    for number, ranks in missing.items():
        index = ranks.index(rank) if rank in ranks else -1
        groups = _new_groups(ranks, 2) if size > 1 else []
        calls, lane = (weakref.ref(group) for group in groups) if groups and index >= 0 else (None, None)
        _members[number] = Members(generation, ranks, index, calls, lane, _common_number(ranks))
        _added_in[number] = _added_in[number] or generation
    _made = generation, _additions


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
        return None if self._id is None else rank() in self._ranks

    def size(self) -> int | None:
        """Return the number of ranks; None before ``add_process_set``. Joins the world."""
        if self._id is None:
            return None
        size()
        return len(self._ranks)

    def rank(self) -> int | None:
        """Return the index of this worker's rank in the set; None before ``add_process_set``. Joins the world.

        Raises ValueError if this worker's rank is not in the set.
        """
        if self._id is None:
            return None
        own = rank()
        if own not in self._ranks:
            raise ValueError(f"{self}: rank {own} is not in the set. Call included() first.")
        return self._ranks.index(own)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self._id}, ranks={list(self._ranks)})"


class _GlobalProcessSet(ProcessSet):
    """The process set of all ranks."""

    def __init__(self) -> None:
        self._id = GLOBAL

    @property
    def ranks(self) -> list[int]:
        """All ranks of the world. Joins the world."""
        return list(range(size()))

    def included(self) -> bool:
        return True

    def size(self) -> int:
        return size()

    def rank(self) -> int:
        return rank()

    def __repr__(self) -> str:
        return "ProcessSet(process_set_id=0)"


global_process_set = _GlobalProcessSet()
_added: list[ProcessSet] = []


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
    global _additions
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if wanted.process_set_id == GLOBAL:
        raise ValueError(f"add_process_set({wanted}): it exists in each world. Use it without adding it.")
    ranks = tuple(wanted.ranks or ())
    if not ranks:
        raise ValueError(f"add_process_set({wanted}): it was removed. Make a new ProcessSet.")
    number = next((number for number, known in _sets.items() if known == ranks), None)
    if number is None:
        number = next(_numbers)
        _sets[number] = ranks
    elif _added_in[number] == world_generation():
        raise ValueError(f"add_process_set({wanted}): there is a process set of these ranks already. Use that one.")
    _added_in[number] = world_generation()
    _additions += 1
    wanted._id = number
    if wanted not in _added:
        _added.append(wanted)
    if _initialized and dist.is_initialized() and _made is not None and _made[0] == world_generation():
        ready()
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, on all ranks. Return False for ``global_process_set``, and for one that was not added."""
    number = process_set.process_set_id
    if number is None or number == GLOBAL:
        return False
    _sets.pop(number, None)
    members = _members.pop(number, None)
    if members is not None and members.generation == world_generation():
        for group in (members.group, members.lane):
            if group is not None:
                dist.destroy_process_group(group)
    for removed in [added for added in _added if added.process_set_id == number]:
        _added.remove(removed)
        removed._id, removed._ranks = None, ()
    return True


def need_process_set(process_set: object) -> None:
    """Raise UsageError unless the argument is a ProcessSet or None."""
    if process_set is not None and not isinstance(process_set, ProcessSet):
        raise CallUsageError(f"process_set={process_set!r}: must be a ProcessSet")


def members_of(process_set: ProcessSet | None) -> Members:
    """Return the members of a process set (None: all ranks) for a call of this worker. Joins a world.

    Raises UsageError for anything that is not an added process set, and if this worker's rank is not in it.
    """
    number = GLOBAL
    if process_set is not None:
        need_process_set(process_set)
        if process_set.process_set_id is None:
            raise CallUsageError(
                f"process_set={process_set}: it was not added. Call hvd.add_process_set() on all ranks first."
            )
        number = process_set.process_set_id
    ready()
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
    if members.index < 0:
        raise CallUsageError(
            f"process_set={process_set}: rank {rank()} is not in it. Call the collective on its ranks only: "
            "if process_set.included()."
        )
    return members


logger = logging.getLogger("elasticstate.horovod")

_initialized = False
_exported_in = 0  # generation of the world whose HOROVOD_RANK and other variables are set
_initialized_in: int | None = None  # the process: a forked child must not leave the world


def init(comm: object = None, process_sets: object = None) -> None:
    """Enable the functions of this package. The first function that needs a world joins it later.

    So a new worker can load its data before the others wait for it. In a world that another launcher has started, such
    as mpirun, this function joins the world at once.

    Args:
        comm: for old scripts only: must be None.
        process_sets: process sets to add, the same on all ranks; None, or "dynamic": none.

    Raises UsageError for a ``comm``, and if the processes of another launcher cannot form a world.
    """
    global _initialized, _initialized_in
    if comm:
        raise ArgumentUsageError(
            "init(comm=...): elasticstate.horovod has one world, of all workers of elasticrun. For a part of it, use "
            "a process set: hvd.add_process_set(ranks)."
        )
    is_in_fixed_world = extension.join_fixed_world()
    _initialized = True
    extension.keep_last_world()
    os.environ.update(HOROVOD_HOSTNAME=extension.host(), HOROVOD_LOCAL_RANK=str(local_rank()))
    if is_in_fixed_world:
        _export()
    if _initialized_in is None:
        atexit.register(_leave_at_exit)
    _initialized_in = os.getpid()
    path = extension.environment_variable("HOROVOD_TIMELINE")
    if path not in ("", "DYNAMIC") and timeline.present() is None:  # DYNAMIC: the script starts it
        start_timeline(path, extension.environment_variable("HOROVOD_TIMELINE_MARK_CYCLES") not in ("", "0"))
    if process_sets is None or isinstance(process_sets, str):
        return
    given_sets: list[Any] = list(process_sets) if isinstance(process_sets, Iterable) else [process_sets]
    for given in given_sets:
        wanted = given if isinstance(given, ProcessSet) else ProcessSet(given)
        if wanted.process_set_id is None:  # else: init() is called again
            add_process_set(wanted)


def shutdown() -> None:
    """In a script without ``elastic.run``: wait for all other members of the world, if this process has joined one.

    After that, a failure restarts no worker. The world exists until the process ends, for a second ``init()``.

    Raises CollectiveError if the world fails before all members arrive.
    """
    global _initialized
    if _initialized:
        _initialized = False
        _added_in.update(dict.fromkeys(_sets, 0))  # after another init(), the script may add them again
        for call in open_calls():
            logger.warning("%s has had no effect: other ranks have not made this call", call)
        extension.leave()


def _leave_at_exit() -> None:
    if os.getpid() != _initialized_in:
        return
    if (recorder := timeline.present()) is not None:
        recorder.close()
    # After an exception, skip the exit gate: the others must not wait for this worker, they must detect its death.
    if getattr(sys, "last_value", None) is not None:
        return
    try:
        shutdown()
        extension.end_last_world()
    except CollectiveError as error:
        logger.warning("the world failed before all workers reached its end: %s", error)
    except SystemExit:
        pass  # the driver has sent LEAVE


def is_initialized() -> bool:
    """Return True after ``init()`` until ``shutdown()``."""
    return _initialized


def ready() -> None:
    """Join a world, and make the process groups for collectives.

    Raises NotInWorldError before ``init()``, and after the end of the world. Raises UsageError in a new worker outside
    ``elastic.run`` while the others are inside.
    """
    need_init()
    extension.join(collectives=True)
    _export()
    if not dist.is_initialized():
        raise NotInitializedError(
            "the world has ended: the function decorated with elastic.run has raised an exception, or this process "
            "ends. Call collectives before that."
        )
    if _are_missing():
        with failures_named():
            _make()


def rank() -> int:
    """Return this worker's rank in the world, 0 to size() - 1. Joins the world.

    Raises NotInWorldError before ``init()``.
    """
    _join()
    return elasticstate.rank()


def size() -> int:
    """Return the number of workers in the world. Joins the world. Raises NotInWorldError before ``init()``."""
    _join()
    return elasticstate.size()


def local_rank() -> int:
    """Return this worker's place among the workers of its host, without gaps. Needs no world.

    It is the slot, which is the device index, before the first world and where torch sees several CUDA devices. Raises
    NotInWorldError before ``init()``.
    """
    need_init()
    return extension.libraries_local_rank()


def local_size() -> int:
    """Return the number of workers of the world on this host. Joins the world.

    Raises NotInWorldError before ``init()``.
    """
    _join()
    return elasticstate.local_size()


def cross_rank() -> int:
    """Return the index of this host among the hosts of the world. Joins the world.

    Raises NotInWorldError before ``init()``.
    """
    _join()
    return elasticstate.cross_rank()


def cross_size() -> int:
    """Return the number of hosts in the world. Joins the world. Raises NotInWorldError before ``init()``."""
    _join()
    return elasticstate.cross_size()


def is_homogeneous() -> bool:
    """Return True if this host has exactly the average number of workers of the world's hosts.

    If all hosts have equally many workers, all ranks get True. Joins the world. Raises NotInWorldError before
    ``init()``.
    """
    return local_size() * cross_size() == size()


def need_init() -> None:
    """Raise NotInWorldError before ``init()``."""
    if not _initialized:
        raise NotInitializedError("elasticstate.horovod is not initialized. Call hvd.init() first.")


def _join() -> None:
    need_init()
    extension.join()
    _export()
    if has_sets() and extension.world_is_new() and dist.is_initialized() and _are_missing():
        _make()  # before the ranks differ in their calls; all of them begin the script here


def _export() -> None:
    """Set the environment variables that horovodrun sets, once in each world."""
    global _exported_in
    if _exported_in == extension.world_generation():
        return
    _exported_in = extension.world_generation()
    values = {
        "RANK": elasticstate.rank(),
        "SIZE": elasticstate.size(),
        "LOCAL_RANK": local_rank(),
        "LOCAL_SIZE": elasticstate.local_size(),
        "CROSS_RANK": elasticstate.cross_rank(),
        "CROSS_SIZE": elasticstate.cross_size(),
    }
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in values.items()})


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the collectives in a file for chrome://tracing, until ``stop_timeline``. All ranks call this.

    Rank 0 writes. If another worker becomes rank 0 in a later world, it continues the file. So the directory must exist
    on each host, best on a shared disk. A file of another job is replaced.

    ``mark_cycles``: mark the ends of ticks. Horovod's cycles do not exist here.

    Raises:
        NotInWorldError: before ``init()``.
        UsageError: the directory does not exist or cannot be written, or a timeline is started already. In a later
            world than that of its start, the same file continues.
    """
    need_init()
    path = Path(file_path).absolute()
    present, generation = timeline.present(), extension.world_generation()
    if present is not None and present.path == str(path) and present.started_in != generation:
        present.started_in = generation
        return
    if present is not None:
        raise ArgumentUsageError(
            f"start_timeline({str(file_path)!r}): a timeline is started already: {present.path}. Call "
            "hvd.stop_timeline() first."
        )
    if not path.parent.is_dir():
        raise ArgumentUsageError(
            f"start_timeline({str(file_path)!r}): there is no directory {path.parent}. Make it first."
        )
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentUsageError(f"start_timeline({str(file_path)!r}): cannot be written. Choose another file.")
    timeline.use(Recorder(str(path), mark_cycles))


def stop_timeline() -> None:
    """End the timeline, and write all of it. All ranks call this. Raises UsageError if none is started."""
    recorder = timeline.present()
    if recorder is None:
        raise ArgumentUsageError("stop_timeline(): no timeline is started. Call hvd.start_timeline(file) first.")
    timeline.use(None)
    recorder.close()
