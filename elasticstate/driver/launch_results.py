"""Launch result: the outcome of the job, and the function's result on each rank, for the caller of ``launch()``.

::

    DIRECTORY/options      written by launch(): all that the driver needs to know
    DIRECTORY/call         the function and its arguments, for the workers
    DIRECTORY/0.result     result of rank 0 of the last world; no file: nothing was returned
    DIRECTORY/outcome      written last
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

import msgspec

from elasticstate.core.state import Membership, by_discovery
from elasticstate.core.types import RootCause
from elasticstate.driver.report import Outcome, failure_of
from elasticstate.failures import WorkerFailure
from elasticstate.net import messages
from elasticstate.private import make_file, open_directory, write_file
from elasticstate.threads import in_thread

OUTCOME_FILE = "outcome"


class LaunchOutcome(msgspec.Struct, frozen=True):
    """The outcome, for ``launch()``."""

    status: int  # of elasticrun
    word: str
    ranks: int  # of the last world
    root_cause: WorkerFailure | None
    failures: tuple[WorkerFailure, ...]


def result_name(rank: int) -> str:
    """Return the name of the file with this rank's result."""
    return f"{rank}.result"


def slots_of(m: Membership) -> list[tuple[str, int]]:
    """Return host and slot by rank of the last world; without ``run`` in the order of discovery."""
    if m.world is not None:
        return [(placement.worker.host, placement.worker.slot) for placement in m.world.members]
    order = {host.name: index for index, host in enumerate(by_discovery(m))}
    by_rank = [(slot_id.host, slot_id.slot) for slot_id, slot in m.slots.items() if slot.finished]
    return sorted(by_rank, key=lambda slot_id: (order.get(slot_id[0], len(order)), slot_id))


class LaunchResults:
    """Collects the results. ``send`` requests a part from an agent; ``received`` gets the answer."""

    def __init__(self, directory: str, send: Callable[[str, messages.Fetch], None]) -> None:
        self._directory = directory
        self._send = send
        self._ranks = 0
        self._awaited: dict[str, asyncio.Future[messages.Fetched]] = {}

    def received(self, host: str, part: messages.Fetched) -> None:
        awaited = self._awaited.pop(host, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(part)

    async def fetched(self, outcome: Outcome, m: Membership, patience_s: float) -> Outcome:
        """Fetch all results of a job that has succeeded, from all hosts at once. If that fails, the job has failed.

        ``patience_s``: limit for each part of a result.
        """
        by_rank = slots_of(m)
        self._ranks = len(by_rank)
        if outcome.status != 0:
            return outcome
        hosts: dict[str, list[tuple[int, int]]] = {}
        for rank, (host, slot) in enumerate(by_rank):
            hosts.setdefault(host, []).append((rank, slot))
        try:
            await asyncio.gather(*(self._fetch_from(host, slots, patience_s) for host, slots in hosts.items()))
        except OSError as problem:  # ConnectionError is an OSError
            return Outcome(1, "failed", RootCause(f"could not fetch the results of the workers: {problem}"))
        return outcome

    async def _fetch_from(self, host: str, slots: list[tuple[int, int]], patience_s: float) -> None:
        for rank, slot in slots:
            part = await self._part(host, slot, 0, patience_s)
            if part.size == 0:
                continue
            directory = open_directory(self._directory)
            try:
                fd = make_file(directory, result_name(rank))
            finally:
                os.close(directory)
            with open(fd, "wb") as file:
                while file.tell() < part.size:
                    await in_thread(file.write, part.data)
                    if file.tell() < part.size:
                        part = await self._part(host, slot, file.tell(), patience_s)

    async def _part(self, host: str, slot: int, offset: int, patience_s: float) -> messages.Fetched:
        answer = self._awaited[host] = asyncio.get_running_loop().create_future()
        self._send(host, messages.Fetch(slot, offset))
        await asyncio.wait({answer}, timeout=patience_s)
        if answer.done():
            part: messages.Fetched = answer.result()
            if part.slot == slot and part.offset == offset and (part.data or not part.size):
                return part
        raise ConnectionError(f"host {host} did not send the result of slot {slot}")

    def write(self, outcome: Outcome, failures: Sequence[WorkerFailure]) -> None:
        """Write the outcome, for which ``launch()`` waits. Raises OSError."""
        cause = failure_of(outcome.root_cause) if outcome.root_cause is not None else None
        if cause is not None and cause.host is not None and not any(_same_end(cause, end) for end in failures):
            failures = [*failures, cause]  # the job was over before the driver received this worker's end
        launch_outcome = LaunchOutcome(outcome.status, outcome.word, self._ranks, cause, tuple(failures))
        directory = open_directory(self._directory)
        try:
            write_file(directory, OUTCOME_FILE, msgspec.json.encode(launch_outcome))
        finally:
            os.close(directory)


def _same_end(a: WorkerFailure, b: WorkerFailure) -> bool:
    return (a.host, a.slot, a.generation) == (b.host, b.slot, b.generation)
