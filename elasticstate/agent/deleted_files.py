"""Watch over an agent's files: a deletion is detected within seconds, and the files are created again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from elasticstate.agent.files import JobPlace
from elasticstate.agent.supply import REMEDY, Supply
from elasticstate.commits import CommitDirectory
from elasticstate.copies.pusher import HostCopies
from elasticstate.net.link import AgentSocket

_LOOK_INTERVAL_S = 0.25


async def watch_files(
    supply: Supply,
    commits: CommitDirectory,
    copies: HostCopies,
    place: JobPlace,
    socket: AgentSocket,
    warn: Callable[[str], None],
) -> None:
    """Check the files regularly, until cancelled. ``warn`` gets messages for the user at the driver."""
    directory = commits.fd
    while True:
        supply.check_files()
        if commits.fd != directory:
            with suppress(OSError):  # retried at the next check
                copies.move_to(commits.fd)
                directory = commits.fd
        if place.is_lost or socket.is_lost:
            with suppress(OSError):  # retried at the next check
                if place.is_lost:
                    place.make_anew()
                socket.reopen(place.socket)
                warn(
                    f"the socket of this agent was deleted while the job runs. The new one is {place.socket}. {REMEDY}"
                )
        await asyncio.sleep(_LOOK_INTERVAL_S)
