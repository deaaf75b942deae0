"""The pods of deploy/kubernetes, with their own commands, environment, probes and grace periods, in one job."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit import pods as kubernetes
from tests.kit.forks import PACKAGE, SCRIPTS
from tests.kit.hosts import HEARTBEAT_S, trains_with
from tests.kit.job import Job
from tests.kit.network import Host, Network, missing
from tests.kit.pods import Pod

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
pytest.importorskip("kubernetes", reason="the client of Kubernetes is not installed")
from tests.kit import kubernetes as manifests  # noqa: E402
from tests.kit.kubernetes import ApiServer  # noqa: E402

REASON = missing() or kubernetes.missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

QUICK = {
    "heartbeat_timeout": HEARTBEAT_S,
    "min_interrupt_distance": 0.1,
    "join_window": 5,
    "cooldown_range": "0.2 0.4",
    "discovery_interval": 0.1,
    "orphan_timeout": 20,
}


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "n1", "n2", "n3", "n4", "n5") as network:
        yield network


class Cluster(Job):
    """The job of the manifests, with its pods. It is the driver's pod, as the tests of jobs see it."""

    def __init__(self, network: Network, server: ApiServer, account: dict[str, str], directory: Path) -> None:
        copied = manifests.copy(directory)
        self._documents = manifests.rendered(copied / "mine")
        if not manifests.missing():
            self._documents = manifests.rendered_by_kubectl(copied / "mine")
        self._network, self.server, self._account = network, server, account
        self.pods: dict[str, Pod] = {}
        self._space = directory / "workspace"  # the working directory of all containers
        self._space.mkdir()
        arguments = ["--log", str(directory / "logs"), "--until", str(directory / "stop"), "--steps", "10"]
        (self._space / "train.py").write_text(
            f"import runpy, sys\nsys.argv[1:] = {arguments}\nrunpy.run_path({str(SCRIPTS / 'train.py')!r}, "
            "run_name='__main__')\n"
        )
        self._job = manifests.find(self._documents, "Job", "elastic-driver")
        self.driver = self._pod("elastic-driver", self._job, network["d"])
        super().__init__(directory, command=["unused"])

    def start(self, *_: str) -> None:
        """Start the driver's container, or start it again."""
        for path in (self._space, self.logs):
            path.chmod(0o777)
        self.output_file = self.driver.output
        self.events_file = self._space / "events.jsonl"
        self.process = self.driver.start()

    def _pod(self, name: str, owner: manifests.Manifest, host: Host) -> Pod:
        template = manifests.pod_of(owner)
        assert template is not None
        options = {**QUICK, "events_file": "events.jsonl"} if name == "elastic-driver" else {}
        environment = kubernetes.environment(SCRIPTS, PACKAGE, **options)
        environment |= {"KUBERNETES_SERVICE_HOST": self._network["d"].address}
        environment |= {"KUBERNETES_SERVICE_PORT": str(self.server.port)}
        hosts = self._network.etc / "hosts"
        if name == "elastic-driver":  # the headless Service
            others = [line for line in hosts.read_text().splitlines() if name not in line]
            hosts.write_text("\n".join([*others, f"{host.address} {name}", ""]))
        return Pod(name, template, self._documents, host, self._space, environment, self._account)

    # ------------------------------------------------------------------------------------------- what a controller does

    def run_agent(self, number: int, node: str) -> Pod:
        """Start the pod of this number on a node."""
        name = f"elastic-agents-{number}"
        self.server.put(name, app="elastic-agents", phase="Running")
        pod = self._pod(name, manifests.find(self._documents, "StatefulSet", "elastic-agents"), self._network[node])
        self.pods[name] = pod
        pod.start()
        return pod

    def replace_driver(self, node: str) -> None:
        """Start a new pod for the driver, whose last one is lost with its record."""
        self.kill_driver()
        self.driver = self._pod("elastic-driver", self._job, self._network[node])
        self.start()

    def delete_agent(self, number: int) -> None:
        """Delete a pod: it ends within its grace period."""
        pod = self.pods.pop(f"elastic-agents-{number}")
        self.server.put(pod.name, app="elastic-agents", leaves=True)
        assert pod.terminate(), f"{pod.name} has not ended within its grace period"
        assert pod.process is not None
        assert pod.process.returncode == 0
        self.server.delete(pod.name)

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        super().__exit__(error, *more)
        for pod in self.pods.values():
            pod.kill()
            if error is not None:
                print(f"{pod.name}:\n{pod.output.read_text()[-3000:]}")


@contextmanager
def cluster(network: Network, tmp_path: Path, slow_callbacks_file: Path) -> Iterator[Cluster]:
    """Run a job that has only its driver yet, beside an API server."""
    slow_callbacks_file.chmod(0o666)  # the pods are processes of another user
    listener = kubernetes.listener_on(network["d"])
    tls, authority = kubernetes.certificate(network["d"].address, tmp_path)
    account = {"token": "service-account-token", "ca.crt": authority, "namespace": "training"}
    with ApiServer(listener, tls) as server, Cluster(network, server, account, tmp_path) as job:
        yield job


def test_a_job_in_pods_survives_all_that_kubernetes_does(
    network: Network, tmp_path: Path, slow_callbacks_file: Path
) -> None:
    with cluster(network, tmp_path, slow_callbacks_file) as job:
        server = job.server
        first = job.run_agent(0, "n1")
        second = job.run_agent(1, "n2")
        assert trains_with(job, 2)["hosts"] == 2
        for pod in (job.driver, first, second):
            assert pod.probe("readinessProbe"), pod.name
            assert pod.probe("livenessProbe"), pod.name
        assert server.authorizations == {"bearer service-account-token"}

        job.run_agent(2, "n3")  # kubectl scale --replicas=3
        trains_with(job, 3)
        job.delete_agent(2)  # kubectl scale --replicas=2
        assert trains_with(job, 2, count=2)["left"] == ["elastic-agents-2:0#1"]
        job.wait_for_event("worker_exited", host="elastic-agents-2", exit_code=0)
        assert len(job.events("worker_exited")) == 1
        assert all(event["at"] != "now" for event in job.events("end")), "nothing was lost so far"
        job.run_agent(2, "n4")
        trains_with(job, 3, count=2)
        assert not job.events("host_cooldown")

        network["n2"].cut()  # the node is lost without a FIN, and its pod starts again at another address
        assert network["n2"].is_cut()
        moved = job.run_agent(1, "n5")
        assert moved.host.address != second.host.address
        lost = job.wait_for_event("agent_lost", host=second.name)
        assert "sent no heartbeat" in lost["reason"]
        job.wait_for_event("agent_joined", 2, host=second.name)
        trains_with(job, 3, count=3)
        network["n2"].heal()
        assert second.process is not None
        assert second.process.wait(60) == 1
        assert "has another agent" in second.output.read_text()

        first.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, first.process.pid, os.WSTOPPED | os.WNOWAIT)
        with ThreadPoolExecutor() as pool:
            assert list(pool.map(first.probe, ("livenessProbe", "readinessProbe"))) == [False, False]
        job.wait_for_event("agent_lost", host=first.name)
        first.kill()
        first.start()
        trains_with(job, 3, count=4)
        assert first.probe("readinessProbe")

        generation = job.events("world_formed")[-1]["generation"]
        job.kill_driver()
        assert not job.driver.probe("readinessProbe")
        job.start()
        job.wait_for_event("driver_restarted", back=sorted(job.pods))
        assert job.driver.probe("readinessProbe")
        job.replace_driver("n2")
        job.wait_for_event("driver_restarted", 2, back=sorted(job.pods))
        assert job.driver.probe("readinessProbe")
        evicted = job.run_agent(3, "n3")
        assert trains_with(job, 4)["generation"] == generation + 1, "the world has gone on"
        del job.pods[evicted.name]
        disruption = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        server.put(evicted.name, app="elastic-agents", phase="Running", conditions=[disruption])
        trains_with(job, 3, count=5)
        assert evicted.process is not None
        assert evicted.process.wait(60) == 0
        assert not job.events("host_draining")[1:], "discovery has drained this one, without a signal"

        job.stop_file.touch()
        job.finish()
        job.check_survival()
        assert not any(event["commits_lost"] for event in job.events("training_resumed"))
        assert [pod.process.wait(60) for pod in job.pods.values() if pod.process is not None] == [0, 0, 0]


def test_agents_join_the_new_job_of_a_driver_whose_record_is_lost(
    network: Network, tmp_path: Path, slow_callbacks_file: Path
) -> None:
    with cluster(network, tmp_path, slow_callbacks_file) as job:
        agent = job.run_agent(0, "n1")
        trains_with(job, 1)
        job.replace_driver("n2")
        assert agent.process is not None
        assert agent.process.wait(60) == 1
        assert "this driver has begun a new job" in agent.output.read_text()
        agent.start()
        trains_with(job, 1, count=2)
        job.stop_file.touch()
        job.finish()
        assert agent.process.wait(60) == 0
        assert [event["status"] for event in job.events("job_finished")] == ["succeeded"]
        assert len(job.events("job_started")) == 2
