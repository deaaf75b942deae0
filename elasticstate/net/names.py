"""Names and addresses of this machine, and sockets that listen at them.

IPv4 comes first wherever a host has both: Gloo does not connect an address of one family to one of the other.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from elasticstate.core.ids import without_case
from elasticstate.errors import OptionError

LOCALHOST = "127.0.0.1"
_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913  # netdevice(7)
_IFREQ = struct.Struct("16sH2x4s16x")  # name, family, address
_FLAGS = struct.Struct("16sH22x")  # name, flags
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_NOT_USABLE = 0x40 | 0x08  # if_addr.h: IFA_F_TENTATIVE, IFA_F_DADFAILED
_MOST_ADDRESSES = 1024
_ELSEWHERE = ("198.51.100.1", "2001:db8::1")  # RFC 5737, RFC 3849: of no machine
_IPV4_IN_IPV6 = "::ffff:"


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
    """Return True if the header Host of a request has an address, or a name of this machine. Any other name may be a
    stranger's (DNS rebinding)."""
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


def own_addresses(interfaces: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the addresses of this machine at which other machines may reach it: IPv4 first, then IPv6.

    Within a family, those of interfaces that have a link come first. ``interfaces``: only those of the first one of
    these that can be used; of all interfaces if this machine has none of them.
    """
    found = _reachable_addresses()
    chosen = next((name for name in _by_link(interfaces) if name in found.values()), None)
    links = {name: has_link(name) for name in set(found.values())}
    usable = (address for address, name in found.items() if chosen in (None, name))
    return tuple(sorted(usable, key=lambda address: (":" in address, not links[found[address]])))


def _reachable_addresses() -> dict[str, str]:
    """Return the interfaces by the addresses that other machines may reach."""
    return {
        address: name
        for address, name in interface_addresses(_NOT_USABLE).items()
        if not is_loopback(address) and not _is_link_local(address)
    }


def _is_link_local(address: str) -> bool:
    """Return True for an IPv6 address that means nothing without the interface of the one who connects to it."""
    return ":" in address and ipaddress.ip_address(address).is_link_local


def _by_link(names: Sequence[str]) -> list[str]:
    return sorted(names, key=has_link, reverse=True)


def has_link(interface: str) -> bool:
    """Return True if this interface is up and has a carrier."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            request = _FLAGS.pack(interface.encode()[:15], 0)
            flags: int = _FLAGS.unpack(fcntl.ioctl(asking, _SIOCGIFFLAGS, request))[1]
        except OSError:  # there is no such interface
            return False
    return flags & _IFF_UP != 0 and flags & _IFF_RUNNING != 0


def address_on(interfaces: Sequence[str], near: str) -> tuple[str, str]:
    """Return the first of these interfaces that can be used on this host, and its address.

    An interface without a link comes last. ``near``: an address of this host. The result is this one, or else one of
    its family, if the interface has any.

    Raises OptionError if this host has none of the interfaces, or no address there.
    """
    known = {**{a: name for a, name in interface_addresses().items() if is_loopback(a)}, **_reachable_addresses()}
    for name in _by_link(interfaces):
        addresses = [address for address, of in known.items() if of == name]
        if addresses:
            order = lambda a: (a != near, (":" in a) != (":" in near))  # noqa: E731
            return name, min(addresses, key=order)
    wanted = ",".join(interfaces)
    why = refusal(interfaces.__contains__, wanted) or f"interface {wanted!r} has no address that other hosts reach"
    raise OptionError(
        f"--network-interface: {wanted!r}: {why}. Name the interface of each host by which the others reach it."
    )


def refusal(fits: Callable[[str], bool], shown: str) -> str:
    """Return why no interface that ``fits`` can be used on this host, or ""."""
    names, with_address = interface_names(), set(interface_addresses().values())
    if not any(map(fits, names)):
        return f"this host has no network interface {shown!r}, only {', '.join(sorted(names))}"
    return "" if any(map(fits, with_address)) else f"interface {shown!r} has no address"


def address_towards(hosts: Iterable[str]) -> str:
    """Return this machine's address on its route to the first of ``hosts`` that is known and is another machine.

    Without one, return that on the default route, or else any; "" if it has none. The resolver may block: never call
    this on an event loop.
    """
    for host in hosts:
        if not is_this_machine(host) and (address := _source_address(host)):
            return address
    return outward_address()


def outward_address() -> str:
    """Return this machine's address on its default route, or else any except loopback addresses; "" for none.

    A route through an interface without a link counts for nothing.
    """
    by_route = filter(None, map(_source_address, _ELSEWHERE))
    alive = (address for address in (*by_route, *own_addresses()) if has_link(interface_of(address) or ""))
    return next(alive, next(iter(own_addresses()), ""))


def _source_address(host: str) -> str:
    """Return the address from which this machine would send to ``host``; "" if it cannot. Nothing is sent."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            try:
                towards.connect((host, 9))
            except OSError:
                continue
            address: str = towards.getsockname()[0].partition("%")[0]
            if not is_loopback(address) and not _is_link_local(address):
                return address
    return ""


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address. Any loopback address gives the loopback interface."""
    if is_loopback(address) and ":" not in address:
        address = LOCALHOST
    return interface_addresses().get(address.partition("%")[0])


def selecting_interface(address: str, in_family: bool = False) -> str | None:
    """Return the name of the interface by which a library chooses ``address``: libraries take an interface's first one.

    ``in_family``: the library takes the first one of the family of ``address``. None if there is no such interface.
    """
    name = interface_of(address)
    if name is None or is_loopback(address):
        return name
    address = address.partition("%")[0]
    same = [known for known, of in interface_addresses().items() if of == name and not _is_link_local(known)]
    if in_family:
        same = [known for known in same if (":" in known) == (":" in address)]
    if ":" in address and len([known for known in same if ":" in known]) > 1:
        return None  # the kernel's list does not say which of them is the first
    return name if same[:1] == [address] else None


def interface_names() -> tuple[str, ...]:
    """Return the names of this machine's interfaces, also of those without an address."""
    return tuple(name for _, name in socket.if_nameindex())


def interface_addresses(without: int = 0) -> dict[str, str]:
    """Return the names of the interfaces by their addresses, in the order of the kernel: IPv4 first.

    ``without``: flags of addresses of IPv6 that are left out.
    """
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
    for digits, _, _, _, flags, name in map(str.split, lines):
        if not int(flags, 16) & without:
            found.setdefault(str(ipaddress.IPv6Address(bytes.fromhex(digits))), name)
    return found


# ------------------------------------------------------------------------------------------- sockets that listen


@cache
def any_address() -> str:
    """Return the address at which a socket listens at all addresses of this machine."""
    return "::" if not listen_error("::") else "0.0.0.0"


def listening_socket(host: str, port: int = 0, backlog: int = socket.SOMAXCONN) -> socket.socket:
    """Return a socket that listens at this address; "::": at all addresses of IPv4, too. Port 0: any port.

    Raises OSError.
    """
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_ipv6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def port_of(listening: socket.socket) -> int:
    """Return the port of a socket."""
    port: int = listening.getsockname()[1]
    return port


def host_port(host: str, port: int) -> str:
    """Return ``host:port``, or ``[host]:port`` for an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_carrier(address: str) -> str:
    """Return the IPv4 address that an IPv6 address carries, or else the address."""
    return address.removeprefix(_IPV4_IN_IPV6) if "." in address else address


def listen_error(address: str, port: int = 0) -> str:
    """Return why this process cannot listen at this address, or "". Port 0: any port."""
    try:
        with listening_socket(address, port):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def free_port() -> int:
    """Return a port at which another process of this machine may listen, on all its addresses."""
    with listening_socket(any_address()) as listener:
        return port_of(listener)
