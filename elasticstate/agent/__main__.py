"""``python -m elasticstate.agent``: started by the driver, which writes the launch parameters to its stdin."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import msgspec

from elasticstate.agent.agent import serve
from elasticstate.net.messages import Launch
from elasticstate.net.names import host_port
from elasticstate.options import ssh_client
from elasticstate.processes import allow_many_descriptors, keep_owner_access
from elasticstate.terminal import complain, hold_standard_descriptors


def main() -> NoReturn:
    hold_standard_descriptors()
    line = _first_line()
    if not line:
        sys.exit(2)  # the driver has ended, or needs no agent on this machine
    try:
        launch = msgspec.json.decode(line, type=Launch)
    except msgspec.DecodeError as error:
        complain("elasticstate", f"stdin has no valid parameters of an agent ({error}). Use elasticrun agent instead.")
        sys.exit(2)
    allow_many_descriptors()
    keep_owner_access()
    serve(with_ssh_client_first(launch))


def with_ssh_client_first(launch: Launch) -> Launch:
    """Put the address that ssh connected from first in its family: the driver most likely listens there.

    All hosts must take the same family (see DriverStream.dial), by whichever ssh has connected.
    """
    client = ssh_client()
    if not client or "%" in client:  # of the link itself: no other host reaches such an address
        return launch
    ports = dict.fromkeys(int(address.rpartition(":")[2]) for address in launch.addresses)
    found = dict.fromkeys((*(host_port(client, port) for port in ports), *launch.addresses))
    is_ipv6 = [address.startswith("[") for address in launch.addresses]
    return msgspec.structs.replace(
        launch, addresses=tuple(sorted(found, key=lambda address: address.startswith("[") != is_ipv6[0]))
    )


def _first_line() -> bytes:
    """Read unbuffered: the end of the pipe is watched later."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 65536)
        if not data:
            break
        line += data
    return line


if __name__ == "__main__":
    main()
