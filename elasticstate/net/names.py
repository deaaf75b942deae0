"""Names and addresses of this machine."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from elasticstate.core.ids import without_case

# ---------------------------------------------------------------------------------------------------------------- names


LOCALHOST = "127.0.0.1"
_SIOCGIFCONF = 0x8912  # netdevice(7)
_IFREQ = struct.Struct("16sH2x4s16x")  # name, family, address
_MOST_ADDRESSES = 1024
_ELSEWHERE = "198.51.100.1"  # RFC 5737: of no machine


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is an address like 127.0.0.2, or ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_LOCAL_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})  # hosts(5)
_full_names: list[str] = []  # the resolver's answer, once it has arrived


def is_this_machine(host: str) -> bool:
    """Return True if ``host`` is localhost, an address of this machine, or its own name.

    The name may be the short one, or the full one if it is known, in capitals or not (RFC 4343), and with the dot that
    ends a full name.
    """
    name, own = without_case(host).removesuffix("."), without_case(socket.gethostname())
    if name in _LOCAL_NAMES or is_loopback(name):
        return True
    if name and name in (own, own.partition(".")[0], *map(without_case, _full_names)):
        return True
    return _is_address(name) and str(ipaddress.ip_address(name)) in interface_addresses()


def is_own_host(header: str) -> bool:
    """Return True if the header Host of a request has an address, or a name of this machine.

    A stranger's name that resolves to this machine makes a browser regard a page of this machine as a part of the
    stranger's site (DNS rebinding).
    """
    match = re.fullmatch(r"(?:\[(?P<six>[0-9a-fA-F:.]+)]|(?P<name>[^:\[\]]+))(?::\d{1,5})?", header)
    if match is None:
        return False
    name = match["six"] or match["name"]
    return _is_address(name) or is_this_machine(name)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def learn_full_name(hosts: Iterable[str]) -> None:
    """Ask the resolver for this machine's full name, if one of ``hosts`` may be it; at most once.

    A resolver that does not answer blocks for tens of seconds: never call this on an event loop.
    """
    if not _full_names and not all(map(is_this_machine, hosts)):
        _full_names.append(socket.getfqdn())


def address_of(host: str) -> str:
    """Return the address at which the other hosts of a job reach this host. All of them are names of this machine."""
    return host if is_loopback(host) and ":" not in host else LOCALHOST


def own_addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this machine's interfaces at which other machines may reach it."""
    return tuple(a for a in interface_addresses() if ":" not in a and not is_loopback(a))


def address_towards(hosts: Iterable[str]) -> str:
    """Return this machine's IPv4 address on its route to the first of ``hosts`` that is known and is another machine.

    Without one, return that on the default route, or else any; "" if it has none. The resolver may block: never call
    this on an event loop.
    """
    for host in hosts:
        if not is_this_machine(host) and (address := _source_address(host)) and not is_loopback(address):
            return address
    return outward_address()


def outward_address() -> str:
    """Return this machine's IPv4 address on its default route, or else any except loopback addresses; "" for none."""
    return _source_address(_ELSEWHERE) or next(iter(own_addresses()), "")


def _source_address(host: str) -> str:
    """Return the address from which this machine would send to ``host``; "" if it cannot. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        try:
            towards.connect((host, 9))
        except OSError:
            return ""
        address: str = towards.getsockname()[0]
        return address


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address. Any loopback address gives the loopback interface."""
    if is_loopback(address) and ":" not in address:
        address = LOCALHOST
    return interface_addresses().get(address.partition("%")[0])


def selecting_interface(address: str) -> str | None:
    """Return the name of the interface by which a library chooses ``address``: libraries take an interface's first one.

    None if there is no such interface.
    """
    name = interface_of(address)
    if name is None or is_loopback(address):
        return name
    first = next(known for known, of in interface_addresses().items() if of == name)
    return name if first == address.partition("%")[0] else None


def interface_names() -> tuple[str, ...]:
    """Return the names of this machine's interfaces, also of those without an address."""
    return tuple(name for _, name in socket.if_nameindex())


def interface_addresses() -> dict[str, str]:
    """Return the names of the interfaces by their addresses, in the order of the kernel: IPv4 first."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        room = array.array("B", bytes(_MOST_ADDRESSES * _IFREQ.size))
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        used = struct.unpack("iP", fcntl.ioctl(asking, _SIOCGIFCONF, request))[0]
        for name, _, address in _IFREQ.iter_unpack(room[:used].tobytes()):
            found.setdefault(socket.inet_ntoa(address), name.rstrip(b"\0").decode().partition(":")[0])
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # this kernel has no IPv6
        return found
    for digits, *_, name in map(str.split, lines):
        found.setdefault(str(ipaddress.IPv6Address(bytes.fromhex(digits))), name)
    return found


def listen_error(address: str, port: int = 0) -> str:
    """Return why this process cannot listen at this address, or "". Port 0: any port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, port), family=family):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def free_port() -> int:
    """Return a port at which another process of this machine may listen, on all its IPv4 addresses."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# ---------------------------------------------------------------------------------------------------------- local peers
# The user at the other end of a TCP connection on this machine, as reported by the kernel (sock_diag(7)).
#
# A query for one pair of addresses takes 3 µs, however many sockets exist. /proc/net/tcp would have to be read
# completely.


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
