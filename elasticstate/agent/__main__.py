"""``python -m elasticstate.agent``: started by the driver, told what to do on its stdin."""

from __future__ import annotations

import asyncio
import os
import sys

from elasticstate.config import quiet_grpc

quiet_grpc()

import msgspec  # noqa: E402

from elasticstate.agent.agent import Agent  # noqa: E402
from elasticstate.net.messages import Launch  # noqa: E402


def main() -> int:
    try:
        launch = msgspec.json.decode(_first_line(), type=Launch)
    except msgspec.DecodeError as error:
        print(f"elasticstate: an agent is started by elasticrun: {error}", file=sys.stderr)
        return 2
    return asyncio.run(Agent(launch).run())


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
    sys.stderr.flush()
    os._exit(status)  # a thread may be stuck in a write to a terminal that nobody reads
