"""The user at the other end of a TCP connection on this machine, as reported by the kernel (sock_diag(7)).

A query for one pair of addresses takes 3 µs, however many sockets exist. /proc/net/tcp would have to be read
completely.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_REQUEST = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_PORTS = struct.Struct("!HH")
_SOCKET = struct.Struct("=III")  # interface, and the cookie: any
_ANSWER = struct.Struct("=4x48x12xII")  # struct inet_diag_msg: ..., user, inode
_ANY = 0xFFFFFFFF
_LONGEST_ANSWER_BYTES = 4096


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address without the interface; an IPv4 one if IPv6 only carries it."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _is_local(peer: tuple[str, int], own: tuple[str, int]) -> bool:
    return _address(peer[0]).is_loopback or peer[0] == own[0]


class LocalPeers:
    """Refuses connections of other users of this machine. If the kernel does not answer, all are accepted here."""

    def __init__(self) -> None:
        self._number = 0
        self._kernel: socket.socket | None = None
        try:
            self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
            self._kernel.setblocking(False)
        except OSError:  # the kernel lacks it, or a sandbox forbids it
            self.close()

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def refuse(self, connection: socket.socket) -> str:
        """Return why an accepted connection is refused, or "".

        A connection is refused if its other end is known to belong to another user. Root is accepted: root can do
        everything anyway.
        """
        try:
            peer, own = connection.getpeername()[:2], connection.getsockname()[:2]
        except OSError:
            return ""  # the connection has ended, which is reported elsewhere
        if not _is_local(peer, own):
            return ""
        user, is_open = self._ask(connection.family, peer, own)
        if not is_open:
            return "the peer has closed the connection"
        if user in (None, 0, os.geteuid()):
            return ""
        return f"the peer belongs to another user of this machine (user {user})"

    def user_of(self, connection: socket.socket) -> str:
        """Return who is at the other end of an accepted connection: a user of this machine, or another machine.

        A machine has a whole network of IPv6 addresses (RFC 4291, section 2.5.4), so these count as one.
        """
        try:
            peer, own = connection.getpeername()[:2], connection.getsockname()[:2]
        except OSError:
            return ""
        if _is_local(peer, own):
            user, is_open = self._ask(connection.family, peer, own)
            return f"user {user}" if is_open and user is not None else "this machine"
        address = _address(peer[0])
        return str(address if address.version == 4 else ipaddress.ip_network((address, 64), strict=False))

    def _ask(
        self, family: socket.AddressFamily, peer: tuple[str, int], own: tuple[str, int]
    ) -> tuple[int | None, bool]:
        """Return the user of the socket connected from ``peer`` to ``own``, and True if a process still has it open.

        The user is None if it is unknown. The kernel finishes a closed connection with user id 0, which looks like
        root's.
        """
        if self._kernel is None:
            return None, True
        self._number = (self._number + 1) & _ANY
        addresses = b"".join(
            socket.inet_pton(family, address.partition("%")[0]).ljust(16, b"\0") for address in (peer[0], own[0])
        )
        socket_id = _PORTS.pack(peer[1], own[1]) + addresses + _SOCKET.pack(0, _ANY, _ANY)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ANY) + socket_id
        header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, self._number, 0)
        try:
            self._kernel.sendto(header + request, (0, 0))
            number = None
            while number != self._number:  # no wait: the kernel has answered within sendto()
                answer = self._kernel.recv(_LONGEST_ANSWER_BYTES)
                _, kind, _, number, _ = _HEADER.unpack_from(answer)
            if kind != _SOCK_DIAG_BY_FAMILY:
                return None, True  # no such socket: an address was translated on the way
            user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
        except (OSError, struct.error):
            return None, True
        return user, inode != 0
