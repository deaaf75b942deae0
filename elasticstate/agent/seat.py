"""What an agent knows of one of its workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from elasticstate.agent.output import Audience
from elasticstate.agent.pulse import Pulse
from elasticstate.agent.worker_process import WorkerProcess
from elasticstate.net import messages


@dataclass(slots=True)
class Seat:
    """A slot with its living worker."""

    process: WorkerProcess
    pulse: Pulse
    audience: Audience
    error_file: str  # where it says by which exception it ends
    oom_kills: int  # that its memory cgroup had counted when it was started
    joined: int = 0  # the newest generation that it was given a world of
    words: list[messages.FromWorkerBody] = field(default_factory=list)  # since then: what a new driver has to know
    notice: messages.Notice | None = None  # that it is to leave
    waits: int = 0  # for answers of this agent
    doubted_at: float | None = None  # since when it is known that it may hang
    watcher: asyncio.Task[None] | None = None
    stopping: list[asyncio.TimerHandle] = field(default_factory=list)
