"""Jobs on a real cluster of Ray, whose nodes are all on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.hosts import QUICK, trains_with
from tests.kit.job import Job

pytest.importorskip("ray", reason="Ray is not installed")

CLUSTER = Path(__file__).parent / "scripts" / "ray_cluster.py"


class Cluster:
    """A cluster of Ray in a process of its own."""

    def __init__(self, directory: Path) -> None:
        with open(directory / "ray.log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(CLUSTER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.address: str = self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():  # Ray prints other lines, too
            if line.startswith('"'):
                return str(json.loads(line))
        raise AssertionError("the cluster of Ray has ended")

    def call(self, command: str, value: object) -> str:
        assert self.process.stdin is not None
        print(command, value, file=self.process.stdin, flush=True)
        return self._answer()

    def add(self) -> str:
        """Add a node; return the name of the host."""
        self.last = self.call("add", 1)
        return f"ray-{self.last[:12]}"

    def drain(self, node: str) -> None:
        """Start to drain a node, as an autoscaler does that knows of a preemption."""
        command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", self.address]
        command += ["--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        subprocess.run([*command, "--deadline-remaining-seconds", "60"], check=True, capture_output=True, timeout=60)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(
        prefix="ry-"
    ) as directory:  # short: the kernel limits paths of sockets to 107 bytes
        monkeypatch.setenv("RAY_TMPDIR", directory)
        cluster = Cluster(tmp_path)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        try:
            yield cluster
        finally:
            cluster.close()


def test_a_job_survives_the_loss_and_the_drain_of_nodes(cluster: Cluster, tmp_path: Path) -> None:
    hosts = [cluster.add()]
    options = ("-np", "2", "--min-np", "1", "--discovery", "ray", "--discovery-interval", "0.2")
    with Job(tmp_path, *options, *QUICK, until=tmp_path / "stop", steps=5) as job:
        job.wait_for("a request", lambda: cluster.call("requested", "CPU") == "2")
        hosts.append(cluster.add())  # as Ray's autoscaler does
        assert trains_with(job, 2)["hosts"] == 2
        cluster.call("remove", cluster.last)
        lost = job.wait_for_event("agent_lost", host=hosts[1])
        trains_with(job, 1)
        hosts.append(cluster.add())
        trains_with(job, 2, count=2)
        cluster.drain(cluster.last)
        assert trains_with(job, 1, count=2)["left"] == [f"{hosts[2]}:0#1"]
        job.stop_file.touch()
        job.finish()
        job.check_survival()
        ends = ("closed", "reset")  # the kernel resets the connection of a killed process that has not read all
        assert lost["reason"] in [f"is unreachable: the peer has {end} the connection" for end in ends]
        assert {line["host"] for line in job.events("worker_exited") if line["exit_code"]} <= {hosts[1]}
    assert cluster.call("requested", "CPU") == "0", "the cluster may become smaller again"
