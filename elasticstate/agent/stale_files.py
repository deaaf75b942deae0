"""Stale files: removal of files that dead jobs and agents have left on this host, and expiry of this agent's own."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from elasticstate.commits import CommitDirectory, remove_agent_directories, remove_dead
from elasticstate.errors import OptionError
from elasticstate.options import runtime_directory
from elasticstate.threads import in_thread

_LEAST_INTERVAL_S = 1.0


def keep_s(driver_timeout_s: float) -> float:
    """Return the seconds for which files are kept: ``--driver-timeout`` after any death, plus one interval."""
    return driver_timeout_s + _interval_s(driver_timeout_s)


def _interval_s(driver_timeout_s: float) -> float:
    return max(_LEAST_INTERVAL_S, driver_timeout_s / 10)


async def clean_regularly(commits: CommitDirectory, driver_timeout_s: float) -> None:
    """Extend the expiry of this agent's files and remove stale files, regularly, until cancelled."""
    while True:
        commits.keep()
        await in_thread(_remove, str(commits.base))
        await asyncio.sleep(_interval_s(driver_timeout_s))


def _remove(commit_directory: str) -> None:
    remove_dead(commit_directory)
    with suppress(OptionError):  # there is no such directory on this host
        remove_agent_directories(str(runtime_directory()))
