"""Workers construct states with different value names: the job ends, or only the newcomer that differs does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.job import Job

FAST = ("--join-window", "30", "--min-interrupt-distance", "0.5")
REMEDY = "Construct the state with the same names and kinds of values on every rank."


@pytest.mark.parametrize(
    ("more", "text"),
    [("localhost-1", "rank 1 has 'scheduler', which rank 0 lacks"), ("localhost-0", "ranks 1, 2 lack 'scheduler', ")],
    ids=["a receiver has more", "the root has more"],
)
def test_in_the_first_world_the_job_ends_with_the_error(more: str, text: str, tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "3", "--min-np", "1", *FAST, steps=60, more=[more]) as job:
        job.finish(3)
    assert len(job.events("world_formed")) == 1, "the job must not spin"
    assert [event["exit_code"] for event in job.events("worker_exited")] == [1] * 3
    error = job.events("root_cause")[0]["error"].splitlines()[-1]
    assert "StateError: Ranks have states of different values: " in error
    assert text in error
    assert error.endswith(REMEDY)
    assert job.log("enter") == []


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ([f"localhost-2-{incarnation}" for incarnation in range(2, 10)], "The commit has no value scheduler"),
        (["localhost-0", "localhost-1", "localhost-2-1"], "The commit also has scheduler"),
    ],
    ids=["the newcomer has more", "the newcomer has fewer"],
)
def test_a_newcomer_with_other_names_ends_alone(more: list[str], text: str, tmp_path: Path) -> None:
    """The worker in slot 2 dies, and each later one in this slot has other names than the survivors.

    It ends before the others stop for it, because it tries to load the commit of its host first.
    """
    script = {"steps": 20, "until": tmp_path / "stop", "fault": ["kill@20:rank=2"], "more": more}
    with Job(tmp_path, "-np", "3", "--min-np", "2", *FAST, **script) as job:
        job.wait_for_event("worker_exited", 2, exit_code=1)
        job.stop_file.touch()
        job.finish(0)
    job.check_survival(faults=1)
    assert {event["slot"] for event in job.events("worker_exited") if event["exit_code"] == 1} == {2}
    assert all(text in event["error"] for event in job.events("worker_exited") if event["exit_code"] == 1)
    assert [event["size"] for event in job.events("world_formed")] == [3, 2]
    assert len(job.log("final")) == 2
    assert job.events("job_finished")[0]["commits_lost"] == 0
