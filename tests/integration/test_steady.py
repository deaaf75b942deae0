"""Resources that must not grow, and operations that must not happen, while a job runs undisturbed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

import psutil
import pytest

from tests.kit.job import SCRIPTS, Job

POOL = 3  # asyncio's thread pool starts another thread when all of its threads are at work, up to the cores plus 4
FAST = ("--join-window", "30", "--min-interrupt-distance", "0")


def test_a_hundred_commits_cost_no_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    with Job(tmp_path, "-np", "2", command=[sys.executable, str(SCRIPTS / "quiet.py")]) as job:
        job.finish(0)
        assert job.output.count("operations: 300\n") == 2, job.output


@pytest.mark.parametrize("generations", [61, pytest.param(201, marks=pytest.mark.long)])
def test_many_regroups_leave_threads_descriptors_and_memory_where_they_were(tmp_path: Path, generations: int) -> None:
    log = tmp_path / "held.jsonl"
    command = [sys.executable, str(SCRIPTS / "churn.py"), str(log), str(generations)]
    held: dict[str, list[dict[str, int]]] = {"driver": [], "agent": []}
    with Job(tmp_path, "-np", "2", "--min-np", "1", *FAST, command=command) as job:
        agent = psutil.Process(job.wait_for_event("agent_joined")["pid"])
        driver = psutil.Process(job.process.pid)
        for generation in range(2, generations):
            job.wait_for_event("training_resumed", generation - 1, timeout=120)
            if generation % 2 == 0:
                continue  # a world of one worker; the start of the next worker opens pipes for a moment
            for name, process in (("driver", driver), ("agent", agent)):
                held[name].append(_holds(process))
        job.finish(0, timeout=120)
        assert len(job.events("worker_exited")) >= generations // 2, "the deaths have not happened"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    held["oldest worker"] = [line for line in lines if line["size"] == 1]
    for name, samples in held.items():
        _check_flat(name, samples, generations // 5)


def _holds(process: psutil.Process) -> dict[str, int]:
    with process.oneshot():
        return {
            "threads": process.num_threads(),
            "descriptors": process.num_fds(),
            "bytes": process.memory_info().rss,
        }


def _check_flat(name: str, samples: list[dict[str, int]], window: int) -> None:
    """Compare the first and the last samples of a window each."""
    assert len(samples) >= 2 * window, f"{name}: {len(samples)} samples"
    first, last = samples[:window], samples[-window:]
    pool = POOL if name in ("driver", "agent") else 0
    for what, spare in (("threads", pool), ("descriptors", 0)):
        assert max(s[what] for s in last) <= max(s[what] for s in first) + spare, f"{name}: {what} grow: {samples}"
    before, after = (fmean(s["bytes"] for s in window) for window in (first, last))
    assert after <= 1.01 * before, f"{name}: {before / 2**20:.1f} MiB have become {after / 2**20:.1f} MiB"
