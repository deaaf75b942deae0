"""What jobs and agents that were killed have left on this host, and what this one is to leave if it is."""

from __future__ import annotations

import asyncio

from elasticstate.commits import CommitDirectory, remove_agent_directories, remove_dead
from elasticstate.config import runtime_directory

_LEAST_INTERVAL_S = 1.0


def keep_s(driver_timeout_s: float) -> float:
    """How far ahead to keep what is this agent's: ``--driver-timeout`` from any death on, and until the next look."""
    return driver_timeout_s + _interval_s(driver_timeout_s)


def _interval_s(driver_timeout_s: float) -> float:
    return max(_LEAST_INTERVAL_S, driver_timeout_s / 10)


async def tend(commits: CommitDirectory, driver_timeout_s: float) -> None:
    """Keep what is this agent's, remove what is nobody's: now and again, until cancelled."""
    while True:
        commits.keep()
        await asyncio.to_thread(_remove, str(commits.base))
        await asyncio.sleep(_interval_s(driver_timeout_s))


def _remove(commit_directory: str) -> None:
    remove_dead(commit_directory)
    remove_agent_directories(str(runtime_directory()))
