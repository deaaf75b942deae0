"""Hosts of a sharded job are lost in mid-replication and in mid-reshard, and replicas are damaged.

All faults strike one after the other at one job of three hosts. Packets are dropped at a named place until the host has
lost its power, so the fault is there for certain.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticstate.commits import owner_of
from tests.multihost.network import Host, Network, missing
from tests.multihost.test_sharded import QUICK, ShardedJob

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SCRIPT = Path(__file__).parent / "scripts" / "sharded_faults.py"
HELD_BACK = 1_000_000  # bytes that pass before the others of a copy are dropped
BALLAST_MB = 4  # much more of them in each worker's shards
OPTIONS = ("-np", "3", "--min-np", "2", "-H", "a:1,b:1,c:1", *QUICK, "--replicas", "1", "--max-no-progress", "20")


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

    def kept(self, host: str, of: str) -> list[Path]:
        """Return the copies of the commits of slot 0 of another host that a host keeps."""
        job_id = (self.copies(host).parent / "job").read_text().split()[0]
        return sorted(self.copies(host).glob(f"{owner_of(job_id, of, 0).hex()}.*.seal"))

    def wait_for_a_replication(self) -> None:
        """Wait until a commit of the newest world is on two hosts."""
        now = self.events("world_formed")[-1]["generation"]
        names = [name for name, host in self.network.hosts.items() if name != "d" and host.has_power]

        def is_done() -> bool:
            kept = [path.name.split(".")[:3] for host in names for path in self.copies(host).glob("*.seal")]
            whole = [commit for commit in kept if kept.count(commit) > 1 and int(commit[1]) == now]
            return len({owner for owner, *_ in whole}) == len(names)

        self.wait_for(f"replication in generation {now}", is_done, timeout=120)

    def lose(self, victim: str, after: int) -> int:
        """Lose the power of a host. Return the generation of the world of the others."""
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


def copy_port(agent: int) -> int:
    """Return the port of a copy server: the only one at which this agent listens."""
    lines = [line.split() for line in Path(f"/proc/{agent}/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{words[9]}]": int(words[1].partition(":")[2], 16) for words in lines if words[3] == "0A"}
    (port,) = {listening[link] for link in map(os.readlink, Path(f"/proc/{agent}/fd").glob("*")) if link in listening}
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
        job.stop_file.touch()
        job.finish(0, timeout=120)
    job.check_shards()
