"""Orders for durable copies: to whom, when again, and what is reported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from elasticstate.cli import parse_options
from elasticstate.core.types import CommitId, SlotId
from elasticstate.driver.durable_copies import DurableCopies
from elasticstate.driver.job_state import JobState
from elasticstate.driver.journal import Journal
from elasticstate.driver.report import Report
from elasticstate.durable.failure import ABSENT, BUSY, FULL, HUNG
from elasticstate.net.messages import DurableFailed, DurablePart, DurableSaved, SaveDurable, ToAgent
from tests.unit.core.test_membership import RUNNING, drive

COMMITTED = RUNNING + "1.2 heartbeat a:1#1 in=1 ticks=9 commit=1.9"
OPTIONS = ["-np", "3", "--durable-dir", "/copies", "--durable-interval", "0", "train.py"]


class Scene:
    """The part of a driver that orders copies, and the agents' ends of it."""

    def __init__(self, events: Path, script: str, **policy: Any) -> None:
        options = parse_options(OPTIONS)
        self.report = Report("j", str(events), verbose=False)
        self.state = JobState(options.policy(), 0.0)
        self.state.membership, _ = drive(script, durable_dir="/copies", **policy)
        self.orders: list[tuple[str, SaveDurable]] = []
        self.others: list[tuple[str, ToAgent]] = []
        self.copies = DurableCopies(options, self.state, Journal(self.report, self.state), self._sent)
        self._ordered = asyncio.Event()
        self.running = asyncio.ensure_future(self.copies.run())

    def _sent(self, host: str, message: ToAgent) -> None:
        if not isinstance(message, SaveDurable):
            self.others.append((host, message))
            return
        self.orders.append((host, message))
        self._ordered.set()

    async def order(self) -> SaveDurable:
        """Wait for the next order."""
        await asyncio.wait_for(self._ordered.wait(), 30)
        self._ordered.clear()
        return self.orders[-1][1]

    async def close(self) -> None:
        self.running.cancel()
        await self.report.close(60)


def test_failures_are_reported_once_for_each_kind_and_retried(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        scene = Scene(tmp_path / "events", COMMITTED)
        figures = scene.state.durable
        first = await scene.order()
        assert scene.orders == [("a", first)]
        assert first.parts == (DurablePart(SlotId("a", 1), 1, 0),), "the root has no commit"
        assert (first.total, first.world_size, first.saved, first.earlier) == (1, 3, None, ())
        scene.copies.failed("a", DurableFailed("another", FULL, "of an order of the last driver"))
        scene.copies.failed("b", DurableFailed(first.folder, FULL, "of another host"))
        assert figures.failed == 0
        folders = [first.folder]
        for kind in (FULL, FULL, HUNG, BUSY):
            scene.copies.failed("a", DurableFailed(folders[-1], kind, f"{kind} it is"))
            folders.append((await scene.order()).folder)
        scene.copies.host_lost("b")
        scene.copies.host_lost("a")
        folders.append((await scene.order()).folder)
        assert sorted(set(folders)) == folders, "each name is newer than all before it"
        assert (figures.saved, figures.failed) == (0, 4)
        assert figures.trouble == "the agent was lost while it saved the copy"
        scene.copies.saved("a", DurableSaved(folders[-1], CommitId(1, 9), 1000, 0.5))
        assert (figures.saved, figures.newest, figures.newest_bytes, figures.trouble) == (1, (1, 9), 1000, "")
        last = await scene.order()
        assert (last.saved, last.earlier) == (CommitId(1, 9), (folders[-1],))
        scene.copies.saved("a", DurableSaved(last.folder, CommitId(1, 11), 1000, 0.5, lost=f"{folders[-1]} is missing"))
        assert (figures.saved, figures.failed) == (2, 5)
        await scene.close()

    asyncio.run(run())
    lines = capfd.readouterr().err.splitlines()
    kinds = ["full it is", "hung it is", "the agent was lost", "was saved (1.0 kB), after 4 failures", "has lost an"]
    assert len(lines) == len(kinds), lines
    assert all(kind in line for kind, line in zip(kinds, lines, strict=True)), lines
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    copies = [event for event in events if event["event"] == "durable_copy"]
    assert [event.get("kind", "") for event in copies] == ["full", "full", "hung", "host", "", "", "lost"]
    assert copies[4]["commit"] == [1, 9]


def test_a_job_without_a_commit_saves_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        scene = Scene(tmp_path / "events", RUNNING)
        await scene.copies.finish(asyncio.Event())
        assert scene.orders == []
        await scene.close()

    asyncio.run(run())


def test_the_end_of_a_job_waits_for_its_last_copy_until_it_is_hurried(tmp_path: Path) -> None:
    async def run() -> None:
        scene = Scene(tmp_path / "events", COMMITTED)
        folder = (await scene.order()).folder
        hurry = asyncio.Event()
        ending = asyncio.ensure_future(scene.copies.finish(hurry))
        scene.copies.saved("a", DurableSaved(folder, CommitId(1, 9), 1000, 0.5))
        await scene.order()
        assert not ending.done()
        hurry.set()
        await ending
        await scene.close()

    asyncio.run(run())


async def answers_at_the_end(scene: Scene, *kinds: str) -> None:
    """Answer the orders of the end of a job. They must be the only ones."""
    folder = (await scene.order()).folder
    scene.running.cancel()
    ending = asyncio.ensure_future(scene.copies.finish(asyncio.Event()))
    scene.copies.saved("a", DurableSaved(folder, CommitId(1, 9), 1000, 0.5))
    for kind in kinds:
        folder = (await scene.order()).folder
        if kind:
            scene.copies.failed("a", DurableFailed(folder, kind, f"{kind} it is"))
        else:
            scene.copies.saved("a", DurableSaved(folder, CommitId(1, 10), 1000, 0.5))
    await asyncio.wait_for(ending, 30)
    assert len(scene.orders) == 1 + len(kinds)


@pytest.mark.parametrize(
    ("kinds", "warning"),
    [
        ((ABSENT, BUSY, ""), ""),
        ((FULL,), "could not be saved: full it is"),
        ((ABSENT, BUSY, BUSY, ABSENT), "the last commit of the job could not be saved: absent it is"),
    ],
)
def test_the_last_commit_is_tried_again_if_the_attempt_came_too_late(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kinds: tuple[str, ...], warning: str
) -> None:
    async def run() -> None:
        scene = Scene(tmp_path / "events", COMMITTED)
        await answers_at_the_end(scene, *kinds)
        await scene.close()

    asyncio.run(run())
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == (1 if warning else 0), lines
    assert all(warning in line for line in lines), lines
