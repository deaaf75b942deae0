"""``init()``, ``rank()``, ``size()`` and similar functions: elasticstate's present world under Horovod's names."""

from __future__ import annotations

import atexit
import os
import sys
import weakref

import torch.distributed as dist

from elasticstate import present_world
from elasticstate.config import refusal_of_other_launchers
from elasticstate.errors import CollectiveError, NotInWorldError, UsageError
from elasticstate.worker import run

_initialized = False
_initialized_in: int | None = None  # the process: a forked child must not leave the world
_lane: tuple[int, weakref.ref[dist.ProcessGroup]] | None = None  # with its generation; torch owns the group and ends it


def init(comm: object = None, process_sets: object = None) -> None:
    """Enable the functions of this package. The first function that needs a world joins it later.

    So a new worker can load its data before the others wait for it. The arguments exist for old scripts only.

    Raises UsageError for a part of the world (``comm`` or ``process_sets``), and in a process that mpirun or another
    launcher than elasticrun has started.
    """
    global _initialized, _initialized_in
    if refusal := refusal_of_other_launchers():
        raise UsageError(refusal)
    if comm:
        raise UsageError("init(comm=...): the world is what elasticrun started; for a part of it, new_group()")
    if process_sets:
        refuse_process_set(process_sets)
    _initialized = True
    if _initialized_in is None:
        atexit.register(_leave_at_exit)
    _initialized_in = os.getpid()


def shutdown() -> None:
    """Leave the world together with all others, if this process has joined one and does not use ``elastic.run``.

    Raises CollectiveError if the world fails before all members arrive.
    """
    global _initialized
    if _initialized:
        _initialized = False
        run.leave()


def _leave_at_exit() -> None:
    # After an exception, skip the exit gate: the others must not wait for this worker, they must detect its death.
    if os.getpid() != _initialized_in or getattr(sys, "last_value", None) is not None:
        return
    try:
        shutdown()
    except CollectiveError as error:  # the agent starts another process in this slot
        sys.stderr.write(f"elasticstate: the world failed before all were through: {error}\n")
    except SystemExit:
        pass  # the driver has sent LEAVE


def is_initialized() -> bool:
    """Return True after ``init()`` until ``shutdown()``."""
    return _initialized


def ready() -> int:
    """Join a world with a process group, and return its generation.

    Raises NotInWorldError before ``init()``, and after the end of the world. Raises UsageError in a new worker outside
    ``elastic.run`` while the others are inside.
    """
    _need_init()
    run.join(collectives=True)
    if not dist.is_initialized():
        raise NotInWorldError(
            "the world is over: collectives work until shutdown() or, in a script with elastic.run, inside the "
            "decorated function"
        )
    if (_lane is None or _lane[0] != present_world.generation()) and present_world.size() > 1:
        _open_lane()
    return present_world.generation()


def lane() -> dist.ProcessGroup | None:
    """Return the process group for gradients; None in a world of one.

    It is not the default group: if the parameters with gradients differ by rank, some ranks start a bucket in
    ``backward`` and others in ``step``. In the default group, a collective of the script could be matched with such a
    bucket.
    """
    return None if _lane is None or present_world.size() == 1 else _lane[1]()


def _open_lane() -> None:
    global _lane
    group = dist.new_group()
    _lane = present_world.generation(), weakref.ref(group)


def rank() -> int:
    """Return this worker's rank in the world, 0 to size() - 1. Joins the world.

    Raises NotInWorldError before ``init()``.
    """
    _join()
    return present_world.rank()


def size() -> int:
    """Return the number of workers in the world. Joins the world. Raises NotInWorldError before ``init()``."""
    _join()
    return present_world.size()


def local_rank() -> int:
    """Return this worker's slot on its host: its device index. Needs no world.

    Raises NotInWorldError before ``init()``.
    """
    _need_init()
    return present_world.local_rank()


def local_size() -> int:
    """Return the number of workers of the world on this host. Joins the world.

    Raises NotInWorldError before ``init()``.
    """
    _join()
    return present_world.local_size()


def cross_rank() -> int:
    """Return the index of this host among the hosts of the world. Joins the world.

    Raises NotInWorldError before ``init()``.
    """
    _join()
    return present_world.cross_rank()


def cross_size() -> int:
    """Return the number of hosts in the world. Joins the world. Raises NotInWorldError before ``init()``."""
    _join()
    return present_world.cross_size()


def is_homogeneous() -> bool:
    """Return True if this host has exactly the average number of workers of the world's hosts.

    If all hosts have equally many workers, all ranks get True. Joins the world. Raises NotInWorldError before
    ``init()``.
    """
    return local_size() * cross_size() == size()


def refusal_of_root(root_rank: int) -> str:
    """Return the reason why ``root_rank`` cannot be a root; "" if it can."""
    return "" if 0 <= root_rank < size() else f"root_rank must be a rank of the world, 0 to {size() - 1}"


def refuse_process_set(process_set: object) -> None:
    """Raise UsageError unless ``process_set`` is None."""
    if process_set is not None:
        raise UsageError(
            "process sets: make torch.distributed.new_group(ranks) inside the function decorated with elastic.run, and "
            "use torch's collectives with group=... on it"
        )


def _need_init() -> None:
    if not _initialized:
        raise NotInWorldError("not initialised: call init() of elasticstate.horovod first")


def _join() -> None:
    _need_init()
    run.join()
