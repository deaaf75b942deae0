"""Agents that dial in: the same command on every host, in any order, at any time."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from forks import PACKAGE, SCRIPTS
from job import Job

from tests.multihost.network import Network, missing
from tests.multihost.test_hosts import QUICK, ends_well, trains_with

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PORT = 7077


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", "c") as network:
        yield network


@contextmanager
def agent(network: Network, name: str, token: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``elasticrun agent`` on a host, as a batch system does."""
    command = ("-m", "elasticstate", "agent", "--join", f"d:{PORT}", "--token-file", str(token), *options)
    process = subprocess.Popen(
        network.python(name, *command),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{PACKAGE}"},
    )
    try:
        yield process
    finally:
        process.kill()
        print(f"agent of host {name}:", process.communicate()[1])


def listening_job(network: Network, tmp_path: Path, token: Path, *more: str, **script: object) -> Job:
    options = ("-np", "3", "--min-np", "1", "--listen", f"0.0.0.0:{PORT}", "--token-file", str(token))
    within = network["d"].storage.enter()
    return Job(tmp_path, *options, *QUICK, *more, within=within, until=tmp_path / "stop", steps=10, **script)


def test_agents_dial_in_before_and_after_the_driver_comes_and_later(network: Network, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("t" * 40)
    with ExitStack() as stack:
        agents = [stack.enter_context(agent(network, "a", token, "--slots", "1"))]  # the driver does not listen yet
        job = stack.enter_context(listening_job(network, tmp_path, token))
        agents.append(stack.enter_context(agent(network, "b", token, "--slots", "1", "--name", "bee")))
        agents.append(stack.enter_context(agent(network, "c", token, "--slots", "1")))
        trains_with(job, 3)
        agents[1].kill()
        job.wait_for_event("agent_lost", host="bee")
        trains_with(job, 2)
        agents[1] = stack.enter_context(agent(network, "b", token, "--slots", "1", "--name", "bee"))
        trains_with(job, 3, count=2)
        ends_well(job)
        assert [process.wait(30) for process in agents] == [0, 0, 0]
    assert "run elasticrun agent --join 10.91.7.1:7077 --token-file" in job.output


def test_a_host_that_is_cut_off_dials_again(network: Network, tmp_path: Path) -> None:
    token = tmp_path / "token"
    with ExitStack() as stack:
        job = stack.enter_context(listening_job(network, tmp_path, token))
        job.wait_for("token file", token.exists)
        assert token.stat().st_mode & 0o777 == 0o600
        for name in "abc":
            stack.enter_context(agent(network, name, token, "--slots", "1"))
        trains_with(job, 3)
        network["b"].cut()
        job.wait_for_event("agent_lost", host="b")
        trains_with(job, 2)
        network["b"].heal()
        trains_with(job, 3, count=2)
        assert len([e for e in job.events("worker_started") if e["host"] == "b"]) == 1, "the same process"
        ends_well(job)


def test_an_agent_with_another_token_is_refused_and_the_job_goes_on(network: Network, tmp_path: Path) -> None:
    token, other = tmp_path / "token", tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text("o" * 40)
    with ExitStack() as stack:
        job = stack.enter_context(listening_job(network, tmp_path, token))
        job.wait_for("token file", token.exists)
        stack.enter_context(agent(network, "a", token, "--slots", "1"))
        stranger = stack.enter_context(agent(network, "b", other, "--slots", "1", "--wait", "5"))
        assert stranger.wait(30) == 1
        assert stranger.stderr is not None
        assert "the peer has the token of another job" in stranger.stderr.read()
        job.wait_for_event("warning")
        trains_with(job, 1)
        ends_well(job)
    assert "refused a connection from 10.91.7.3:" in job.output


def test_two_agents_of_one_name_are_one_too_many(network: Network, tmp_path: Path) -> None:
    token = tmp_path / "token"
    with ExitStack() as stack:
        job = stack.enter_context(listening_job(network, tmp_path, token))
        job.wait_for("token file", token.exists)
        stack.enter_context(agent(network, "a", token, "--slots", "1", "--name", "same"))
        job.wait_for_event("agent_joined", host="same")
        second = stack.enter_context(agent(network, "b", token, "--slots", "1", "--name", "same"))
        assert second.wait(30) == 1
        assert second.stderr is not None
        assert "has another agent" in second.stderr.read()
        trains_with(job, 1)
        ends_well(job)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_to_an_agent_lets_its_host_leave_and_it_may_dial_in_again(
    network: Network, tmp_path: Path, number: signal.Signals
) -> None:
    token = tmp_path / "token"
    with ExitStack() as stack:
        job = stack.enter_context(listening_job(network, tmp_path, token, "--preemption-signals", number.name))
        job.wait_for("token file", token.exists)
        agents = [stack.enter_context(agent(network, name, token, "--slots", "1")) for name in "ab"]
        trains_with(job, 2)
        agents[1].send_signal(number)
        trains_with(job, 1)
        assert agents[1].wait(30) == 0
        assert [event["reason"] for event in job.events("host_draining")] == [f"{number.name} to its agent"]
        assert [event["at"] != "now" for event in job.events("end")] == [True]
        stack.enter_context(agent(network, "b", token, "--slots", "1"))
        trains_with(job, 2, count=2)
        assert job.events("host_cooldown") == [], "it is another agent, and may work at once"
        ends_well(job)
