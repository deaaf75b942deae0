"""``init()``, ``rank()``, ``size()`` and their like: the present world of elasticstate under Horovod's names."""

from __future__ import annotations

import atexit
import os
import sys
import weakref

import torch.distributed as dist

from elasticstate.errors import CollectiveError, NotInWorldError, UsageError
from elasticstate.worker import run, world

_initialized = False
_initialized_in: int | None = None  # the process: a child that was forked leaves nothing
_lane: tuple[int, weakref.ref[dist.ProcessGroup]] | None = None  # and its generation; torch keeps it, and ends it


def init(comm: object = None, process_sets: object = None) -> None:
    """Allow the functions of this package. The world is joined later, by the first of them that needs one.

    So a newcomer can load its data before the others wait for it. The arguments are there for old scripts.

    Raises UsageError for a part of the world: ``comm`` or ``process_sets``.
    """
    global _initialized, _initialized_in
    if comm:
        raise UsageError("init(comm=...): the world is what elasticrun started; for a part of it, new_group()")
    if process_sets:
        refuse_process_set(process_sets)
    _initialized = True
    if _initialized_in is None:
        atexit.register(_leave_at_exit)
    _initialized_in = os.getpid()


def shutdown() -> None:
    """Leave the world together with all others, if this process has joined one and does not use ``elastic.run``."""
    global _initialized
    if _initialized:
        _initialized = False
        run.leave()


def _leave_at_exit() -> None:
    # By an exception: the others must not wait for this one at their end, they must hear that it is gone.
    if os.getpid() != _initialized_in or getattr(sys, "last_value", None) is not None:
        return
    try:
        shutdown()
    except CollectiveError as error:  # another process is started in the place of this one
        sys.stderr.write(f"elasticstate: the world failed before all were through: {error}\n")
    except SystemExit:
        pass  # told to leave, which it does


def is_initialized() -> bool:
    """Whether ``init()`` has been called, and ``shutdown()`` not since."""
    return _initialized


def ready() -> int:
    """Be in a world that has a process group, and return its generation.

    Raises NotInWorldError before ``init()``, and after the end of the world; UsageError in a newcomer that is not in
    ``elastic.run`` yet, as the others are.
    """
    _need_init()
    run.join(collectives=True)
    if not dist.is_initialized():
        raise NotInWorldError(
            "the world is over: collectives work until shutdown() or, in a script with elastic.run, inside the "
            "decorated function"
        )
    if (_lane is None or _lane[0] != world.generation()) and world.size() > 1:
        _open_lane()
    return world.generation()


def lane() -> dist.ProcessGroup | None:
    """The process group that gradients travel by; None in a world of one.

    Not the default one: where ranks differ in which parameters get gradients, some start a bucket in ``backward`` and
    others in ``step``, and a collective of the script in between would meet it.
    """
    return None if _lane is None or world.size() == 1 else _lane[1]()


def _open_lane() -> None:
    global _lane
    group = dist.new_group()
    _lane = world.generation(), weakref.ref(group)


def rank() -> int:
    """This worker's rank in the world, 0 to size() - 1. Joins the world. Raises NotInWorldError before ``init()``."""
    _join()
    return world.rank()


def size() -> int:
    """Number of workers in the world. Joins the world. Raises NotInWorldError before ``init()``."""
    _join()
    return world.size()


def local_rank() -> int:
    """This worker's slot on its host: the index of its device. Answers at once. Raises NotInWorldError before init."""
    _need_init()
    return world.local_rank()


def local_size() -> int:
    """Number of workers of the world on this host. Joins the world. Raises NotInWorldError before ``init()``."""
    _join()
    return world.local_size()


def cross_rank() -> int:
    """Index of this host among those of the world. Joins the world. Raises NotInWorldError before ``init()``."""
    _join()
    return world.cross_rank()


def cross_size() -> int:
    """Number of hosts in the world. Joins the world. Raises NotInWorldError before ``init()``."""
    _join()
    return world.cross_size()


def is_homogeneous() -> bool:
    """Whether this host has as many workers as hosts have on average: true on all ranks if all have equally many."""
    return local_size() * cross_size() == size()


def refuse_process_set(process_set: object) -> None:
    """Raise UsageError unless it is None."""
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
