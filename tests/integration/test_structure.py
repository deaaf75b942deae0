"""Jobs whose training changes its structure: groups of the optimizer, layers, dtypes, and modes that it toggles."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Hosts, Job

TWO = ("-np", "2", "--min-np", "2")  # no world of the one that is ready first


def job_of(
    folder: Path, what: str, who: str, steps: int = 60, options: tuple[str, ...] = ("-np", "2", "--min-np", "1")
) -> Job:
    folder.mkdir()
    script = [str(SCRIPTS / "structure.py"), str(folder), what, who, str(steps)]
    return Job(folder, *options, command=[sys.executable, *script])


def trained(job: Job) -> str:
    return re.findall(r"trained: (.*)", job.output)[-1]


def undisturbed(tmp_path: Path, what: str) -> str:
    with job_of(tmp_path / "undisturbed", what, "nobody") as job:
        job.finish()
    return trained(job)


def starts(job: Job) -> list[tuple[int, int]]:
    return [(int(size), int(step)) for size, step in re.findall(r"world (\d+) starts at step (\d+)", job.output)]


@pytest.mark.parametrize("what", ["unfreeze", "cast", pytest.param("hook", marks=pytest.mark.long)])
def test_all_workers_resume_from_a_commit_of_a_structure_that_they_have_not_built(tmp_path: Path, what: str) -> None:
    with job_of(tmp_path / "job", what, "all", options=TWO) as job:
        job.finish()
    assert starts(job) == [(2, 0), (2, 0), (2, 20), (2, 20)]
    assert trained(job) == undisturbed(tmp_path, what)


@pytest.mark.parametrize(
    "what", [*(pytest.param(name, marks=pytest.mark.long) for name in ("unfreeze", "cast")), "hook"]
)
def test_a_newcomer_joins_a_job_of_a_structure_that_it_has_not_built(tmp_path: Path, what: str) -> None:
    with job_of(tmp_path / "job", what, "one", 150) as job:
        job.finish()
    found = starts(job)
    assert (1, 20) in found
    assert len([size for size, step in found if size == 2 and step >= 20]) == 2
    assert [e["exit_code"] for e in job.events("worker_exited") if e["exit_code"]] == []


def test_a_survivor_whose_structure_is_ahead_of_the_commit_is_replaced(tmp_path: Path) -> None:
    """Its objects have grown since, and a hook that only lets them grow cannot help it. A new process can load it."""
    with job_of(tmp_path / "job", "hook", "root", options=TWO) as job:
        job.finish()
    assert "this worker is restarted: it cannot go back to its commit" in job.output
    assert starts(job) == [(2, 0), (2, 0), (2, 8), (2, 8)]
    assert trained(job) == undisturbed(tmp_path, "hook")


def test_a_newcomer_that_cannot_take_the_state_stops_nobody(tmp_path: Path) -> None:
    with job_of(tmp_path / "job", "grow", "one", 150) as job:
        job.finish()
    assert "StateMisfitError: commit" in job.output
    assert "state.net and the commit have different parameters: 2.bias, 2.weight" in job.output
    assert starts(job) == [(2, 0), (2, 0), (1, 20)]
    assert len(job.events("world_formed")) == 2


def test_a_commit_that_no_new_process_can_take_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    options = ("-np", "2", "--durable-dir", str(copies))
    with job_of(tmp_path / "job", "grow", "all", options=options) as job:
        job.finish(status=3)
    cause = job.events("root_cause")[0]
    assert "the newest commit does not fit the objects of a new process" in cause["reason"]
    assert "have different parameters: 2.bias, 2.weight" in cause["error"]
    assert "discarded" not in job.output
    assert starts(job) == [(2, 0), (2, 0)]
    with job_of(tmp_path / "next", "hook", "nobody", options=options) as job:  # the commit is whole
        job.finish()
    assert starts(job) == [(2, 20), (2, 20)]


def test_a_job_below_min_np_whose_newcomers_cannot_take_the_state_ends_with_the_reason(tmp_path: Path) -> None:
    with job_of(tmp_path / "job", "grow", "one", options=("-np", "2", "--min-np", "2")) as job:
        job.finish(status=3, timeout=60)
    cause = job.events("root_cause")[0]
    assert "--min-np is 2, and no new process can load the state of the job" in cause["reason"]
    assert "have different parameters: 2.bias, 2.weight" in cause["error"]


def test_newcomers_of_another_host_that_cannot_take_the_state_stop_the_others_once(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1")
    options = ("-np", "1", "--max-np", "4", "--min-interrupt-distance", "0.2", *hosts.options)
    with job_of(tmp_path / "job", "grow", "nobody", 300, options=options) as job:
        job.wait_for("a grown module", lambda: "has grown" in job.output)
        hosts.set("localhost:1", "127.0.0.2:2")
        job.finish(timeout=90)
    assert "slots 127.0.0.2:0, 127.0.0.2:1: no worker is started there any more" in job.output
    assert "have different parameters: 2.bias, 2.weight" in job.output
    assert [size for size, _ in starts(job)] in ([1, 2, 1], [1, 3, 1], [1, 1])
    assert len(job.events("world_formed")) == 3


@pytest.mark.parametrize("what", ["eval", "grad", "toggle", "lightning"])
def test_a_survivor_trains_on_in_the_modes_of_its_last_tick(tmp_path: Path, what: str) -> None:
    results = []
    for who in ("nobody", "one"):
        folder = tmp_path / who
        folder.mkdir()
        command = [sys.executable, str(SCRIPTS / "modes.py"), str(folder), what, who]
        imported = ("lightning.pytorch",) if what == "lightning" else ()
        with Job(folder, "-np", "2", "--min-np", "1", imported=imported, command=command) as job:
            job.finish(timeout=120)
        results.append(trained(job))
        assert (folder / "died").exists() is (who == "one")
    assert results[0] == results[1]
