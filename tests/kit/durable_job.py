"""Real jobs with durable copies."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.kit.job import Job, Line

FAST = ("--durable-interval", "0.5", "--durable-keep", "2", "--durable-timeout", "1")


def saved(job: Job) -> list[Line]:
    return [event for event in job.events("durable_copy") if event["state"] == "saved"]


def wait_for_copies(job: Job, count: int) -> Line:
    """Wait until so many more copies are saved. Return the last event."""
    before = len(saved(job))
    found: Line = job.wait_for(f"{count} copies", lambda: len(saved(job)) >= before + count and saved(job)[-1])
    return found


def processes_of(job: Job) -> list[psutil.Process]:
    return [psutil.Process(job.process.pid), *psutil.Process(job.process.pid).children(recursive=True)]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
