"""What jobs and agents that were killed have left on this host, and what this one is to leave if it is."""

from __future__ import annotations

import asyncio

from elasticstate.commits import CommitDirectory, remove_agent_directories, remove_dead
from elasticstate.config import runtime_directory

_LEAST_INTERVAL_S = 1.0


async def tend(commits: CommitDirectory, keep_s: float) -> None:
    """Keep what is this agent's, remove what is nobody's: now and every tenth of ``keep_s``, until cancelled."""
    while True:
        commits.keep()
        await asyncio.to_thread(_remove, str(commits.base))
        await asyncio.sleep(max(_LEAST_INTERVAL_S, keep_s / 10))


def _remove(commit_directory: str) -> None:
    remove_dead(commit_directory)
    remove_agent_directories(str(runtime_directory()))
