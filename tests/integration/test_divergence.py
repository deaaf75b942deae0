"""A bit that is flipped on one rank is found by the digests of the commits.

Each job of these tests that ends without a failed test is checked for alarms: ``kit/job.py``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Job


def job(path: Path, *arguments: object, ranks: int, options: Sequence[str] = ()) -> Job:
    path.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPTS / "flips.py"), *map(str, arguments)]
    return Job(path, "-np", str(ranks), *options, command=command, diverges=True)


def test_a_bit_that_is_flipped_for_one_commit_is_named_with_rank_commit_and_value(tmp_path: Path) -> None:
    until = tmp_path / "until"
    steps = 5000  # a limit: the job ends when the value is named
    with job(tmp_path, steps, 0.01, "buffer", 40, 1, tmp_path / "flipped", until, ranks=3) as run:
        run.wait_for_event("divergent_value")
        until.touch()
        run.finish()
    assert "flipped a bit of buffer on rank 1 after step 40" in run.output
    (found,) = run.events("divergence")
    assert found["ranks"] == [1]
    assert 40 <= found["commit"][1] <= steps
    (named,) = run.events("divergent_value")
    assert (named["commit"], named["value"]) == ([1, 40], "model.buffers.scale")
    assert "rank 1 (localhost:1) differ from those of the other 2 ranks" in run.output


def test_a_flip_in_the_last_commit_is_found_at_the_exit_gate(tmp_path: Path) -> None:
    with job(tmp_path, 30, 0.0, "parameter", 30, 1, ranks=2) as run:
        run.finish()
    (found,) = run.events("divergence")
    assert (found["ranks"], found["commit"]) == ([0, 1], [1, 30])


# ----------------------------------------------------------------------------------------------------- with restore

RESTORE = ("--divergence", "restore")
FLIP_AT, STEPS = 17, 40


def trained(run: Job) -> dict[str, str]:
    """Return the digests of what the ranks have trained, by rank."""
    return dict(re.findall(r"rank (\d+) has trained (\w+)", run.output))


class Undisturbed:
    """The results of jobs without a flip, each run once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.of = cache(self._run)

    def _run(self, ranks: int, backend: str) -> dict[str, str]:
        with job(self._path / f"{ranks}{backend}", STEPS, 0.0, ranks=ranks, options=("--backend", backend)) as run:
            run.finish()
        assert len(trained(run)) == ranks
        return trained(run)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


def check_restore(path: Path, undisturbed: Undisturbed, ranks: int, where: str, rank: int, backend: str) -> None:
    """Flip a bit in a job with restore: it is found in the next commit, and the job ends as if nothing had happened."""
    flip = (where, FLIP_AT, rank, path / "flipped")
    with job(path, STEPS, 0.0, *flip, ranks=ranks, options=(*RESTORE, "--backend", backend)) as run:
        run.finish()
    assert f"flipped a bit of {where} on rank {rank} after step {FLIP_AT}" in run.output
    (found,) = run.events("divergence")
    assert found["commit"] == [1, FLIP_AT]
    assert found["ranks"] == ([rank] if ranks > 2 else [0, 1])
    assert f"the job goes back to commit (1, {FLIP_AT - 1})" in found["text"]
    assert [len(e["left"]) for e in run.events("world_formed")] == [0, int(ranks > 2)]
    (resumed,) = run.events("training_resumed")
    assert resumed["ticks_lost"] == 1
    assert trained(run) == undisturbed.of(ranks, backend)


def test_with_restore_the_rank_that_differs_is_replaced_and_the_final_state_is_that_of_an_undisturbed_job(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    check_restore(tmp_path, undisturbed, 3, "parameter", 1, "gloo")


def test_with_restore_two_ranks_both_go_back(tmp_path: Path, undisturbed: Undisturbed) -> None:
    check_restore(tmp_path, undisturbed, 2, "optimizer", 0, "gloo")


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["parameter", "optimizer", "buffer"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_each_flip_is_undone(
    tmp_path: Path, undisturbed: Undisturbed, backend: str, ranks: int, where: str, rank: int
) -> None:
    check_restore(tmp_path, undisturbed, ranks, where, rank, backend)
