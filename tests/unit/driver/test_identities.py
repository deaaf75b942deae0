"""A host that returns, with workers that MPI has reported as dead to all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticstate.core.types import CommitId, Placement, WorkerId, World
from elasticstate.driver.identities import IdentityBroker
from elasticstate.driver.mpirun import Mpirun
from elasticstate.net import messages

DEAD, LIVING = WorkerId("b", 0, 1), WorkerId("b", 1, 1)
MEMBERS = tuple(Placement(WorkerId(host, 0, 1), rank, 0, 1, True, rank, 2) for rank, host in enumerate("ab"))
WORLD = World(1, MEMBERS, 0, (), "")
STAMP = messages.Stamp(messages.Place.TRAIN, 1, 0, None)
HOST_REPORT = messages.HostReport(
    (), tuple(messages.WorkerReport(worker, pid, 1, STAMP, ()) for pid, worker in enumerate((DEAD, LIVING), start=7))
)


class Sent:
    """Agents that record the messages sent to them."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []
        self.is_open = True

    def send(self, host: str, message: Any) -> None:
        self.messages.append((host, message))


def play(directory: Path, scenario: Callable[[IdentityBroker, Sent], None]) -> None:
    """Run a scenario. Process 7 of b has an identity. mpirun is gone, which does not change any decision here."""
    held = directory / "mpi" / "held" / "b"
    held.mkdir(parents=True)
    (held / "7").write_text("{}")

    async def run() -> None:
        agents = Sent()
        identities = IdentityBroker(Mpirun(directory, 1.0), agents, "", 1.0, lambda: (), lambda _: None)  # type: ignore[arg-type]
        scenario(identities, agents)

    asyncio.run(run())


def test_what_its_agent_says_counts_when_they_have_ended_and_in_its_order(tmp_path: Path) -> None:
    ready = messages.FromWorker(LIVING, messages.Gate(1))
    end = messages.Exited(DEAD, 7, None, 9, "")

    def scenario(identities: IdentityBroker, agents: Sent) -> None:
        identities.host_lost("b")
        heartbeat = messages.Stamps(())
        assert identities.heard("a", heartbeat, WORLD) == [heartbeat], "so it is known that not all are out of reach"
        assert identities.heard("b", HOST_REPORT, WORLD) == []
        ((host, stop),) = agents.messages
        assert (host, stop.worker, stop.kill) == ("b", DEAD, True)
        assert identities.heard("b", ready, WORLD) == []
        assert identities.heard("a", heartbeat, WORLD) == [heartbeat]
        first, host_report, last = identities.heard("b", end, WORLD)
        assert (first, last) == (end, ready)
        assert [report.worker for report in host_report.workers] == [LIVING]  # type: ignore[union-attr]
        assert identities.heard("b", ready, WORLD) == [ready]

    play(tmp_path, scenario)


def test_who_was_out_of_reach_with_the_whole_world_is_as_it_was(tmp_path: Path) -> None:
    def scenario(identities: IdentityBroker, agents: Sent) -> None:
        identities.host_lost("b")
        stranger = messages.Stamps(())
        assert identities.heard("c", stranger, WORLD) == [stranger], "it has nobody in that world"
        assert identities.heard("b", HOST_REPORT, WORLD) == [HOST_REPORT]
        identities.host_lost("a")
        assert not agents.messages

    play(tmp_path, scenario)


def test_a_host_that_is_lost_while_it_comes_back_is_lost(tmp_path: Path) -> None:
    def scenario(identities: IdentityBroker, _: Sent) -> None:
        identities.host_lost("b")
        identities.dismiss(())  # another world has been formed
        assert identities.heard("b", HOST_REPORT, None) == []
        identities.host_lost("b")
        assert identities.heard("b", messages.HostReport((), ()), None) == [messages.HostReport((), ())]

    play(tmp_path, scenario)


def test_another_agent_that_has_taken_the_host_meanwhile_is_heard(tmp_path: Path) -> None:
    """The new agent has ended the workers that had to end first. Nobody reports these ends any more."""

    def scenario(identities: IdentityBroker, _: Sent) -> None:
        identities.host_lost("b")
        identities.dismiss(())
        assert identities.heard("b", HOST_REPORT, None) == []
        anew = messages.HostReport(((0, CommitId(1, 1)),), ())
        assert identities.heard("b", anew, None) == [anew]

    play(tmp_path, scenario)
