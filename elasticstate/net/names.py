"""Names and addresses of this machine."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from elasticstate.core.ids import without_case

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


def is_of_each_machine(host: str) -> bool:
    """Return True for localhost, and for addresses of the loopback interface."""
    name = without_case(host).removesuffix(".")
    return name in _LOCAL_NAMES or is_loopback(name)


_full_names: list[str] = []  # the resolver's answer, once it has arrived


def is_this_machine(host: str) -> bool:
    """Return True if ``host`` is localhost, an address of this machine, or its own name.

    The name may be the short one, or the full one if it is known, in capitals or not (RFC 4343), and with the dot that
    ends a full name.
    """
    name, own = without_case(host).removesuffix("."), without_case(socket.gethostname())
    if is_of_each_machine(host):
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
