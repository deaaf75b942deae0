"""``elasticrun agent --join``: an agent that the driver did not start."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
from typing import NoReturn

from elasticstate.agent.agent import Agent
from elasticstate.errors import OptionError
from elasticstate.machine import slots_of_this_machine
from elasticstate.net.agent_status import answering
from elasticstate.net.messages import Launch
from elasticstate.net.trust import read_token
from elasticstate.writing import BLOCKED_S

# ---------------------------------------------------------------------------------------------------------------- serve
# The process of an agent, from its launch to its exit.


def serve(launch: Launch, status_socket: str = "") -> NoReturn:
    """Serve until the end, then exit at once: threads may be blocked in a resolver, or by output that nobody reads.

    ``status_socket``: path of a socket that answers ``elasticrun status --agent``. Raises OptionError for a bad one.
    """

    async def run() -> None:
        agent = Agent(launch)
        async with answering(status_socket, lambda: agent.status):
            status = await agent.run()
        await agent.outputs.flushed(BLOCKED_S)
        os._exit(status)

    gc.freeze()  # modules stay for ever: no collection examines them again, so none takes long
    asyncio.run(run())
    raise AssertionError("unreachable")


# ----------------------------------------------------------------------------------------------------------------- join


def join(
    address: str,
    token_file: str,
    name: str,
    slots: int,
    *,
    wait_s: float,
    connect_timeout_s: float,
    status_socket: str = "",
    rack: str = "",
) -> NoReturn:
    """Serve until the job ends, then exit. ``slots`` 0: as many as this machine has. Raises OptionError."""
    try:
        token = read_token(token_file)
    except FileNotFoundError:
        raise OptionError(
            f"--token-file: {token_file!r}: there is no such file. Copy the driver's token file to this machine."
        ) from None
    except (OSError, ValueError) as error:
        raise OptionError(f"--token-file: {token_file!r}: {error}") from None
    launch = Launch(
        host=name,
        agent=secrets.token_hex(8),
        slots=slots or slots_of_this_machine(),
        addresses=(address,),
        token=token,
        connect_timeout_s=connect_timeout_s,
        wait_s=wait_s,
        local_address="",
        socket="",
        directory=os.getcwd(),
        job_directory="",
        environment=(),
        rack=rack,
        is_joining=True,
    )
    serve(launch, status_socket)
