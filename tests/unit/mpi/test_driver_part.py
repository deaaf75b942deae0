"""A host that returns, with workers that MPI has reported as dead to all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elasticstate.backends import DriverServices
from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.core.types import Placement, World
from elasticstate.mpi.driver_part import MpiDriver
from elasticstate.net import messages
from elasticstate.options import Options

DEAD, LIVING = WorkerId("b", 0, 1), WorkerId("b", 1, 1)
MEMBERS = tuple(Placement(WorkerId(host, 0, 1), rank, 0, 1, 0, rank, 2) for rank, host in enumerate("ab"))
WORLD = World(1, MEMBERS, 2, 0, (), "")
STAMP = messages.Stamp(messages.Place.TRAIN, 1, 0, None)
HOST_REPORT = messages.HostReport(
    (), tuple(messages.WorkerReport(worker, pid, 1, STAMP, ()) for pid, worker in enumerate((DEAD, LIVING), start=7))
)
Sent = list[tuple[str, Any]]


def play(directory: Path, scenario: Callable[[MpiDriver, Sent], None]) -> None:
    """Run a scenario. Process 7 of b has an identity. mpirun is gone, which does not change any decision here."""
    held = directory / "mpi" / "held" / "b"
    held.mkdir(parents=True)
    (held / "7").write_text("{}")
    sent: Sent = []
    services = DriverServices(
        options=Options(command=("true",)),
        directory=directory,
        token="",
        is_new_job=False,
        has_other_hosts=lambda: True,
        workers=lambda: (),
        send=lambda host, message: sent.append((host, message)),
        warn=lambda _: None,
    )

    async def run() -> None:
        scenario(MpiDriver(services), sent)

    asyncio.run(run())


def test_messages_of_a_returning_host_wait_for_the_end_of_its_dead_workers(tmp_path: Path) -> None:
    ready = messages.FromWorker(LIVING, messages.Gate(1))
    end = messages.WorkerExited(DEAD, 7, None, 9, "")

    def scenario(backend: MpiDriver, sent: Sent) -> None:
        backend.host_lost("b")
        heartbeat = messages.Stamps(())
        # A message of another host of the world: not all hosts of the world are unreachable.
        assert backend.due_messages("a", heartbeat, WORLD) == (heartbeat,)
        assert backend.due_messages("b", HOST_REPORT, WORLD) == ()
        ((host, stop),) = sent
        assert (host, stop.worker, stop.kill) == ("b", DEAD, True)
        assert backend.due_messages("b", ready, WORLD) == ()
        assert backend.due_messages("a", heartbeat, WORLD) == (heartbeat,)
        first, host_report, last = backend.due_messages("b", end, WORLD)
        assert (first, last) == (end, ready)
        assert isinstance(host_report, messages.HostReport)
        assert [report.worker for report in host_report.workers] == [LIVING]
        assert backend.due_messages("b", ready, WORLD) == (ready,)

    play(tmp_path, scenario)


def test_workers_that_were_unreachable_with_their_whole_world_stay(tmp_path: Path) -> None:
    def scenario(backend: MpiDriver, sent: Sent) -> None:
        backend.host_lost("b")
        stranger = messages.Stamps(())
        assert backend.due_messages("c", stranger, WORLD) == (stranger,), "c has no member of that world"
        assert backend.due_messages("b", HOST_REPORT, WORLD) == (HOST_REPORT,)
        backend.host_lost("a")
        assert not sent

    play(tmp_path, scenario)


def test_a_host_that_is_lost_while_it_returns_is_lost(tmp_path: Path) -> None:
    def scenario(backend: MpiDriver, _: Sent) -> None:
        backend.host_lost("b")
        backend.before_world(())
        assert backend.due_messages("b", HOST_REPORT, None) == ()
        backend.host_lost("b")
        assert backend.due_messages("b", messages.HostReport((), ()), None) == (messages.HostReport((), ()),)

    play(tmp_path, scenario)


def test_a_new_agent_of_a_returning_host_is_not_held_back(tmp_path: Path) -> None:
    """The new agent has ended the workers that had to end first. No agent reports these ends any more."""

    def scenario(backend: MpiDriver, _: Sent) -> None:
        backend.host_lost("b")
        backend.before_world(())
        assert backend.due_messages("b", HOST_REPORT, None) == ()
        anew = messages.HostReport(((0, CommitId(1, 1)),), ())
        assert backend.due_messages("b", anew, None) == (anew,)

    play(tmp_path, scenario)


def test_a_malformed_request_is_refused(tmp_path: Path) -> None:
    """The driver closes the connection of an agent whose message raises DecodeError."""

    def scenario(backend: MpiDriver, _: Sent) -> None:
        with pytest.raises(msgspec.DecodeError):
            backend.request(b"\xff")

    play(tmp_path, scenario)
