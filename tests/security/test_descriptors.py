"""Many strangers on the driver's port do not use up the job's descriptors, under the limits of a normal user."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from pathlib import Path

import psutil
import pytest

from elasticstate.net.control import ask_status
from tests.kit.job import Hosts, Job
from tests.kit.strangers import STRANGER, Attacker, idle

SOFT, HARD, CROWD = 200, 400, 1500
WORKER = """
import resource, sys, time
from pathlib import Path
Path(sys.argv[1], "limit").write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)))
while not Path(sys.argv[1], "stop").exists():
    time.sleep(0.01)
"""


def warned(job: Job, words: str) -> list[str]:
    return [event["text"] for event in job.events("warning") if words in event["text"]]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_idle_connections_neither_exhaust_the_descriptors_nor_the_memory(tmp_path: Path) -> None:
    hosts, limits = Hosts(tmp_path).set("localhost:1"), ["prlimit", f"--nofile={SOFT}:{HARD}"]
    called = tmp_path / "called"
    hosts.script.write_text(hosts.script.read_text() + f"echo > {called}\n")
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    with Job(tmp_path, "-np", "1", "--max-np", "1", *hosts.options, within=limits, command=command) as job:
        limit = tmp_path / "limit"
        job.wait_for("limit of the worker", lambda: limit.exists() and limit.read_text())
        record = json.loads(next(Path(os.environ["XDG_RUNTIME_DIR"]).glob("*/driver.json")).read_text())
        port = record["ports"][0]
        driver = psutil.Process(job.process.pid)
        assert driver.rlimit(resource.RLIMIT_NOFILE) == (HARD, HARD), "raised without being asked"
        assert limit.read_text() == str((SOFT, HARD)), "the worker has its user's"
        before, descriptors = driver.memory_info().rss, driver.num_fds()

        with Attacker(idle(CROWD), "127.0.0.1", port, user=STRANGER) as crowd:
            assert crowd.count() == CROWD
            said = f"another user of this machine (user {STRANGER}) (1024 times so far)"
            job.wait_for("refusal of another user's crowd", lambda: warned(job, said))
            assert driver.num_fds() <= descriptors + 10, "they are dropped at once"

        highest = 0
        with Attacker(idle(CROWD), "127.0.0.1", port) as crowd:

            def refused() -> list[str]:
                nonlocal highest
                highest = max(highest, driver.num_fds())
                return warned(job, "too many unauthenticated connections (1024 times so far)")

            job.wait_for("refusal of a crowd", refused)
            assert crowd.count() == CROWD
            status = asyncio.run(ask_status(f"127.0.0.1:{port}", record["token"], 30))
            assert "localhost:0" in status
            calls = called.stat().st_mtime_ns
            job.wait_for("another call of discovery", lambda: called.stat().st_mtime_ns > calls)
            assert driver.num_fds() <= descriptors + HARD // 4 + 20
        assert descriptors < highest <= descriptors + HARD // 4 + 20
        assert driver.memory_info().rss < before + 40_000_000
        assert not warned(job, "host discovery")
        (tmp_path / "stop").touch()
        job.finish()
        assert len(job.events("worker_started")) == 1
