"""The lines about a failure: the details do not repeat the first line."""

from __future__ import annotations

import pytest

from elasticstate.failures import WorkerFailure


@pytest.mark.parametrize(
    ("reason", "details"),
    [
        ("h:1#2 exited with 3", ["rank 2, generation 5"]),
        ("h:1 ended: exit code 3", ["rank 2, generation 5"]),
        ("no progress: 3 generations failed; first failure: h:1#2 exited with 3", ["rank 2, generation 5"]),
        ("h:1#2 failed with its own error", ["rank 2, generation 5, exit code 3"]),
        ("h:1#2 exited with 33", ["rank 2, generation 5, exit code 3"]),
        ("h:11#1 exited with 3", ["worker h:1, rank 2, generation 5"]),
        ("far-h:1#1 exited with 3", ["worker h:1, rank 2, generation 5"]),
        ("the job failed", ["worker h:1, rank 2, generation 5, exit code 3"]),
    ],
)
def test_the_details_have_only_what_the_first_line_lacks(reason: str, details: list[str]) -> None:
    assert WorkerFailure(reason, "h", 1, 2, 5, exit_code=3).details() == details


@pytest.mark.parametrize("reason", ["h:1#2 was killed by SIGKILL", "h:1 ended: SIGKILL"])
def test_a_signal_is_not_repeated(reason: str) -> None:
    assert WorkerFailure(reason, "h", 1, 2, 5, signal=9).details() == ["rank 2, generation 5"]


def test_a_worker_without_a_world_has_no_generation() -> None:
    assert WorkerFailure("h:1#2 exited with 3", "h", 1, exit_code=3).details() == ["before the first world"]
    reason = "every worker failed before the first world; first failure: h:1#2 exited with 3"
    assert WorkerFailure(reason, "h", 1, exit_code=3).details() == []


def test_a_newcomer_without_a_rank_has_the_generation_of_the_others() -> None:
    assert WorkerFailure("h:1 ended: exit code 3", "h", 1, generation=5).details() == ["no rank yet, generation 5"]


def test_an_error_that_is_the_first_line_is_not_repeated() -> None:
    reason = "h:1#2 could not be started: no such file"
    assert WorkerFailure(reason, error="could not be started: no such file\n").details() == []
    assert WorkerFailure(reason, error="Traceback\nOSError: no such file\n").details() == [
        "Traceback",
        "OSError: no such file",
    ]
