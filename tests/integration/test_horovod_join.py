"""Horovod's join(): ranks that have run out of batches take part with nothing, whoever of them dies or comes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from job import SCRIPTS, Job

OPTIONS = (
    "-np",
    "3",
    "--min-np",
    "2",
    "--failure-grace",
    "0.5",
    "--join-window",
    "60",
    "--min-interrupt-distance",
    "0.2",
)


def command(log: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "horovod_join.py"), "--log", str(log), *arguments]


def check(job: Job) -> None:
    """All ranks have the same weights after each join of each world, and at the end."""
    finals = job.log("final")
    assert len({line["digest"] for line in finals}) == 1
    joined: dict[tuple[int, int], list[str]] = {}
    for line in job.log("joined"):
        joined.setdefault((line["generation"], line["epoch"]), []).append(line["digest"])
    assert all(len(set(digests)) == 1 for digests in joined.values())
    epochs = {epoch for _, epoch in joined}
    assert epochs == set(range(1, max(epochs) + 1))
    assert max(epochs) >= 6


@pytest.mark.parametrize("whom", ["a joined rank", "a training rank"])
def test_a_death_while_some_have_joined_is_survived_and_a_newcomer_taken_in(tmp_path: Path, whom: str) -> None:
    with Job(tmp_path, *OPTIONS, command=command(tmp_path / "logs", "--kill", whom)) as job:
        job.finish(0)
        (strike,) = job.log("strikes")
        assert job.events("worker_exited")[0]["pid"] == strike["victim"]
        check(job)
        assert [event["size"] for event in job.events("world_formed")][:3] == [3, 2, 3]
        assert {line["size"] for line in job.log("final")} == {3}
