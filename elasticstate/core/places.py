"""Places of workers: in a world, and in a world of plain commands."""

from __future__ import annotations

from msgspec import Struct

from elasticstate.core.ids import WorkerId


class Placement(Struct, frozen=True, gc=False):
    """Position of one worker in a world, in the terms of Horovod and torchrun; see docs/how-it-works.md."""

    worker: WorkerId
    rank: int
    local_rank: int  # the slot: the device index, sticky for the life of the worker
    local_size: int
    local_leader: bool  # exactly one worker per host and world
    cross_rank: int  # index of the host
    cross_size: int  # number of hosts


class PlainPlace(Struct, frozen=True, array_like=True, gc=False):
    """Position of a worker that does not use ``run``, for torchrun's environment variables. Valid until its end."""

    generation: int  # the number of this world
    rank: int
    size: int
    local_rank: int  # position among the workers of its host, without gaps
    local_size: int
    group_rank: int  # index of its host
    group_size: int  # number of hosts
    restarts: int  # failed worlds before this one
    max_restarts: int | None  # None: no limit
    store_host: str  # the host whose agent provides the store
    store: str = ""  # its "address:port", filled in by the driver
