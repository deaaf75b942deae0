"""The NCCL backend, and workers that have lost their device."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.kit.job import SCRIPTS, Job

HAS_NCCL = dist.is_nccl_available() and torch.cuda.is_available()
GPU = pytest.mark.skipif(not HAS_NCCL, reason="needs a CUDA device, and a torch with NCCL")
NO_GPU = pytest.mark.skipif(HAS_NCCL, reason="there is a CUDA device")


def lost_device(tmp_path: Path, *options: str, **script: object) -> Job:
    arguments = [part for name, value in script.items() for part in ("--" + name, str(value))]
    command = [sys.executable, str(SCRIPTS / "lost_device.py"), "--log", str(tmp_path / "logs"), *arguments]
    return Job(tmp_path, "--join-window", "60", *options, command=command)


@NO_GPU
def test_nccl_without_a_device_is_told_with_its_remedy(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "1", "--backend", "nccl") as job:
        job.finish(3)
        cause = job.events("root_cause")[0]
        assert "UsageError: --backend: 'nccl': " in cause["error"]
        assert "--backend gloo" in job.output.splitlines()[-1]


def test_a_worker_that_has_lost_its_device_is_replaced_and_resumes(tmp_path: Path) -> None:
    with lost_device(tmp_path, "-np", "3", "--backend", "gloo", lose=1) as job:
        job.wait_for_step(10)
        os.kill(job.pid_of(2), signal.SIGKILL)
        job.finish(0, timeout=120)
        job.check_survival(faults=1)
        ends = [e for e in job.events("worker_exited") if e["signal"] == signal.SIGKILL]
        assert sorted(e["slot"] for e in ends) == [1, 2]
        replaced = next(e for e in ends if e["slot"] == 1)
        assert "Traceback" in replaced["error"], "the error file"
        assert "localhost:1] elasticstate: this worker is restarted: this process cannot use its device" in job.output
        entered = job.log("enter")
        assert len({e["pid"] for e in entered}) == 5, "slot 0 has gone on in its process"
        assert all(e["step"] >= 9 for e in entered if e["generation"] > 1), "nobody begins anew"


def test_all_members_may_lose_their_device(tmp_path: Path) -> None:
    """All members restart at the same step. That must not count as a bug of the user at that step."""
    with lost_device(tmp_path, "-np", "2", "--backend", "gloo", lose=0) as job:
        job.wait_for_step(10)
        os.kill(job.pid_of(1), signal.SIGKILL)
        job.finish(0, timeout=120)
        job.check_survival(faults=1)
        assert len({e["pid"] for e in job.log("enter")}) == 4
        assert all(e["step"] >= 9 for e in job.log("enter") if e["generation"] > 1), "from the commits in memory"


@GPU
def test_a_world_of_one_on_a_device(tmp_path: Path) -> None:
    with lost_device(tmp_path, "-np", "1", "--backend", "nccl") as job:
        job.finish(0, timeout=120)
        job.check_survival()


@GPU
def test_an_assert_on_the_device_replaces_the_worker(tmp_path: Path) -> None:
    with lost_device(tmp_path, "-np", "1", cuda=20) as job:
        job.finish(0, timeout=180)
        job.check_survival(faults=1)
        assert job.events("worker_exited")[0]["signal"] == signal.SIGKILL
        assert "device-side assert" in job.events("worker_exited")[0]["error"]
        assert {e["step"] for e in job.log("enter") if e["generation"] == 2} == {19}


@GPU
def test_the_survivor_of_a_dead_member_keeps_its_process(tmp_path: Path) -> None:
    """Both members use the first device, as each is slot 0 of its host."""
    with lost_device(tmp_path, "-np", "2", "-H", "127.0.0.2:1,127.0.0.3:1") as job:
        job.wait_for_step(10)
        os.kill(job.pid_of(1), signal.SIGKILL)
        job.finish(0, timeout=180)
        job.check_survival()
        assert len({e["pid"] for e in job.log("enter")}) == 3
