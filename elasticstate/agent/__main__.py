"""``python -m elasticstate.agent``: started by the driver, which writes the launch parameters to its stdin."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import msgspec

from elasticstate.agent.agent import serve
from elasticstate.net.messages import Launch
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
    """Put the address that ssh connected from first: the driver most likely listens there."""
    client = ssh_client()
    if not client:
        return launch
    ports = dict.fromkeys(address.rpartition(":")[2] for address in launch.addresses)
    back = (f"[{client}]:{port}" if ":" in client else f"{client}:{port}" for port in ports)
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
