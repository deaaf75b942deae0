"""``--verify-sync``: states that differ are found when a world begins, and not at the end of the training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from job import SCRIPTS, Job


@pytest.mark.parametrize("verify", [True, False])
def test_states_that_differ_are_found_if_that_is_asked_for(verify: bool, tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "2", *(["--verify-sync"] if verify else []))
    with Job(tmp_path, *options, command=[sys.executable, str(SCRIPTS / "diverge.py")]) as job:
        job.finish(status=int(verify))
    assert len(job.events("world_formed")) >= 2, "there was a second world, with callbacks"
    assert ("StateDivergedError" in job.output) == verify
    if verify:
        assert "offset" in job.events("root_cause")[0]["error"]
