"""Connections to the ports of a process that have not authenticated, those of all its ports together.

Their number is limited. Beyond the limit the oldest connection of the user who has the most is dismissed, so that a
crowd of one user or of one machine neither locks others out nor takes the descriptors of the job.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Generic, Protocol, TypeVar

from elasticstate.net.names import LocalPeers

MAX_UNAUTHENTICATED = 2048  # limit of unauthenticated connections; each takes up to 70 kB
UNAUTHENTICATED_SHARE = 4  # they may use 1/4 of this process's descriptors: the job needs the rest
BACKLOG = 4096  # connections that the kernel queues until they are accepted
_NO_DESCRIPTOR_PAUSE_S = 0.05  # pause when no descriptor is left
_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

M = TypeVar("M")


class Crowd(Generic[M]):
    """Members by their user, in the order of their arrival."""

    def __init__(self) -> None:
        self._users: dict[M, str] = {}
        self._members: dict[str, dict[M, None]] = {}

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, member: object) -> bool:
        return member in self._users

    def add(self, member: M, user: str) -> None:
        self._users[member] = user
        self._members.setdefault(user, {})[member] = None

    def discard(self, member: M) -> None:
        user = self._users.pop(member, None)
        if user is not None:
            del self._members[user][member]
            if not self._members[user]:
                del self._members[user]

    def number_of(self, user: str) -> int:
        """Return the number of members of a user."""
        return len(self._members.get(user, ()))

    def first_to_go(self) -> M:
        """Return the oldest member of the user who has the most. There must be a member."""
        largest = max(self._members.values(), key=lambda members: len(members))
        return next(iter(largest))


class Stranger(Protocol):
    """A connection that has not authenticated."""

    def dismiss(self, reason: str, /) -> None:
        """Close the connection, and report the reason."""


class Strangers:
    """The connections to the ports of this process that have not authenticated."""

    def __init__(self, timeout_s: float, refused: Callable[[str, str], None]) -> None:
        """``timeout_s``: limit for the authentication. ``refused(peer, reason)`` reports a refused connection."""
        self.timeout_s = timeout_s
        self.refused = refused
        self._crowd: Crowd[Stranger] = Crowd()

    def __len__(self) -> int:
        return len(self._crowd)

    def add(self, stranger: Stranger, user: str) -> None:
        """Add a connection of this user, or of the machine at this address; dismiss another one if there are too many.

        Call ``remove`` when the connection has authenticated or has ended.
        """
        if len(self._crowd) >= _most():
            self.dismiss_one("too many unauthenticated connections")
        self._crowd.add(stranger, user)

    def remove(self, stranger: Stranger) -> None:
        self._crowd.discard(stranger)

    def dismiss_one(self, reason: str) -> None:
        """Dismiss the oldest connection of the user who has the most, if there is any."""
        if len(self._crowd):
            stranger = self._crowd.first_to_go()
            self._crowd.discard(stranger)
            stranger.dismiss(reason)

    async def accept(self, listener: socket.socket, serve: Callable[[socket.socket, str, LocalPeers], None]) -> None:
        """Accept connections for ever. ``serve(connection, address of the peer, local_peers)`` must not block."""
        loop = asyncio.get_running_loop()
        with closing(LocalPeers()) as local_peers:
            while True:
                try:
                    connection, address = await loop.sock_accept(listener)
                except OSError as error:
                    if error.errno in _FULL:
                        self.dismiss_one(f"the driver cannot hold more connections ({error.strerror})")
                        await asyncio.sleep(_NO_DESCRIPTOR_PAUSE_S)
                else:
                    serve(connection, f"{address[0]}:{address[1]}", local_peers)
                await asyncio.sleep(0)  # let refused connections close, and agents' messages in


def _most() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_UNAUTHENTICATED
    return max(1, min(MAX_UNAUTHENTICATED, limit // UNAUTHENTICATED_SHARE))
