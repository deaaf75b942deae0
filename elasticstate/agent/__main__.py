"""``python -m elasticstate.agent``: started by the driver, which writes the launch parameters to its stdin."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import msgspec

from elasticstate.agent.serve import serve
from elasticstate.config import ssh_client
from elasticstate.net.launch import Launch
from elasticstate.processes import allow_many_descriptors, keep_owner_access
from elasticstate.terminal import complain, hold_standard_descriptors


def main() -> NoReturn:
    hold_standard_descriptors()
    try:
        launch = msgspec.json.decode(_first_line(), type=Launch)
    except msgspec.DecodeError as error:
        complain("elasticstate", f"an agent is started by elasticrun: {error}")
        sys.exit(2)
    allow_many_descriptors()
    keep_owner_access()
    serve(with_the_way_back(launch))


def with_the_way_back(launch: Launch) -> Launch:
    """Put the address that ssh connected from first: the driver most likely listens there."""
    came_from = ssh_client()
    if not came_from:
        return launch
    ports = dict.fromkeys(address.rpartition(":")[2] for address in launch.addresses)
    back = (f"[{came_from}]:{port}" if ":" in came_from else f"{came_from}:{port}" for port in ports)
    return msgspec.structs.replace(launch, addresses=tuple(dict.fromkeys((*back, *launch.addresses))))


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
