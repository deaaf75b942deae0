"""What has happened on a host that a driver has to know which was not there, or was not this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from elasticstate._native import ControlPage
from elasticstate.agent.pulse import newest_commit
from elasticstate.agent.seat import Seat
from elasticstate.commits import CommitDirectory, control_file, owner_of
from elasticstate.core.types import CommitId, WorkerId
from elasticstate.net import messages


class Account:
    """Kept by the agent as it goes on."""

    def __init__(self, commits: CommitDirectory, job_id: str, host: str) -> None:
        self._commits = commits
        self._job_id = job_id
        self._host = host
        self._exits: list[messages.Exited] = []  # since this host was given a world
        self._incarnations: dict[int, int] = {}
        self._gate = 0  # the newest generation whose gate is open
        self._ended = 0  # the newest generation that was ended, not at a tick
        self.held: int | None = None  # the generation that a hold of the driver stops

    def started(self, worker: WorkerId) -> None:
        self._incarnations[worker.slot] = worker.incarnation

    def ended(self, exited: messages.Exited) -> None:
        self._exits.append(exited)

    def has_a_world(self) -> None:
        """What has ended before is history."""
        self._exits.clear()

    def told(self, body: messages.ToWorkerBody) -> None:
        """The driver's words to the workers: holds, and the gate."""
        match body:
            case messages.HoldOrder(generation):
                self.held = generation
            case messages.ReleaseOrder():
                self.held = None
            case messages.EndOrder(generation, at_tick):
                self.held = None
                if at_tick is None:
                    self._ended = max(self._ended, generation)
            case messages.GateOpen(generation):
                self._gate = generation

    def serving(self, seats: Mapping[WorkerId, Seat], now: float) -> messages.Serving:
        """All that a driver has to know, with the workers that live here."""
        return messages.Serving(
            commits=tuple(self._in_memory()),
            workers=tuple(_report(worker, seat, now) for worker, seat in seats.items()),
            exits=tuple(self._exits),
            incarnations=tuple(self._incarnations.items()),
            gate=self._gate,
            ended=self._ended,
        )

    def _in_memory(self) -> Iterator[tuple[int, CommitId]]:
        """By whatever worker: one that boots may not have found yet what the one before it has left."""
        for slot in self._commits.slots():
            with suppress(OSError, ValueError):  # it died as it made the page
                page = ControlPage(control_file(self._commits.prefix(slot)))
                commit = newest_commit(page, owner_of(self._job_id, self._host, slot))
                if commit is not None:
                    yield slot, commit


def _report(worker: WorkerId, seat: Seat, now: float) -> messages.WorkerReport:
    seat.pulse.look(now)
    words = tuple(seat.words) if seat.notice is None else (*seat.words, seat.notice)
    return messages.WorkerReport(worker, seat.process.pid, seat.joined, seat.pulse.latest, words)
