"""Parts of a driver: an event loop that does not wait, states after a script, and orders of durable copies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from elasticstate.core.register import FILE, Proposer
from elasticstate.driver.durable import DurableCopies
from elasticstate.driver.job import JobState
from elasticstate.driver.record import Votes
from elasticstate.driver.report import Journal, Report
from elasticstate.net.messages import SaveDurable, ToAgent
from tests.kit.core import WHOLE_JOB, drive
from tests.kit.options import parse_options
from tests.kit.policy import policy_of


class Clock(asyncio.SelectorEventLoop):
    """Event loop whose time passes at once: it jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def votes() -> Votes:
    """Return the votes of a new job whose record is in a file only."""
    return Votes(Proposer.first("driver"), FILE, is_replicated=False)


def state_after(lines: int) -> JobState:
    state = JobState(policy_of(np=2, min_np=1, max_np=2), 0.0)
    script = "\n".join(WHOLE_JOB.strip().splitlines()[:lines])
    state.membership, state.reason = drive(script, np=2, min_np=1, max_np=2)[0], "training"
    return state


OPTIONS = ["-np", "3", "--durable-dir", "/copies", "--durable-interval", "0", "--driver-timeout", "1", "train.py"]


class DurableScene:
    """The part of a driver that orders copies, and the agents' ends of it."""

    def __init__(self, events: Path, script: str, **policy: Any) -> None:
        options = parse_options(OPTIONS)
        self.report = Report("j", str(events), verbose=False)
        self.state = JobState(options.policy(), 0.0)
        self.state.membership, _ = drive(script, durable_dir="/copies", **policy)
        self.orders: list[tuple[str, SaveDurable]] = []
        self.others: list[tuple[str, ToAgent]] = []
        self.sent: list[tuple[str, ToAgent]] = []  # both, in their order
        self.lost: set[str] = set()  # hosts whose agents are lost, which the core does not know yet
        self.copies = DurableCopies(options, self.state, Journal(self.report, self.state), self._sent)
        self._ordered = asyncio.Event()
        self.running = asyncio.ensure_future(self.copies.run())

    def _sent(self, host: str, message: ToAgent) -> bool:
        self.sent.append((host, message))
        if isinstance(message, SaveDurable):
            self.orders.append((host, message))
            self._ordered.set()
        else:
            self.others.append((host, message))
        return host not in self.lost

    async def order(self) -> SaveDurable:
        """Wait for the next order."""
        await asyncio.wait_for(self._ordered.wait(), 30)
        self._ordered.clear()
        return self.orders[-1][1]

    async def close(self) -> None:
        self.running.cancel()
        await self.report.close(60)
