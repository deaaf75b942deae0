"""Comparison of a job under attack with the same job before: its ticks, and the memory of driver and agents."""

from __future__ import annotations

import time

import psutil
from job import Job

MOST_GROWTH_BYTES = 32 << 20


class Calm:
    """Measures the normal values for ``window_s`` when constructed. Call ``check()`` after the attack."""

    def __init__(self, job: Job, window_s: float = 2.0) -> None:
        self._job = job
        begin = time.time()
        job.wait_for("the usual ticks", lambda: time.time() > begin + window_s)
        self._usual_gap_s = self._gap_s(begin)
        self._usual_bytes = self._memory_bytes()
        self._began = time.time()

    def check(self) -> None:
        """Check that the mean gap between ticks is below twice the normal one, and that the memory has hardly grown."""
        gap_s, grown = self._gap_s(self._began), self._memory_bytes() - self._usual_bytes
        assert gap_s < 2 * self._usual_gap_s, f"ticks every {gap_s:.3f} s instead of {self._usual_gap_s:.3f} s"
        assert grown < MOST_GROWTH_BYTES, f"driver and agents have grown by {grown} bytes"

    def _gap_s(self, since: float) -> float:
        now = time.time()
        ticks = [line for line in self._job.log("commit") if line["rank"] == 0 and line["time"] > since]
        return (now - since) / max(1, len(ticks))

    def _memory_bytes(self) -> int:
        driver = psutil.Process(self._job.process.pid)
        agents = [child for child in driver.children() if "elasticstate.agent" in child.cmdline()]
        assert agents
        return sum(int(process.memory_info().rss) for process in (driver, *agents))
