"""``--backend mpi`` on several hosts: only the driver's host runs ``mpirun``. A lost host costs its workers only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.hosts import ends_well, job_on, trains_with
from tests.kit.job import Job
from tests.kit.network import Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", "c") as network:
        yield network


def mpi_job(network: Network, tmp_path: Path) -> Job:
    return job_on(network, tmp_path, "--backend", "mpi", "--regroup-timeout", "30")


def unclean_ends(job: Job) -> list[tuple[str, int | None]]:
    """Return the unclean exits of workers that were in a world."""
    ends = [event for event in job.events("worker_exited") if event["exit_code"] != 0 and event["rank"] is not None]
    return [(event["worker"], event["signal"]) for event in ends]


def test_a_worker_and_then_a_host_are_lost_and_come_back(network: Network, tmp_path: Path) -> None:
    with mpi_job(network, tmp_path) as job:
        trains_with(job, 3)
        assert {line["backend"] for line in job.log("enter")} == {"mpi"}
        os.kill(job.pid_of(1), signal.SIGKILL)
        trains_with(job, 2)
        trains_with(job, 3, count=2)
        network["c"].power_off()
        assert job.wait_for_event("agent_lost")["host"] == "c"
        trains_with(job, 2, count=2)
        network["c"].heal()
        network["c"].power_on()
        trains_with(job, 3, count=3)
        ends_well(job)
        assert unclean_ends(job) == [("b:0#1", signal.SIGKILL), ("c:0#1", None)]


@pytest.mark.long
def test_a_worker_that_mpi_has_lost_is_replaced_when_its_host_is_back(network: Network, tmp_path: Path) -> None:
    """The worker has never ended. Its last messages reach the other workers before its successor joins them."""
    with mpi_job(network, tmp_path) as job:
        trains_with(job, 3)
        network["b"].mute()
        assert job.wait_for_event("agent_lost")["host"] == "b"
        trains_with(job, 2)
        assert network["b"].dropped() > 0
        network["b"].mend()
        trains_with(job, 3, count=2)
        ends_well(job)
        assert unclean_ends(job) == [("b:0#1", None)]
        assert [event["worker"] for event in job.events("worker_ready") if event["generation"] == 2].count("b:0#2") == 1
