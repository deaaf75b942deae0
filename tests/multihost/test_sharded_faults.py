"""Hosts of a sharded job are lost in mid-replication and in mid-reshard, and replicas are damaged.

All faults strike one after the other at one job of three hosts. Packets are dropped at a named place until the host has
lost its power, so the fault is there for certain.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elasticstate.commits import owner_of
from tests.kit.network import Host, Network, missing
from tests.kit.sharded_job import QUICK, ShardedJob

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SCRIPT = Path(__file__).parent / "scripts" / "sharded_faults.py"
HELD_BACK = 1_000_000  # bytes that pass before the others of a copy are dropped
SILENCE_S = 10.0  # after which a worker reads another copy
HOSTS = ("a", "b", "c")
BALLAST_MB = 4  # much more of them in each worker's shards
OPTIONS = ("-np", "3", "--min-np", "2", "-H", "a:1,b:1,c:1", *QUICK, "--replicas", "2", "--reset-limit", "1000")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", "c") as network:
        yield network


class FaultyJob(ShardedJob):
    """Sharded job whose hosts and copies a test damages."""

    def __init__(self, folder: Path, network: Network, *options: str) -> None:
        self.network = network
        within = tuple(network["d"].storage.enter())
        super().__init__(folder, *options, within=within, pace=0.05)

    def start(self, *arguments: str) -> None:
        script = ["--faults-file", str(self.directory / "faults"), "--ballast", str(BALLAST_MB), "--steps", "1"]
        at = arguments.index(str(Path(__file__).parent / "scripts" / "sharded.py"))
        super().start(*arguments[:at], str(SCRIPT), *arguments[at + 1 :], *script)

    def copies(self, host: str) -> Path:
        """Return the directory of the copies that a host keeps."""
        shm = Path(f"/proc/{self.network[host].storage.pid}/root/dev/shm")
        (found,) = self.wait_for(f"copies on host {host}", lambda: list(shm.glob("elasticstate-*/copies")))
        return Path(found)

    def wait_for_a_replication(self, step: int = 0) -> str:
        """Wait until all hosts keep a commit of all slots, of the newest world. Return its generation and tick.

        ``step``: wait for the commit of this step.
        """
        now = self.events("world_formed")[-1]["generation"]
        first = min(line["step"] for line in self.log("enter") if line["generation"] == now)

        def is_done() -> str:
            kept = [path.name.split(".") for host in HOSTS for path in self.copies(host).glob("*.seal")]
            commits = [f"{generation}.{tick}" for _, generation, tick, _ in kept]
            whole = [commit for commit in commits if commits.count(commit) == len(HOSTS) ** 2]
            wanted = f"{now}.{step - first}" if step else ""
            return next((c for c in whole if (c == wanted if step else c.startswith(f"{now}."))), "")

        return str(self.wait_for(f"replication of step {step} in generation {now}", is_done, timeout=120))

    def pause(self) -> int:
        """Let no other step begin. Return the last one that all workers have committed."""
        (self.logs / "pause").touch()

        def last() -> int:
            steps = [line["step"] for line in self.log("step")]
            paused = {line["rank"] for line in self.log("paused") if line["step"] == max(steps)}
            return max(steps) if len(paused) == len(HOSTS) else 0

        return int(self.wait_for("pause of all workers", last))

    def damage(self, host: str, of: str, commit: str) -> None:
        """Flip a bit of the copy that a host keeps of a commit of slot 0 of another host."""
        job_id = (self.copies(host).parent / "job").read_text().split()[0]
        path = self.copies(host) / f"{owner_of(job_id, of, 0).hex()}.{commit}.safetensors"
        with open(path, "r+b") as file:
            at = path.stat().st_size // 2
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    def lose(self, victim: str, after: int) -> int:
        """Lose the power of a host. Return the generation of the world of the others."""
        if self.network[victim].has_power:
            self.network[victim].power_off()
        for host in self.network.hosts.values():
            if host.has_power:
                host.mend()
        generation = self.trains_with(2, after=after, steps=3)
        self.check_shards()
        return generation

    def come_back(self, host: str, after: int) -> int:
        self.network[host].power_on()
        return self.trains_with(3, after=after, steps=3)


def links_of(pid: int) -> Iterator[str]:
    """Yield what the open descriptors of a process are; connections end at any time."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield os.readlink(descriptor)


def copy_port(agent: int) -> int:
    """Return the port of a copy server: the only one at which this agent listens."""
    lines = [line.split() for line in Path(f"/proc/{agent}/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{words[9]}]": int(words[1].partition(":")[2], 16) for words in lines if words[3] == "0A"}
    (port,) = {listening[link] for link in links_of(agent) if link in listening}
    return port


def hold_back(job: FaultyJob, host: Host, chain: str) -> None:
    """Drop the packets of copies to (INPUT) or from (OUTPUT) a host's copy server after the first bytes."""
    agent = [event["pid"] for event in job.events("agent_joined") if event["host"] == host.name][-1]
    which = ("-p", "tcp", "--dport" if chain == "INPUT" else "--sport", str(copy_port(agent)))
    host.storage.run("iptables", "-A", chain, *which, "-m", "quota", "--quota", str(HELD_BACK), "-j", "ACCEPT")
    host.storage.run("iptables", "-A", chain, *which, "-j", "DROP")


def test_hosts_are_lost_in_mid_replication_and_in_mid_reshard(network: Network, tmp_path: Path) -> None:
    with FaultyJob(tmp_path, network, *OPTIONS) as job:
        generation = job.trains_with(3, steps=3)
        step = job.pause()
        job.damage("b", "a", job.wait_for_a_replication(step))
        network["a"].power_off()
        (job.logs / "pause").unlink()
        generation = job.lose("a", after=generation)
        told = [event["text"] for event in job.events("warning") if "host b has lost its copy of" in event["text"]]
        assert len(told) == 1, job.events("warning")
        assert "slot a:0: it is damaged" in told[0]
        begun = [line["step"] for line in job.log("enter") if line["generation"] == generation]
        assert begun == [step, step], "host c has another copy"
        generation = job.come_back("a", after=generation)

        for victim in ("a", "b"):  # the sender of the copies that b is to keep, then their receiver
            job.wait_for_a_replication()
            before = network["b"].dropped()
            hold_back(job, network["b"], "INPUT")
            job.wait_for("packets of a copy that are dropped", lambda at=before: network["b"].dropped() > at)
            generation = job.lose(victim, after=generation)
            generation = job.come_back(victim, after=generation)
        job.wait_for_a_replication()
        hold_back(job, network["c"], "OUTPUT")
        os.kill(job.pid_of(0, generation), signal.SIGKILL)
        job.wait_for("shards that are held back", lambda: network["c"].dropped() > 0)
        job.lose("c", after=generation)
        cause = "host c, from which the world reads shards, was lost"
        (end,) = [event for event in job.events("end") if cause in event["cause"]]
        after = next(event for event in job.events("world_formed") if event["generation"] > end["generation"])
        assert after["time"] - end["time"] < SILENCE_S / 2, "no worker waits for the silence of the lost host"
        job.stop_file.touch()
        job.finish(0, timeout=120)
    job.check_shards()
