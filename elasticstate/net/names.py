"""Names and addresses of this machine."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress

LOCALHOST = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # netdevice(7)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an address like 127.0.0.2."""
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is localhost, a loopback address, or this machine's own name, short or full."""
    return host == "localhost" or is_loopback(host) or host in (socket.gethostname(), socket.getfqdn())


def address_of(host: str) -> str:
    """At which address the other hosts of a job, all of them names of this machine, reach it."""
    return host if is_loopback(host) else LOCALHOST


def own_addresses() -> tuple[str, ...]:
    """The IPv4 addresses of this machine's interfaces at which others may reach it."""
    return tuple(address for address in _interfaces() if not is_loopback(address))


def interface_of(address: str) -> str | None:
    """The name of this machine's interface that has this IPv4 address; that of the loopback one for any of its own."""
    if is_loopback(address):
        address = LOCALHOST
    return _interfaces().get(address)


def _interfaces() -> dict[str, str]:
    """Their names, by their addresses."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def why_nobody_can_listen(address: str, port: int = 0) -> str:
    """Why this process cannot listen there; "" when it can. Port 0: any."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, port), family=family):
            return ""
    except OSError as error:
        return error.strerror or str(error)
