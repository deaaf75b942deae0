"""A scheduler ends a job by SIGTERM, the driver is killed during its cleanup, and the job is started again."""

from __future__ import annotations

import signal
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from elasticstate.driver.record import find_job
from tests.kit.job import SCRIPTS, Job


@pytest.mark.parametrize("moment", ["agents", "directory"])
def test_a_job_that_was_ended_starts_anew_under_its_name(moment: str, tmp_path: Path) -> None:
    name = f"requeue-{uuid.uuid4().hex[:8]}"
    killed = [sys.executable, str(SCRIPTS / "killed_driver.py"), moment]
    options = ["-np", "1", "--job-name", name, "--orphan-timeout", "1"]
    with Job(tmp_path, *options, within=killed, until=tmp_path / "stop", steps=5) as job:
        job.wait_for_step(5)
        agents = psutil.Process(job.process.pid).children()
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(60) == -signal.SIGKILL
        if moment == "directory":
            assert not any(agent.is_running() for agent in agents), "and its commits went with it"
        last = find_job(name)
        assert last is not None
        assert last.highest is not None, "there were commits"
        job.within = ()
        (tmp_path / "stop").touch()
        job.start(*job.arguments)
        job.finish(0)
        first, *_, again = [line["step"] for line in job.log("enter")]
        assert (first, again) == (0, 0)
    assert find_job(name) is None
    assert not psutil.wait_procs(agents, 10)[1], "an agent that was not told to shut down has done so by itself"
