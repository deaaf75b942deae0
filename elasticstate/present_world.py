"""Place of this worker in the world: ``rank()``, ``size()`` and similar functions, and their environment variables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticstate.core.ids import WorkerId
from elasticstate.core.types import Placement, World, as_runs
from elasticstate.errors import NotInWorldError
from elasticstate.options import launched_local_rank, worker_environment

if TYPE_CHECKING:
    import torch


_present: World | None = None


def enter(view: World) -> None:
    """Make ``view`` the present world: for the functions below, and in the environment variables."""
    global _present
    _present = view
    place, (host, port) = view.placement, view.store_address
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(view.size),
        LOCAL_RANK=str(libraries_local_rank()),
        LOCAL_WORLD_SIZE=str(place.local_size),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )


def alone() -> World:
    """Return the world of one, for a script that was not started by ``elasticrun``."""
    me = WorkerId("localhost", 0, 1)
    return fixed(Placement(me, 0, 0, 1, 0, 0, 1), 1, "127.0.0.1:0")


def fixed(placement: Placement, size: int, store: str) -> World:
    """Return a world that never changes: another launcher has started it, or none. All members are new processes."""
    return World(1, (placement,), size, 0, as_runs(range(1, size)), store, fresh=True)


def world() -> World:
    """Return the present world; between worlds, the last one. Raises NotInWorldError before the first."""
    if _present is None:
        raise NotInWorldError(
            "there is no world yet. Call rank(), size() and similar functions inside a function decorated with "
            "@elasticstate.run. local_rank() and device() need no world."
        )
    return _present


def rank() -> int:
    """Return this worker's rank in the world, 0 to size() - 1. Raises NotInWorldError outside a world."""
    return world().placement.rank


def size() -> int:
    """Return the number of workers in the world. Raises NotInWorldError outside a world."""
    return world().size


def local_rank() -> int:
    """Return this worker's slot on its host: the device index, constant for the life of the worker. Needs no world."""
    if _present is not None:
        return _present.placement.local_rank
    started = worker_environment()
    return launched_local_rank() if started is None else started.worker.slot


def local_size() -> int:
    """Return the number of workers of the world on this host. Raises NotInWorldError outside a world."""
    return world().placement.local_size


def local_leader() -> bool:
    """Return True for the one worker of each host that does once-per-host work.

    Raises NotInWorldError outside a world.
    """
    return world().placement.local_leader


def libraries_local_rank() -> int:
    """Return the local rank for libraries, and for ``LOCAL_RANK``. Needs no world.

    It is the place, so that each host has a local rank 0. Where torch sees several CUDA devices it is the slot: scripts
    and libraries choose the device by it, and a survivor must keep the device on which its state is.
    """
    import torch

    return local_rank() if _present is None or torch.cuda.device_count() > 1 else _present.placement.local_place


def cross_rank() -> int:
    """Return the index of this host among the hosts of the world. Raises NotInWorldError outside a world."""
    return world().placement.cross_rank


def cross_size() -> int:
    """Return the number of hosts in the world. Raises NotInWorldError outside a world."""
    return world().placement.cross_size


def generation() -> int:
    """Return the number of the world. Each new world adds 1. Raises NotInWorldError outside a world."""
    return world().generation


def device() -> torch.device:
    """Return the device of this worker's slot: ``cuda:<local_rank()>`` with CUDA, otherwise ``cpu``. Needs no world."""
    import torch

    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")
