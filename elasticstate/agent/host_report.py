"""Report of what has happened on a host, for a driver that was disconnected or has just started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elasticstate.agent.host_storage import HostStorage
from elasticstate.agent.liveness import sealed_commits
from elasticstate.agent.plain_stores import PlainStores
from elasticstate.agent.worker_handle import WorkerHandle
from elasticstate.copies.service import HostCopies
from elasticstate.core.types import CommitId, PlainPlace, WorkerId
from elasticstate.net import messages


class HostReporter:
    """Records the events that a host report needs, while the agent runs."""

    def __init__(self, storage: HostStorage, stores: PlainStores, copies: HostCopies) -> None:
        self._storage = storage
        self._stores = stores
        self._copies = copies
        self._exits: list[messages.Exited] = []  # since this host received its last world
        self._incarnations: dict[int, int] = {}
        self._placed = 0  # newest world of plain workers
        self._attached: tuple[tuple[WorkerId, messages.Attached], ...] = ()  # the newest report
        self._gate = 0  # newest generation whose exit gate is open
        self._ended = 0  # newest generation that was ended at once, not at a tick
        self.held: int | None = None  # generation on hold, if any

    def started(self, worker: WorkerId, place: PlainPlace | None) -> None:
        if place is not None and place.generation > self._placed:
            self._placed = place.generation
            self.has_a_world()
        self._incarnations[worker.slot] = worker.incarnation

    def attached(self, worker: WorkerId, message: messages.Attached) -> None:
        self._attached = ((worker, message),)

    def ended(self, exited: messages.Exited) -> None:
        self._exits.append(exited)

    def has_a_world(self) -> None:
        """Forget earlier exits: this host has received a new world."""
        self._exits.clear()

    def sent(self, body: messages.ToWorkerBody) -> None:
        """Record a message of the driver to the workers: holds, ends and the exit gate."""
        match body:
            case messages.Hold(generation):
                self.held = generation
            case messages.Release():
                self.held = None
            case messages.End(generation, at_tick):
                self.held = None
                if at_tick is None:
                    self._ended = max(self._ended, generation)
            case messages.OpenGate(generation):
                self._gate = generation

    def host_report(self, handles: Mapping[WorkerId, WorkerHandle], now: float) -> messages.HostReport:
        """Return the report for a driver, including the workers that live here."""
        found = list(self._in_memory())
        return messages.HostReport(
            commits=tuple((slot, newest) for slot, newest, _ in found),
            workers=tuple(_report(worker, handle, now) for worker, handle in handles.items()),
            exits=tuple(self._exits),
            incarnations=tuple(self._incarnations.items()),
            gate=self._gate,
            ended=self._ended,
            store=self._stores.next_address,
            store_joined=self._stores.joined,
            previous=tuple((slot, previous) for slot, _, previous in found if previous is not None),
            attached=self._attached,
            kept=tuple(self._copies.kept()),
            copies_address=self._copies.address,
        )

    def _in_memory(self) -> Iterator[tuple[int, CommitId, CommitId | None]]:
        """Yield slot and commits, whichever worker wrote them: a booting worker may not have found them yet."""
        for slot, files in sorted(self._storage.slots().items()):
            newest, previous = sealed_commits(files.page, self._storage.owner(slot))
            if newest is not None:
                yield slot, newest, previous


def _report(worker: WorkerId, handle: WorkerHandle, now: float) -> messages.WorkerReport:
    handle.liveness.look(now)
    report = handle.call_report(now) if handle.call_is_known else None
    lasting = tuple(body for body in (*handle.lasting_messages(now), handle.notice, report) if body is not None)
    return messages.WorkerReport(worker, handle.process.pid, handle.joined, handle.liveness.latest, lasting)
