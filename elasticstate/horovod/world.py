"""``init()``, ``rank()``, ``size()`` and similar functions: elasticstate's present world under Horovod's names."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref

import torch.distributed as dist

import elasticstate
from elasticstate import extension
from elasticstate.errors import CollectiveError, NotInWorldError, UsageError

logger = logging.getLogger("elasticstate.horovod")

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
    extension.check_launcher()
    if comm:
        raise UsageError(
            "init(comm=...): elasticstate.horovod has one world, of all workers of elasticrun. For a part of it, use "
            "torch.distributed.new_group(ranks)."
        )
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
        extension.leave()


def _leave_at_exit() -> None:
    # After an exception, skip the exit gate: the others must not wait for this worker, they must detect its death.
    if os.getpid() != _initialized_in or getattr(sys, "last_value", None) is not None:
        return
    try:
        shutdown()
    except CollectiveError as error:
        logger.warning("the world failed before all workers reached its end, so this slot is restarted: %s", error)
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
    extension.join(collectives=True)
    if not dist.is_initialized():
        raise NotInWorldError(
            "the world has ended. Call collectives before shutdown() or, in a script with elastic.run, inside the "
            "decorated function."
        )
    if (_lane is None or _lane[0] != elasticstate.generation()) and elasticstate.size() > 1:
        _open_lane()
    return elasticstate.generation()


def lane() -> dist.ProcessGroup | None:
    """Return the process group for gradients; None in a world of one.

    It is not the default group: if the parameters with gradients differ by rank, some ranks start a bucket in
    ``backward`` and others in ``step``. In the default group, a collective of the script could be matched with such a
    bucket.
    """
    return None if _lane is None or elasticstate.size() == 1 else _lane[1]()


def _open_lane() -> None:
    global _lane
    group = dist.new_group()
    _lane = elasticstate.generation(), weakref.ref(group)


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
    """Return this worker's slot on its host: its device index. Needs no world.

    Raises NotInWorldError before ``init()``.
    """
    _need_init()
    return elasticstate.local_rank()


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


def refusal_of_root(root_rank: int) -> str:
    """Return the reason why ``root_rank`` cannot be a root; "" if it can."""
    return "" if 0 <= root_rank < size() else f"root_rank must be a rank of the world, 0 to {size() - 1}"


def refuse_process_set(process_set: object) -> None:
    """Raise UsageError unless ``process_set`` is None."""
    if process_set is not None:
        raise UsageError(
            "elasticstate.horovod has no process sets. Create torch.distributed.new_group(ranks) inside the function "
            "decorated with elastic.run, and pass the group to torch's collectives."
        )


def _need_init() -> None:
    if not _initialized:
        raise NotInWorldError("elasticstate.horovod is not initialized. Call hvd.init() first.")


def _join() -> None:
    _need_init()
    extension.join()
