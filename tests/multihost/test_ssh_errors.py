"""An error of ssh is reported with its remedy, and ends the job if it is permanent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.job import Job
from tests.kit.network import Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", new_processes=True) as network:
        yield network


def failed_job(network: Network, tmp_path: Path, *options: str) -> str:
    """Run a job that cannot start its only host. Return its output."""
    given = ("-np", "1", "-H", "a:1", "--start-timeout", "2", "--heartbeat-timeout", "1", *options)
    with Job(tmp_path, *given, within=network["d"].storage.enter(), steps=1) as job:
        job.finish(status=1)
        return job.output


def test_a_host_key_that_is_not_known(network: Network, tmp_path: Path) -> None:
    (network.etc / "ssh" / "known_hosts").write_text("")
    said = failed_job(network, tmp_path)
    assert "Host key verification failed" in said
    assert "add the host's key to known_hosts (ssh-keyscan)" in said


def test_host_keys_are_not_checked_if_so_told(network: Network, tmp_path: Path) -> None:
    (network.etc / "ssh" / "known_hosts").write_text("")
    config = network.etc / "ssh" / "ssh_config"
    config.write_text(f"Host *\n  StrictHostKeyChecking no\n{config.read_text() if config.exists() else ''}")
    options = ("-np", "1", "-H", "a:1")
    with Job(tmp_path, *options, within=network["d"].storage.enter(), steps=3) as job:
        job.finish()


def test_a_key_that_is_not_accepted(network: Network, tmp_path: Path) -> None:
    (network.etc / "ssh" / "authorized_keys").write_text("")
    said = failed_job(network, tmp_path)
    assert "Permission denied" in said
    assert "see --ssh-identity-file and ssh-copy-id" in said


def test_a_port_where_nobody_listens(network: Network, tmp_path: Path) -> None:
    said = failed_job(network, tmp_path, "--ssh-port", "2222")
    assert "Connection refused" in said
    assert "no ssh server listens there: see --ssh-port" in said


def test_a_host_that_does_not_answer(network: Network, tmp_path: Path) -> None:
    network["a"].cut()
    said = failed_job(network, tmp_path)
    assert "timed out" in said
    assert "see --heartbeat-timeout" in said


@pytest.mark.parametrize("np", ["1", "2"])
def test_a_rank_on_another_host_cannot_have_the_terminal(network: Network, tmp_path: Path, np: str) -> None:
    options = ("-np", np, "-H", f"a:{np}", "--debug-rank", str(int(np) - 1), "--preload", "off", "true")
    command = network["d"].storage.enter(sys.executable, "-m", "elasticstate", *options)
    done = subprocess.run(command, input="c\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the worker with this rank is on host a, whose agent elasticrun has not started itself" in done.stderr
    assert "ssh -L 5678:localhost:5678 a" in done.stderr


def test_a_name_that_nobody_knows(network: Network, tmp_path: Path) -> None:
    options = ("-np", "1", "-H", "nobody:1", "--start-timeout", "2", "--heartbeat-timeout", "1")
    with Job(tmp_path, *options, within=network["d"].storage.enter(), steps=1) as job:
        job.finish(status=1)
        assert "Could not resolve hostname nobody" in job.output
        assert "this machine cannot resolve the name" in job.output
