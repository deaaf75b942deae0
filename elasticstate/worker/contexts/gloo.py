"""The Gloo context: the process groups of one generation, and how to cut them.

``ProcessGroup.abort()`` and ``shutdown()`` of Gloo return at once and unblock nobody (measured with torch 2.13). What
does unblock a collective, a pending ``init_process_group`` or ``new_group``, and a store wait is the loss of the
sockets underneath:

* **pairs**: each Gloo device has its own epoll descriptor, and the ``tfd:`` lines of ``/proc/self/fdinfo/<epoll fd>``
  list exactly its listener and its pairs. A pair's descriptor is duplicated, its identity checked by inode, and the
  duplicate shut down, so that no foreign socket that has got the same number meanwhile is ever touched. Never the
  listener: shutting that down ends the process.
* **pending pairs**: a rank that waits to *accept* from a dead peer waits for five time-outs. A peer introduces itself
  on the listener with the 8-byte sequence number of the pair it connects to; so each of the numbers 0 … n-1 is sent to
  the own listener on a connection that is then closed. A private detail of Gloo's wire, pinned by a test.
* **store waits**: the sockets whose peer is the store's address.

Every group of a generation is noted at the one place where torch makes a group, those of user code's ``new_group`` and
of ``DeviceMesh`` too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from elasticstate.errors import CollectiveError

_TCP_ESTABLISHED = 1
_SMALLEST_POINTER = 1 << 20  # Gloo registers pointers with epoll; Python and libuv register descriptor numbers


@dataclass(frozen=True)
class _Watched:
    """One descriptor in an epoll set: its number when it was added, and the inode that tells whether it still is."""

    fd: int
    inode: int
    data: int


@dataclass(frozen=True)
class _Device:
    """One Gloo device: its epoll descriptor, known by the inode of its listener; its pairs (0 if lazy)."""

    epoll_fd: int
    listener_inode: int
    pairs: int


def _epoll_fds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


def _watched(epoll_fd: int) -> list[_Watched]:
    """What an epoll descriptor watches; empty when it is none (any more)."""
    result = []
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll_fd}") as info:
        for line in info:
            if line.startswith("tfd:"):
                words = line.replace(":", " ").split()
                fields = dict(zip(words[::2], words[1::2], strict=False))
                result.append(_Watched(int(fields["tfd"]), int(fields["ino"], 16), int(fields["data"], 16)))
    return result


@contextlib.contextmanager
def _duplicate(watched: _Watched) -> Iterator[socket.socket | None]:
    """A duplicate of the watched TCP socket; None if it is gone or is no socket."""
    try:
        copy = os.dup(watched.fd)
    except OSError:
        yield None
        return
    try:
        if os.fstat(copy).st_ino != watched.inode:
            raise OSError("another descriptor by now")
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        yield None
        return
    with sock:
        yield sock


def _is_listener(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM


def _established(sock: socket.socket) -> bool:
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_ESTABLISHED
    except OSError:
        return False


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class GlooContext:
    """All process groups of one generation. Made, used and left on the main thread; ``sever`` is for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._devices: list[_Device] = []
        self._epolls_before: set[int] | None = None  # while a group is being made
        self._pending_size = 0
        self._store_address: tuple[str, int] | None = None
        self._timeout = timedelta(minutes=30)
        self._excepthook = sys.excepthook
        self._torch_helper: Any = None
        self._severed = False

    # ------------------------------------------------------------------------------------------------ main thread

    def watch_store(self, address: tuple[str, int]) -> None:
        """From now on ``sever`` also cuts this process's connections to the store at ``address``."""
        self._store_address = address

    def create(
        self, store: Store, rank: int, size: int, *, init_timeout: timedelta, collective_timeout: timedelta
    ) -> None:
        """Make the default process group of the generation.

        ``init_timeout`` bounds the rendezvous; ``collective_timeout`` is every group's afterwards, those of user code
        included. Raises what torch raises when a peer is missing or the generation is severed meanwhile.
        """
        self._timeout = collective_timeout
        self._excepthook = sys.excepthook
        self._torch_helper = distributed_c10d._new_process_group_helper
        distributed_c10d._new_process_group_helper = self._noted_helper
        try:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=init_timeout)
        finally:
            sys.excepthook = self._excepthook  # each init_process_group wraps it once more
        distributed_c10d._set_pg_timeout(collective_timeout, dist.group.WORLD)

    def destroy(self) -> None:
        """Take the groups down. Nothing of the generation is left afterwards: no thread, no descriptor."""
        if self._torch_helper is not None:
            distributed_c10d._new_process_group_helper = self._torch_helper
            self._torch_helper = None
        if dist.is_initialized():
            dist.destroy_process_group()
        # A group that failed to be made has been counted all the same, and the count is part of the next one's name.
        distributed_c10d._world.group_count = 0
        with self._lock:
            self._devices.clear()
            self._store_address = None

    def _noted_helper(self, group_size: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("timeout") == distributed_c10d.default_pg_timeout:
            kwargs["timeout"] = self._timeout
        with self._lock:
            if self._severed:
                raise CollectiveError("the generation has ended")
            before = self._epolls_before = _epoll_fds()
            self._pending_size = group_size
        try:
            return self._torch_helper(group_size, *args, **kwargs)
        finally:
            with self._lock:
                self._devices += self._new_devices(before)
                self._epolls_before = None

    # ------------------------------------------------------------------------------------------------- any thread

    def sever(self) -> None:
        """Cut everything: whoever is inside a collective, an init or a store wait, or enters one, gets an error.

        Level, not edge: call it again and again until the generation has been left, sockets may appear meanwhile.
        """
        with self._lock:
            self._severed = True
            for device in self._devices:
                watched = _watched(device.epoll_fd)
                if any(w.inode == device.listener_inode for w in watched):
                    _cut_pairs(watched)
            if self._epolls_before is not None:
                for device in self._new_devices(self._epolls_before):
                    watched = _watched(device.epoll_fd)
                    _cut_pairs(watched)
                    _reject_pending(watched, self._pending_size)
            if self._store_address is not None:
                _cut_connections_to(self._store_address)

    def broken(self) -> bool:
        """The fact behind a failure: a pair of one of the groups has lost its connection, or all were cut here."""
        with self._lock:
            return self._severed or any(self._lost_pair(device) for device in self._devices)

    def _lost_pair(self, device: _Device) -> bool:
        watched = _watched(device.epoll_fd)
        if not any(w.inode == device.listener_inode for w in watched):
            return False  # the group was destroyed by user code
        return _count_pairs(watched) < device.pairs

    def _new_devices(self, before: set[int]) -> list[_Device]:
        """Gloo devices that have appeared since; other epoll descriptors of this process do not look like one."""
        result = []
        for epoll_fd in _epoll_fds() - before:
            watched = _watched(epoll_fd)
            if not watched or any(w.data < _SMALLEST_POINTER for w in watched):
                continue
            listener = _listener(watched)
            if listener is not None:
                result.append(_Device(epoll_fd, listener.inode, self._pending_size - 1 if _count_pairs(watched) else 0))
        return result


def _listener(watched: list[_Watched]) -> _Watched | None:
    for candidate in watched:
        with _duplicate(candidate) as sock:
            if sock is not None and _is_tcp(sock) and _is_listener(sock):
                return candidate
    return None


def _count_pairs(watched: list[_Watched]) -> int:
    count = 0
    for candidate in watched:
        with _duplicate(candidate) as sock:
            if sock is not None and _is_tcp(sock) and not _is_listener(sock) and _established(sock):
                count += 1
    return count


def _cut_pairs(watched: list[_Watched]) -> None:
    for candidate in watched:
        with _duplicate(candidate) as sock:
            if sock is not None and _is_tcp(sock) and not _is_listener(sock):
                _shut_down(sock)


def _reject_pending(watched: list[_Watched], size: int) -> None:
    """Introduce ourselves to the own listener as every peer that has not come yet, and hang up."""
    listener = _listener(watched)
    if listener is None:
        return
    with _duplicate(listener) as sock:
        if sock is None:
            return
        address = sock.getsockname()
        family = sock.family
    for sequence in range(size):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as caller:
            caller.settimeout(0.2)
            caller.connect(address)
            caller.sendall(struct.pack("<q", sequence))


def _cut_connections_to(address: tuple[str, int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if not link.startswith("socket:["):
                continue
            with _duplicate(_Watched(int(name), int(link[8:-1]), 0)) as sock:
                if sock is not None and _is_tcp(sock) and _peer(sock) == address:
                    _shut_down(sock)


def _peer(sock: socket.socket) -> tuple[str, int] | None:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return None
    return host.removeprefix("::ffff:"), port
