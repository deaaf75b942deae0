"""Names and addresses of this machine."""

from __future__ import annotations

import ipaddress
import socket

LOCALHOST = "127.0.0.1"


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
