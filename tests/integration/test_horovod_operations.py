"""Each collective and process set of elasticstate.horovod in real jobs of 2, 3 and 4 ranks, over Gloo and MPI."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Job

SCRIPT = SCRIPTS / "horovod_operation_checks.py"
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(), re.MULTILINE)
OPTIONS = ("-np", "3", "--min-np", "2", "--join-window", "60")


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 2), ("gloo", 3), ("gloo", 4), ("mpi", 3)])
def test_each_operation_on_all_ranks(tmp_path: Path, backend: str, ranks: int) -> None:
    logs = tmp_path / "logs"
    options = ("-np", str(ranks), "--backend", backend)
    with Job(tmp_path, *options, command=[sys.executable, str(SCRIPT), "--log", str(logs)]) as job:
        job.finish(0)
        for rank in range(ranks):
            assert (logs / f"{rank}.txt").read_text().split() == CHECKS


@pytest.mark.parametrize("how", [(), ("--anew",)], ids=["made once", "made anew"])
def test_process_sets_continue_in_each_new_world(tmp_path: Path, how: tuple[str, ...]) -> None:
    """A member of the process set dies, and its rank goes to another worker; later a new worker comes."""
    logs = tmp_path / "logs"
    stop = tmp_path / "stop"
    command = [sys.executable, str(SCRIPTS / "horovod_sets.py"), "--log", str(logs), "--stop", str(stop), *how]
    with Job(tmp_path, *OPTIONS, command=command) as job:
        assert job.wait_for_event("worker_exited", signal=9)["rank"] == 1
        smaller = job.wait_for_event("world_formed", size=2)["generation"]
        whole = job.wait_for_event("world_formed", 2, size=3)["generation"]
        job.wait_for("steps in the last world", lambda: {line["rank"] for line in steps(job, whole)} == {0, 1, 2})
        stop.touch()
        job.finish(0)
        assert steps(job, smaller)
        for line in job.log("step"):
            assert line["of_set"] == (2 if line["rank"] < 2 else None), "the sum of ones over ranks 0 and 1"
            assert line["of_all"] == line["size"]
        assert "HostsUpdatedInterrupt" in {line["error"] for line in job.log("caught")}, "except Exception catches it"


def steps(job: Job, generation: int) -> list[dict[str, int]]:
    return [line for line in job.log("step") if line["generation"] == generation]
