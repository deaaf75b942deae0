"""The process of an agent, from its launch to its exit."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import NoReturn

from elasticstate.agent.agent import Agent
from elasticstate.net.agent_status import answering
from elasticstate.net.launch import Launch
from elasticstate.writing import BLOCKED_S


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
