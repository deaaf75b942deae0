"""Processes of this machine: waiting for the end of one, and ending a whole session."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path


async def ended(pid: int) -> None:
    """Wait until a child of this process has ended; it stays a zombie until its owner asks for the status."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not over.done():
            over.set_result(None)

    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, readable)
    try:
        await over
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def session_members(session: int) -> list[int]:
    """The living processes of a session, from /proc."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError):
                fields = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[3]) == session and fields[0] != b"Z":
                    found.append(int(entry))
    return found


def kill_session(session: int) -> None:
    """SIGKILL to every process of a session, its other process groups and new children included."""
    killed: set[int] = set()
    while members := set(session_members(session)) - killed:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= members


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
