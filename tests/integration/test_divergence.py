"""A bit that is flipped on one rank is found by the digests of the commits.

Each job of these tests that ends without a failed test is checked for alarms: ``kit/job.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.kit.job import SCRIPTS, Job


def job(path: Path, *arguments: object, ranks: int) -> Job:
    command = [sys.executable, str(SCRIPTS / "flips.py"), *map(str, arguments)]
    return Job(path, "-np", str(ranks), command=command, diverges=True)


def test_a_bit_that_is_flipped_for_one_commit_is_named_with_rank_commit_and_value(tmp_path: Path) -> None:
    with job(tmp_path, 200, 0.01, "buffer", 40, 1, ranks=3) as run:
        run.finish()
    assert "flipped a bit of buffer on rank 1 after step 40" in run.output
    (found,) = run.events("divergence")
    assert found["ranks"] == [1]
    assert 40 <= found["commit"][1] <= 200
    (named,) = run.events("divergent_value")
    assert (named["commit"], named["value"]) == ([1, 40], "model.buffers.scale")
    assert "rank 1 (localhost:1) differ from those of the other 2 ranks" in run.output


def test_a_flip_in_the_last_commit_is_found_at_the_exit_gate(tmp_path: Path) -> None:
    with job(tmp_path, 30, 0.0, "parameter", 30, 1, ranks=2) as run:
        run.finish()
    (found,) = run.events("divergence")
    assert (found["ranks"], found["commit"]) == ([0, 1], [1, 30])
