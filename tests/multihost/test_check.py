"""``elasticrun --check`` connects to the named hosts in the same way as a job."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.network import Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b") as network:
        yield network


def check(network: Network, *options: str) -> tuple[int, str]:
    """Run the command. Return its exit status and the part of its output about the hosts."""
    command = network.python("d", "-m", "elasticstate", "--check", "--heartbeat-timeout", "5", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.partition("\nHosts:\n")[2]


def test_hosts_are_reached(network: Network) -> None:
    status, said = check(network, "-H", "a:1,b:1", "--backend", "mpi")
    assert status == 0, said
    for line, host in zip(said.splitlines(), "ab", strict=True):
        assert line.startswith(f"    [X] {host}: elasticstate 0.")


def test_a_host_that_does_not_answer_is_told_of(network: Network) -> None:
    network["b"].cut()
    status, said = check(network, "-H", "a:1,b:1", "--heartbeat-timeout", "2")  # the kernel gives up after 3 s
    assert network["b"].is_cut()
    assert status == 1
    first, second = said.splitlines()
    assert first.startswith("    [X] a: ")
    assert second.startswith("    [ ] b: is unreachable by ssh: ")
    assert "see --heartbeat-timeout" in second


def test_hosts_are_told_whether_they_reach_each_other(network: Network) -> None:
    for host in network.hosts.values():
        host.resolve_only("127.0.1.1 d")
    here, a, b = (network[name].address for name in "dab")
    status, said = check(network, "-H", f"{here}:1,{a}:1,{b}:1")
    assert status == 0, said
    assert said.splitlines()[3:] == ["    [X] Gloo: an all-reduce between these 3 hosts"]

    reject = ("-j", "REJECT", "--reject-with", "tcp-reset")
    for host, other in ((network["a"], b), (network["b"], a)):
        host.storage.run("iptables", "-A", "INPUT", "-p", "tcp", "--syn", "-s", other, *reject)
    status, said = check(network, "-H", f"{here}:1,{a}:1,{b}:1")
    assert status == 1
    assert len(said.splitlines()) == 4, said
    assert f"[ ] Gloo between the hosts: {b}: Gloo of {b} at {b} cannot connect to {a} (rank 1) at {a}, port " in said
    assert "Let TCP connections between the hosts pass to all ports" in said
