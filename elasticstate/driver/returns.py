"""What ``launch()`` gets back: how the job has ended, and what its function has returned on each rank.

::

    DIRECTORY/options      written by launch(), with all that the driver has to know
    DIRECTORY/call         the function and its arguments, for the workers
    DIRECTORY/0.result     what rank 0 of the last world has returned; no file: nothing
    DIRECTORY/outcome      written last
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from elasticstate.core.records import Membership, by_discovery
from elasticstate.core.types import RootCause
from elasticstate.driver.report import Outcome, failure_of
from elasticstate.failures import WorkerFailure
from elasticstate.net import messages

OUTCOME_FILE = "outcome"


class Told(msgspec.Struct, frozen=True):
    """The outcome, for ``launch()``."""

    status: int  # of elasticrun
    word: str
    ranks: int  # of the last world
    root_cause: WorkerFailure | None
    failures: tuple[WorkerFailure, ...]


def result_file(directory: str, rank: int) -> Path:
    return Path(directory, f"{rank}.result")


def seats_of(m: Membership) -> list[tuple[str, int]]:
    """Host and slot by rank of the last world; of commands and functions without ``run``, as hosts were discovered."""
    if m.world is not None:
        return [(placement.worker.host, placement.worker.slot) for placement in m.world.members]
    order = {host.name: index for index, host in enumerate(by_discovery(m))}
    seats = [(seat.host, seat.slot) for seat, slot in m.slots.items() if slot.finished]
    return sorted(seats, key=lambda seat: (order.get(seat[0], len(order)), seat))


class Returns:
    """``send`` asks an agent; ``heard`` gets what it answers."""

    def __init__(self, directory: str, send: Callable[[str, messages.Fetch], None]) -> None:
        self._directory = directory
        self._send = send
        self._ranks = 0
        self._awaited: dict[str, asyncio.Future[messages.Fetched]] = {}

    def heard(self, host: str, part: messages.Fetched) -> None:
        awaited = self._awaited.pop(host, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(part)

    async def fetched(self, outcome: Outcome, m: Membership, patience_s: float) -> Outcome:
        """Of a job that has succeeded, get all that was returned, from all hosts at once; without it the job has
        failed. ``patience_s``: for a part of it to come."""
        seats = seats_of(m)
        self._ranks = len(seats)
        if outcome.status != 0:
            return outcome
        hosts: dict[str, list[tuple[int, int]]] = {}
        for rank, (host, slot) in enumerate(seats):
            hosts.setdefault(host, []).append((rank, slot))
        try:
            await asyncio.gather(*(self._fetch_from(host, slots, patience_s) for host, slots in hosts.items()))
        except OSError as problem:  # a lost connection is one, too
            return Outcome(1, "failed", RootCause(f"the results of the workers could not be fetched: {problem}"))
        return outcome

    async def _fetch_from(self, host: str, slots: list[tuple[int, int]], patience_s: float) -> None:
        for rank, slot in slots:
            part = await self._part(host, slot, 0, patience_s)
            if part.size == 0:
                continue
            with open(result_file(self._directory, rank), "wb") as file:
                while file.tell() < part.size:
                    file.write(part.data)
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
        raise ConnectionError(f"what slot {slot} of host {host} has returned was lost with the host")

    def write(self, outcome: Outcome, failures: Sequence[WorkerFailure]) -> None:
        """The last that ``launch()`` waits for. Raises OSError."""
        cause = failure_of(outcome.root_cause) if outcome.root_cause is not None else None
        if cause is not None and cause.host is not None and not any(_same_end(cause, end) for end in failures):
            failures = [*failures, cause]  # the job was over before its process was
        told = Told(outcome.status, outcome.word, self._ranks, cause, tuple(failures))
        fresh = Path(self._directory, OUTCOME_FILE + ".new")
        fresh.write_bytes(msgspec.json.encode(told))
        os.replace(fresh, Path(self._directory, OUTCOME_FILE))


def _same_end(a: WorkerFailure, b: WorkerFailure) -> bool:
    return (a.host, a.slot, a.generation) == (b.host, b.slot, b.generation)
