"""Jobs of plain commands: one run of ``elasticrun`` with pipes, its events, and its workers."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kit import forks
from tests.kit.job import check_events


class Job:
    """A running ``elasticrun``."""

    def __init__(self, directory: Path, *argv: str) -> None:
        self.events_file = directory / "events"
        self.name = f"test-{os.getpid()}"
        options = ["--events-file", str(self.events_file), "--job-name", self.name]
        self.process = forks.elasticrun([*options, *argv], directory)

    def events(self, name: str) -> list[dict[str, Any]]:
        try:
            lines = self.events_file.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60

        def holds() -> bool:
            try:
                return condition()
            except psutil.NoSuchProcess:  # the process ended in the meantime
                return False

        while not holds():
            if time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"has not come: {what}; {self.process.communicate()}")
            time.sleep(0.005)

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        self.wait(lambda: len(self.events(name)) >= count, f"{count} times the event {name}")
        return self.events(name)

    def agents(self) -> list[psutil.Process]:
        return [p for p in psutil.Process(self.process.pid).children() if "elasticstate.agent" in p.cmdline()]

    def workers(self) -> list[psutil.Process]:
        return [worker for agent in self.agents() for worker in agent.children()]

    def end(self) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr."""
        try:
            stdout, stderr = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"does not end; {self.process.communicate()}")
        check_events(self.events_file)
        return self.process.returncode, stdout, stderr


@contextmanager
def running(directory: Path, *argv: str) -> Iterator[Job]:
    job = Job(directory, *argv)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate()


def started(job: Job, count: int) -> list[psutil.Process]:
    """Wait until all workers run their command, ``sleep`` or a shell; return them."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found[:] = [p for p in job.workers() if p.name() in ("sh", "sleep")]
        return len(found) == count

    job.wait(look, f"{count} workers")
    return found
