"""Workers that never wait for each other: a survivor overwrites the commit that a newcomer is about to read."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.kit.job import SCRIPTS, Job


def test_a_newcomer_does_not_wait_for_a_commit_that_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "without_collectives.py"), str(tmp_path / "logs")]
    with Job(tmp_path, "-np", "2", command=command) as job:
        job.finish(timeout=60)
    assert len([event for event in job.events("worker_exited") if event["signal"] == 9]) == 1
    assert [line["weight"] for line in job.log("end")] == [300.0, 300.0]
