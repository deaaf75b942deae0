"""Spares: booted workers that wait outside the world, and replace a lost worker in the same change of generation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.kit.job import Hosts, Job

FAST = ("--min-interrupt-distance", "0.5")


def test_a_spare_replaces_a_killed_worker_and_another_one_is_started(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "3", "--min-np", "2", "--spares", "1", *FAST, steps=80) as job:
        job.wait_for_event("worker_ready", worker="localhost:3#1")
        assert [e["size"] for e in job.events("world_formed")] == [3]
        os.kill(job.pid_of(1), signal.SIGKILL)
        formed = job.wait_for_event("world_formed", generation=2)
        assert (formed["size"], formed["joined"]) == (3, ["localhost:3#1"])
        job.wait_for_event("worker_ready", worker="localhost:1#2")  # the new spare
        os.kill(job.pid_of(2), signal.SIGKILL)
        formed = job.wait_for_event("world_formed", generation=3)
        assert (formed["size"], formed["joined"]) == (3, ["localhost:1#2"])
        job.finish(0)
        job.check_survival(None)
        assert [e["size"] for e in job.events("world_formed")] == [3, 3, 3]


def test_a_spare_is_on_another_host_and_a_leaving_host_is_replaced_by_it(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("127.0.0.1:2", "127.0.0.2:2")
    sizes = ("-np", "2", "--min-np", "1", "--max-np", "2", "--spares", "2")
    with Job(tmp_path, *sizes, *hosts.options, *FAST, steps=400) as job:
        (used,) = {worker.split(":")[0] for worker in job.wait_for_event("world_formed")["joined"]}
        (other,) = {"127.0.0.1", "127.0.0.2"} - {used}
        for slot in (0, 1):
            job.wait_for_event("worker_ready", worker=f"{other}:{slot}#1")
        assert [e["size"] for e in job.events("world_formed")] == [2]
        hosts.set(f"{other}:2")
        # A draining member joins one more world, which brings the state to the first spare.
        job.wait_for_event("world_formed", size=2, left=[f"{used}:0#1"])
        job.finish(0)
        job.check_survival(None)
        assert [e["size"] for e in job.events("world_formed")] == [2, 2, 2]
        assert {e["ticks_lost"] for e in job.events("training_resumed")} == {0}


def test_a_worker_that_completes_no_group_waits_says_why_and_fills_a_gap(tmp_path: Path) -> None:
    sizes = ("-H", "localhost:3", "-np", "2", "--max-np", "4", "--np-multiple", "2")
    with Job(tmp_path, *sizes, *FAST, "--job-name", "groups", steps=80, until=tmp_path / "stop") as job:
        members = job.wait_for_event("world_formed", generation=1)["joined"]
        (spare,) = {f"localhost:{slot}#1" for slot in range(3)}.difference(members)
        job.wait_for_event("worker_ready", worker=spare)
        status = subprocess.run(
            [sys.executable, "-m", "elasticstate", "status", "groups"], capture_output=True, text=True, timeout=30
        )
        assert "; spare: worlds have a multiple of 2 workers" in status.stdout, status.stderr
        os.kill(job.pid_of(1), signal.SIGKILL)
        formed = job.wait_for_event("world_formed", generation=2)
        assert (formed["size"], formed["joined"]) == (2, [spare])
        job.wait_for_event("worker_ready", worker=members[1].replace("#1", "#2"))  # the new spare
        (tmp_path / "stop").touch()
        job.finish(0)
        job.check_survival(None)
        assert [e["size"] for e in job.events("world_formed")] == [2, 2]
