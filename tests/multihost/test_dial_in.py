"""Agents that dial in: the same command on every host, in any order, at any time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.hosts import PORT, QUICK, agent, ends_well, trains_with
from tests.kit.job import Job
from tests.kit.network import Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", "c") as network:
        yield network


def listening_job(network: Network, tmp_path: Path, token: Path, *more: str, **script: object) -> Job:
    options = ("-np", "3", "--min-np", "1", "--listen", f"0.0.0.0:{PORT}", "--token-file", str(token))
    within = network["d"].storage.enter()
    return Job(tmp_path, *options, *QUICK, *more, within=within, until=tmp_path / "stop", steps=10, **script)


def refused(stack: ExitStack, network: Network, token: Path, *options: str) -> str:
    """Start an agent on host c that is refused. Return its error output."""
    process = stack.enter_context(agent(network, "c", token, "--slots", "1", *options))
    assert process.wait(30) == 1
    assert process.stderr is not None
    return process.stderr.read()


def test_agents_dial_in_before_and_after_the_driver_comes_and_when_they_were_lost(
    network: Network, tmp_path: Path
) -> None:
    token, other = tmp_path / "token", tmp_path / "other"
    for path in (token, other):
        path.touch(mode=0o600)
        path.write_text(path.name[0] * 40)
    with ExitStack() as stack:
        agents = [stack.enter_context(agent(network, "a", token, "--slots", "1"))]  # the driver does not listen yet
        job = stack.enter_context(listening_job(network, tmp_path, token))
        agents.append(stack.enter_context(agent(network, "b", token, "--slots", "1", "--name", "bee")))
        job.wait_for_event("agent_joined", host="bee")

        assert "the peer has the token of another job" in refused(stack, network, other, "--wait", "5")
        job.wait_for_event("warning")
        refusal = f"refused a connection from {network['c'].address}:"
        job.wait_for("a line about the refusal", lambda: refusal in job.output)
        assert "has another agent" in refused(stack, network, token, "--name", "bee"), "two of one name"

        agents.append(stack.enter_context(agent(network, "c", token, "--slots", "1")))
        trains_with(job, 3)
        before = len([world for world in job.events("world_formed") if world["size"] == 2])
        agents[1].kill()
        job.wait_for_event("agent_lost", host="bee")
        trains_with(job, 2, count=before + 1)
        agents[1] = stack.enter_context(agent(network, "b", token, "--slots", "1", "--name", "bee"))
        trains_with(job, 3, count=2)

        network["c"].cut()
        job.wait_for_event("agent_lost", host="c")
        trains_with(job, 2, count=before + 2)
        network["c"].heal()
        trains_with(job, 3, count=3)
        assert len([e for e in job.events("worker_started") if e["host"] == "c"]) == 1, "the same process"
        ends_well(job)
        assert [process.wait(30) for process in agents] == [0, 0, 0]
    assert f"run elasticrun agent --join {network['d'].address}:{PORT} --token-file" in job.output


def test_a_signal_to_an_agent_lets_its_host_leave_and_it_may_dial_in_again(network: Network, tmp_path: Path) -> None:
    token, signals = tmp_path / "token", (signal.SIGTERM, signal.SIGUSR2)
    with ExitStack() as stack:
        names = ",".join(number.name for number in signals)
        job = stack.enter_context(listening_job(network, tmp_path, token, "-np", "2", "--preemption-signals", names))
        job.wait_for("token file", token.exists)
        assert token.stat().st_mode & 0o777 == 0o600
        staying, leaving = [stack.enter_context(agent(network, name, token, "--slots", "1")) for name in "ab"]
        trains_with(job, 2)
        for count, number in enumerate(signals, 1):
            leaving.send_signal(number)
            trains_with(job, 1, count=count)
            assert leaving.wait(30) == 0
            leaving = stack.enter_context(agent(network, "b", token, "--slots", "1"))
            trains_with(job, 2, count=count + 1)
        assert [e["reason"] for e in job.events("host_draining")] == [
            f"{number.name} to its agent" for number in signals
        ]
        assert all(event["at"] != "now" for event in job.events("end"))
        assert job.events("host_cooldown") == [], "it is another agent, and may work at once"
        ends_well(job)
        assert [process.wait(30) for process in (staying, leaving)] == [0, 0]
