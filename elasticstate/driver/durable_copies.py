"""DurableCopies: decides when a durable copy of the job's state is saved, and by which agent.

One copy at a time: the agent of the root's host saves the newest commit of the root. The next copy begins
``--durable-interval`` after the begin of the last one. After a failure it is tried again, after a growing delay. A
failed, slow or full storage never holds up the job.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from elasticstate.config import Options
from elasticstate.core.membership import Membership
from elasticstate.core.records import Over, Running
from elasticstate.core.types import SlotId, WorkerId
from elasticstate.driver.job_state import JobState
from elasticstate.driver.journal import Journal
from elasticstate.durable.copies import copy_name
from elasticstate.durable.failure import HOST, LOST, NOT_FAILED
from elasticstate.net.messages import DurableFailed, DurableSaved, SaveDurable, ToAgent

_LOOK_INTERVAL_S = 0.25
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0


@dataclass(slots=True)
class _Attempt:
    """An order that the agent of a host has not answered yet."""

    host: str
    folder: str


@dataclass(slots=True)
class _Schedule:
    """Time of the next copy, and the failures before it."""

    due_at: float
    failures: int = 0  # in a row
    warned: set[str] = field(default_factory=set)  # kinds of these failures


class DurableCopies:
    """Durable copies of a job. ``send`` sends a message to the agent of a host."""

    def __init__(
        self, options: Options, state: JobState, journal: Journal, send: Callable[[str, ToAgent], None]
    ) -> None:
        self._options = options
        self._state = state
        self._journal = journal
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._schedule = _Schedule(self._loop.time() + options.durable_interval_s)
        self._attempt: _Attempt | None = None
        self._began_at = 0.0  # of the attempt
        self._last_name = 0  # milliseconds in the name of the last copy
        self._newest_name = ""  # of the newest copy that is complete
        self._answered = asyncio.Event()  # no order waits for an answer
        self._answered.set()

    async def run(self) -> None:
        """Order copies until cancelled."""
        while self._options.durable_dir is not None:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            m = self._state.membership
            if self._attempt is None and self._loop.time() >= self._schedule.due_at and isinstance(m.phase, Running):
                source = _source(m)
                if source is not None:
                    self._order(source)

    async def finish(self, hurry: asyncio.Event) -> None:
        """Save the last commit of the job. ``hurry``: give up when it is set."""
        if self._options.durable_dir is None:
            return
        await self._answered_or(hurry)
        m = self._state.membership
        slot = _newest_retained(m) if isinstance(m.phase, Over) else _source(m)
        if slot is not None and not hurry.is_set():
            self._order(slot)
            await self._answered_or(hurry)

    async def _answered_or(self, hurry: asyncio.Event) -> None:
        """Wait until the agent has answered, or is lost."""
        events = [asyncio.ensure_future(event.wait()) for event in (self._answered, hurry)]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()

    def _order(self, slot: SlotId) -> None:
        world = self._state.membership.world
        self._last_name = max(time.time_ns() // 1_000_000, self._last_name + 1)
        self._began_at = self._loop.time()
        self._attempt = _Attempt(slot.host, copy_name(self._last_name))
        self._answered.clear()
        earlier = (self._newest_name,) if self._newest_name else ()
        size = world.size if world is not None else 0
        saved = self._state.durable.newest
        self._send(slot.host, SaveDurable(self._attempt.folder, slot.slot, size, earlier, saved))

    # -------------------------------------------------------------------------------------------------------- answers

    def saved(self, host: str, message: DurableSaved) -> None:
        """Handle the success of an attempt."""
        if not self._is_answered(host, message.folder):
            return
        figures = self._state.durable
        figures.saved += 1
        figures.newest, figures.newest_at, figures.newest_bytes = message.commit, self._began_at, message.bytes
        figures.trouble = ""
        self._journal.event(
            "durable_copy",
            state="saved",
            host=host,
            folder=message.folder,
            commit=list(message.commit),
            bytes=message.bytes,
            seconds=message.seconds,
            failures=self._schedule.failures,
        )
        self._schedule = _Schedule(max(self._loop.time(), self._began_at + self._options.durable_interval_s))
        self._newest_name = message.folder
        if message.lost:
            figures.failed += 1
            self._report(LOST, f"the storage has lost an earlier copy: {message.lost}", host, message.folder)
        if message.warning:
            self._journal.agent_warning(host, f"--durable-dir: {message.warning}")

    def failed(self, host: str, message: DurableFailed) -> None:
        """Handle the failure of an attempt: try again later."""
        if not self._is_answered(host, message.folder):
            return
        if message.kind in NOT_FAILED:
            self._schedule.due_at = self._loop.time() + min(_FIRST_RETRY_S, self._options.durable_interval_s)
        else:
            self._failed(host, message.folder, message.kind, message.reason)

    def host_lost(self, host: str) -> None:
        """Handle the loss of an agent, which may have an order."""
        if self._attempt is not None and self._attempt.host == host:
            folder, self._attempt = self._attempt.folder, None
            self._answered.set()
            self._failed(host, folder, HOST, "the agent was lost while it saved the copy")

    def _is_answered(self, host: str, folder: str) -> bool:
        if self._attempt != _Attempt(host, folder):
            return False
        self._attempt = None
        self._answered.set()
        return True

    def _failed(self, host: str, folder: str, kind: str, reason: str) -> None:
        schedule, figures = self._schedule, self._state.durable
        schedule.failures += 1
        figures.failed += 1
        figures.trouble = reason
        retry_s = min(_FIRST_RETRY_S * 2 ** (schedule.failures - 1), _LONGEST_RETRY_S, self._options.durable_interval_s)
        schedule.due_at = self._loop.time() + retry_s
        self._report(kind, f"a durable copy could not be saved: {reason}; next attempt in {retry_s:g} s", host, folder)

    def _report(self, kind: str, text: str, host: str, folder: str) -> None:
        """Write the event, and a warning for the first failure of its kind since the last success."""
        figures = self._state.durable
        self._journal.event(
            "durable_copy", state="failed", host=host, folder=folder, kind=kind, reason=text, failures=figures.failed
        )
        if kind not in self._schedule.warned:
            self._schedule.warned.add(kind)
            self._journal.warn(f"--durable-dir {self._options.durable_dir}: host {host}: {text}")


def _source(m: Membership) -> SlotId | None:
    """Return the slot whose commit is saved: the root's if it lives."""
    if m.world is None:
        return None
    for placement in _root_first(m):
        worker = m.workers.get(placement)
        if worker is not None and worker.commit is not None and not worker.gone and worker.joined == m.generation:
            return worker.id.slot_id
    return None


def _root_first(m: Membership) -> Iterator[WorkerId]:
    assert m.world is not None
    yield m.world.members[m.world.root].worker
    yield from (placement.worker for placement in m.world.members)


def _newest_retained(m: Membership) -> SlotId | None:
    """Return the slot with the newest commit in memory, after the end of all workers."""
    held = [
        (slot.retained, slot_id)
        for slot_id, slot in m.slots.items()
        if slot.retained is not None and m.hosts[slot_id.host].agent == "joined"
    ]
    return max(held, key=lambda item: item[0])[1] if held else None
