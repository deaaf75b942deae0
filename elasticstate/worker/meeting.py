"""The store in which the processes of another launcher's world meet, without a driver."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from elasticstate.compat.stores import PrefixStore, Store, TCPStore, rendezvous
from elasticstate.errors import UsageError
from elasticstate.net.store_listener import StoreListener
from elasticstate.options import LaunchedPlace, usable_runtime_directory
from elasticstate.private import open_directory, read_file, write_file

TIMEOUT = timedelta(seconds=300)
_SLICE = timedelta(seconds=1)
_LOOK_INTERVAL_S = 0.01
_FILE = "store"
_SET_MASTER = "Set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port there, for all processes"


class Meeting(NamedTuple):
    """The store of a world, and its address."""

    store: Store
    host: str
    port: int


@contextmanager
def meet(place: LaunchedPlace) -> Iterator[Meeting]:
    """Give the store of this world. All processes must have joined at the end of the context.

    Raises UsageError or OptionError if the processes cannot meet, and torch's error if one of them does not come.
    """
    if place.master is not None:
        store, _, _ = next(iter(rendezvous("env://", place.rank, place.size, timeout=TIMEOUT)))
        yield Meeting(store, *place.master)
    elif place.is_on_one_host:
        with _on_one_host(place) as store:
            yield Meeting(store, store.host, store.port)
    elif place.slurm_address is not None:
        yield Meeting(_at(place, *place.slurm_address), *place.slurm_address)
    else:
        store = _by_mpi(place)
        yield Meeting(store, store.host, store.port)


@contextmanager
def _on_one_host(place: LaunchedPlace) -> Iterator[TCPStore]:
    """Give a store at the loopback interface. A file in a private directory names its port."""
    path = usable_runtime_directory() / f"elasticstate-{os.getuid()}-world-{place.key}"
    if place.rank != 0:
        yield _find_store(str(path))
        return
    with suppress(FileExistsError):
        path.mkdir(0o700)
    directory = open_directory(path)
    listener = StoreListener("127.0.0.1")
    store = TCPStore(
        "127.0.0.1",
        listener.port,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=os.dup(listener.fileno()),
    )
    listener.close()
    token = secrets.token_hex(16)
    store.set(token, "")
    try:
        write_file(directory, _FILE, f"{store.port} {token}".encode())
        yield store
    finally:
        with suppress(OSError):
            os.unlink(_FILE, dir_fd=directory)
            path.rmdir()
        os.close(directory)


def _find_store(path: str) -> TCPStore:
    """Return the store that rank 0 has written into the directory ``path``. Raises UsageError if rank 0 does not."""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, dist.DistError):  # a file of a dead process names no living store
            directory = open_directory(path)
            try:
                port, token = read_file(directory, _FILE).decode().split()
            finally:
                os.close(directory)
            store = TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False, timeout=_SLICE)
            if store.check([token]):
                store.set_timeout(TIMEOUT)
                return store
        time.sleep(_LOOK_INTERVAL_S)
    raise UsageError(f"Rank 0 has written no port to {path} within {TIMEOUT.total_seconds():g} s. {_SET_MASTER}.")


def _at(place: LaunchedPlace, host: str, port: int) -> Store:
    """Return a store on the host of rank 0. Raises UsageError if the processes cannot connect there."""
    try:
        store = TCPStore(host, port, is_master=place.rank == 0, wait_for_workers=False, timeout=TIMEOUT)
    except dist.DistNetworkError as error:
        raise UsageError(f"The processes cannot meet at {host}:{port}: {error}. {_SET_MASTER}.") from error
    return PrefixStore(place.key, store)


def _by_mpi(place: LaunchedPlace) -> TCPStore:
    """Return a store whose address rank 0 has sent with MPI. Raises UsageError if the processes have no common MPI."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise UsageError(
            f"{place.launcher} has started this world on several hosts, and does not pass on the address of rank 0. "
            f"{_SET_MASTER}: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ... Or install mpi4py."
        ) from None
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (place.rank, place.size):
        raise UsageError(
            f"{place.launcher} has started {place.size} processes, but the world of mpi4py has {world.Get_size()}: "
            f"it uses another MPI. {_SET_MASTER}."
        )
    atexit.register(_abort_after_exception, world)
    if place.rank == 0:
        store = TCPStore(place.host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    host, port = world.bcast((place.host, store.port) if place.rank == 0 else None)
    return store if place.rank == 0 else TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def _abort_after_exception(world: Any) -> None:
    """End all processes: the end of MPI would wait for the others, which wait for this one in a collective."""
    if getattr(sys, "last_value", None) is not None:
        world.Abort(1)
