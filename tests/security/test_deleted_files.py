"""All files of a running job are deleted, as systemd-logind deletes them. The job continues, and can still recover."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from elasticstate.driver.record import find_job
from tests.kit.job import Job
from tests.kit.second_user import logind_deletes
from tests.kit.strangers import Calm


def commit_directory(job: Job) -> Path:
    return Path(psutil.Process(job.pid_of(0)).environ()["ELASTICSTATE_COMMITS"]).parent


def newest_step(job: Job) -> int:
    return max(int(line["step"]) for line in job.log("commit"))


def first_step(job: Job, generation: int, members: int) -> int:
    def entered() -> list[int]:
        found = [int(line["step"]) for line in job.log("enter") if line["generation"] == generation]
        return found if len(found) == members else []

    return min(job.wait_for(f"generation {generation} of {members}", entered))


def test_a_job_whose_files_were_deleted_goes_on_and_survives_the_death_of_all(
    tmp_path: Path, runtime_directory: Path
) -> None:
    name = f"deleted-{uuid.uuid4().hex[:8]}"
    options = ("-np", "2", "--job-name", name, "--cooldown-range", "0", "0")
    with Job(tmp_path, *options, steps=10, step_seconds=0.02, until=tmp_path / "stop") as job:
        job.wait_for_step(5)
        commits, mine = commit_directory(job), runtime_directory / f"elasticstate-{os.getuid()}-{name}"
        calm = Calm(job)
        logind_deletes(commits)
        logind_deletes(mine)
        for what in ("commits were deleted", "the socket of this agent was deleted", "was deleted and created again"):
            job.wait_for(f"a warning that {what}", lambda what=what: what in job.output, 10)
        assert "loginctl enable-linger" in job.output
        assert find_job(name) is not None
        status = [sys.executable, "-m", "elasticstate", "status", name]

        def trains() -> bool:
            shown = subprocess.run(status, capture_output=True, text=True)
            assert shown.returncode == 0, shown
            return "localhost:1#1  train" in shown.stdout

        job.wait_for("status in which rank 1 trains", trains)

        # With its next commit, each worker has moved to the new files. A new worker starts and reaches its agent.
        job.wait_for("both copies", lambda: job.output.count("was copied to") == 2)
        calm.check()
        step = newest_step(job)
        job.kill(1)
        assert first_step(job, 2, 2) >= step - 1

        # All processes end at once: the new driver finds the files by their names.
        job.wait_for_step(step + 10)
        processes = psutil.Process(job.process.pid).children(recursive=True)
        step = newest_step(job)
        for process in (*processes, job.process):
            process.send_signal(signal.SIGKILL)
        assert job.process.wait() == -signal.SIGKILL
        assert not psutil.wait_procs(processes, 30)[1]
        job.start(*job.arguments)
        assert first_step(job, 3, 2) >= step - 1
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()
    assert find_job(name) is None
