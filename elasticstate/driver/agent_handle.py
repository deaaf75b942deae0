"""The driver's record of an agent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from elasticstate.launchers import AgentProcess
from elasticstate.net.control import AgentStream


@dataclass(slots=True, eq=False)
class AgentHandle:
    """Record of one agent: its host, process and connection."""

    host: str
    id: str
    process: AgentProcess
    since: float  # time when it was started or lost
    stream: AgentStream | None = None
    pid: int | None = None
    slots: int = 0  # offered by an agent that has dialled in
    rack: str = ""  # named by it
    watcher: asyncio.Task[None] | None = None
    has_reported: bool = False  # its host is locked: no earlier agent of the job lives there
    is_stopping: bool = False  # Shutdown was sent
    is_lost: bool = False
    has_ended: bool = False  # its process on this machine
