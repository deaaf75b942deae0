"""``--verify-sync`` detects different states when a world begins, and not only at the end of the training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Job


@pytest.mark.parametrize("verify", [True, False])
def test_states_that_differ_are_found_if_that_is_asked_for(verify: bool, tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "2", *(["--verify-sync"] if verify else []))
    with Job(tmp_path, *options, command=[sys.executable, str(SCRIPTS / "diverge.py")]) as job:
        job.finish(status=3 if verify else 0)
    assert len(job.events("world_formed")) >= 2, "there was a second world, with callbacks"
    assert ("StateDivergedError" in job.output) == verify
    if verify:
        assert "offset" in job.events("root_cause")[0]["error"]


def test_batch_norms_under_ddp_are_no_divergence(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "batch_norm.py")]
    with Job(tmp_path, "-np", "3", "--verify-sync", command=command) as job:
        job.finish()
    assert job.output.count("generation 2: 1 weights, 3 running means") == 3, job.output
    assert job.output.count("check() skips values that differ by rank by design: ") == 1, job.output
    assert "model.buffers.1.running_mean" in job.output
