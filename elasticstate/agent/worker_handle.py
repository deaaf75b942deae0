"""An agent's record of one of its workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from elasticstate.agent.liveness import Liveness
from elasticstate.agent.output import Audience
from elasticstate.agent.worker_process import WorkerProcess
from elasticstate.net import messages


@dataclass(slots=True)
class WorkerHandle:
    """A slot with its living worker."""

    process: WorkerProcess
    liveness: Liveness
    audience: Audience
    error_file: str  # name of the file to which the worker writes its last exception
    oom_kills: int  # counter of its memory cgroup when the worker started
    joined: int = 0  # generation of the newest world sent to the worker
    lasting: list[messages.FromWorkerBody] = field(default_factory=list)  # messages since then that a new driver needs
    notice: messages.WorkerPreemptionNotice | None = None  # preemption notice, if any
    waits: int = 0  # number of requests that wait for this agent
    doubted_at: float | None = None  # since when the worker may hang
    watcher: asyncio.Task[None] | None = None
    stopping: list[asyncio.TimerHandle] = field(default_factory=list)
