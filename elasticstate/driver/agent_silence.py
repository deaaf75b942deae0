"""Detection of silent agents: a process that lives may still be unreachable or stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elasticstate.driver.agent_handle import AgentHandle
from elasticstate.driver.beats import next_beat
from elasticstate.options import Options

_LOOKS_PER_TIMEOUT = 20  # checks for silent agents within --heartbeat-timeout
_LOOKS_PER_HEARTBEAT = 5  # a heartbeat to each agent at every 5th check only, because it costs more
_LONGEST_INTERVAL_S = 1.0


async def watch_silence(
    options: Options, agents: Callable[[], list[AgentHandle]], lose: Callable[[AgentHandle, str], None]
) -> None:
    """Count silent agents as lost, even if their process lives. Send heartbeats, so that agents can do likewise."""
    loop = asyncio.get_running_loop()
    interval_s = min(_LONGEST_INTERVAL_S, options.heartbeat_timeout_s / _LOOKS_PER_TIMEOUT)
    limit_s = options.heartbeat_timeout_s
    looked_at = forgiven_until = loop.time()
    looks = 0
    while True:
        await next_beat(interval_s)
        now = loop.time()
        stalled_s = now - looked_at - interval_s
        looked_at = now
        looks += 1
        if stalled_s > _LONGEST_INTERVAL_S:  # this driver was stopped, and the agents may have been, too
            forgiven_until = now
        for agent in agents():
            if agent.stream is not None:
                if looks % _LOOKS_PER_HEARTBEAT == 0:
                    agent.stream.heartbeat()
                if now - max(agent.stream.received_at, forgiven_until) > limit_s:
                    lose(agent, f"sent no heartbeat for --heartbeat-timeout of {limit_s:g} s")
            elif now - max(agent.since, forgiven_until) > options.start_timeout_s:
                lose(agent, f"did not connect within --start-timeout of {options.start_timeout_s:g} s")
