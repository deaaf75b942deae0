"""Names and addresses of this machine."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

LOCALHOST = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # netdevice(7)


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is an address like 127.0.0.2."""
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


_full_names: list[str] = []  # the resolver's answer, once it has arrived


def is_this_machine(host: str) -> bool:
    """Return True if ``host`` is localhost, a loopback address, or this machine's own name.

    The name may be the short one, or the full one if it is known.
    """
    return host == "localhost" or is_loopback(host) or host == socket.gethostname() or host in _full_names


def learn_full_name(hosts: Iterable[str]) -> None:
    """Ask the resolver for this machine's full name, if one of ``hosts`` may be it; at most once.

    A resolver that does not answer blocks for tens of seconds: never call this on an event loop.
    """
    if not _full_names and not all(map(is_this_machine, hosts)):
        _full_names.append(socket.getfqdn())


def address_of(host: str) -> str:
    """Return the address at which the other hosts of a job reach this host. All of them are names of this machine."""
    return host if is_loopback(host) else LOCALHOST


def own_addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this machine's interfaces at which other machines may reach it."""
    return tuple(address for address in _interfaces() if not is_loopback(address))


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address. Any loopback address gives the loopback interface."""
    if is_loopback(address):
        address = LOCALHOST
    return _interfaces().get(address)


def _interfaces() -> dict[str, str]:
    """Return the names of the interfaces by their addresses."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def listen_error(address: str, port: int = 0) -> str:
    """Return why this process cannot listen at this address, or "". Port 0: any port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, port), family=family):
            return ""
    except OSError as error:
        return error.strerror or str(error)
