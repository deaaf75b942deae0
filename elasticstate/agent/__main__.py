"""``python -m elasticstate.agent``: started by the driver, told what to do on its stdin."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

import msgspec

from elasticstate.agent.agent import Agent
from elasticstate.config import ssh_client
from elasticstate.net.launch import Launch


def main() -> int:
    try:
        launch = msgspec.json.decode(_first_line(), type=Launch)
    except msgspec.DecodeError as error:
        print(f"elasticstate: an agent is started by elasticrun: {error}", file=sys.stderr)
        return 2
    return asyncio.run(Agent(with_the_way_back(launch)).run())


def with_the_way_back(launch: Launch) -> Launch:
    """If ssh has started this agent, the driver is most likely found where ssh came from."""
    came_from = ssh_client()
    if not came_from:
        return launch
    ports = dict.fromkeys(address.rpartition(":")[2] for address in launch.addresses)
    back = (f"[{came_from}]:{port}" if ":" in came_from else f"{came_from}:{port}" for port in ports)
    return msgspec.structs.replace(launch, addresses=tuple(dict.fromkeys((*back, *launch.addresses))))


def _first_line() -> bytes:
    """Not through a buffer: the end of the pipe is watched later."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 65536)
        if not data:
            break
        line += data
    return line


if __name__ == "__main__":
    status = main()
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(status)  # a thread may be stuck in a write to a terminal that nobody reads
