"""``init()``, ``rank()``, ``size()`` and similar functions: elasticstate's present world under Horovod's names."""

from __future__ import annotations

import atexit
import logging
import os
import sys

import torch.distributed as dist

import elasticstate
from elasticstate import extension
from elasticstate.errors import CollectiveError
from elasticstate.horovod import groups
from elasticstate.horovod.failures import ArgumentUsageError, NotInitializedError, failures_named

logger = logging.getLogger("elasticstate.horovod")

_initialized = False
_exported_in = 0  # generation of the world whose HOROVOD_RANK and other variables are set
_initialized_in: int | None = None  # the process: a forked child must not leave the world


def init(comm: object = None) -> None:
    """See ``process_sets.init``."""
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


def shutdown() -> None:
    """In a script without ``elastic.run``: wait for all other members of the world, if this process has joined one.

    After that, a failure restarts no worker. The world exists until the process ends, for a second ``init()``.

    Raises CollectiveError if the world fails before all members arrive.
    """
    global _initialized
    if _initialized:
        _initialized = False
        groups.begin_anew()
        for call in groups.open_calls():
            logger.warning("%s has had no effect: other ranks have not made this call", call)
        extension.leave()


def _leave_at_exit() -> None:
    # After an exception, skip the exit gate: the others must not wait for this worker, they must detect its death.
    if os.getpid() != _initialized_in or getattr(sys, "last_value", None) is not None:
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
    if groups.are_missing():
        with failures_named():
            groups.make()


def is_in_use() -> bool:
    """Return True if this worker is in a world in which the process groups are made."""
    return _initialized and dist.is_initialized() and groups.are_made()


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
    if groups.has_sets() and extension.world_is_new() and dist.is_initialized() and groups.are_missing():
        groups.make()  # before the ranks differ in their calls; all of them begin the script here


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
