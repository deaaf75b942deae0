"""The host of elasticrun is lost, and a standby on another host continues the job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.hosts import HEARTBEAT_S, job_on, trains_with
from tests.kit.network import Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", "c", are_machines=True) as network:
        yield network


def test_the_host_of_the_driver_loses_power(network: Network, tmp_path: Path) -> None:
    with job_on(network, tmp_path, "--standbys", "1", "--job-name", "lost") as job:
        trains_with(job, 3)
        job.wait_for("a standby", lambda: any("--standby" in line for h in "abc" for line in network[h].processes()))
        network["d"].power_off()
        job.process.wait()
        job.wait_for_while_gone("a new driver", lambda: job.events("driver_restarted"))
        (restarted,) = job.events("driver_restarted")
        assert (restarted["epoch"], restarted["back"], restarted["lost"]) == (2, ["a", "b", "c"], [])
        step = len(job.log("commit"))
        job.wait_for_while_gone("steps with the new driver", lambda: len(job.log("commit")) > step + 20)
        job.stop_file.touch()
        job.wait_for_while_gone("the end of the job", lambda: job.events("job_finished"))
        job.wait_for_while_gone("the end", lambda: not any(network[h].processes() for h in "abc"))
        commits = sorted(line["time"] for line in job.log("commit"))
        gap = max(b - a for a, b in zip(commits, commits[1:], strict=False))
        print("largest gap", gap, HEARTBEAT_S)
        assert len(job.events("world_formed")) == 1
