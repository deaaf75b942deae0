"""Orders for durable copies: to whom, when again, and what is reported."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from elasticstate.core.ids import CommitId, SlotId
from elasticstate.driver import durable
from elasticstate.durable.stored_copies import (
    ABSENT,
    BUSY,
    FULL,
    HUNG,
    UNCHANGED,
)
from elasticstate.net.messages import DurableFailed, DurablePart, DurableSaved
from tests.kit.core import RUNNING, drive
from tests.kit.driver import DurableScene

COMMITTED = RUNNING + "1.2 heartbeat a:1#1 in=1 ticks=9 commit=1.9"


def test_failures_are_reported_once_for_each_kind_and_retried(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        scene = DurableScene(tmp_path / "events", COMMITTED)
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


def test_an_agent_that_is_lost_before_the_core_knows_is_not_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        scene = DurableScene(tmp_path / "events", COMMITTED)
        scene.lost = {"a"}
        first = await scene.order()
        scene.lost = set()
        second = await scene.order()
        assert second.folder > first.folder
        scene.copies.saved("a", DurableSaved(second.folder, CommitId(1, 9), 1000, 0.5))
        assert (scene.state.durable.saved, scene.state.durable.failed) == (1, 1)
        await scene.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("ends", "reason"), [("", "host a began to save"), (FULL, "the disk is full"), ("world", "no world trains")]
)
def test_a_copy_that_is_long_overdue_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ends: str, reason: str
) -> None:
    monkeypatch.setattr(durable, "_LATE_S", 0.5)

    async def run() -> None:
        scene = DurableScene(tmp_path / "events", COMMITTED)
        copy = await scene.order()
        if ends == FULL:
            scene.copies.failed("a", DurableFailed(copy.folder, FULL, "the disk is full"))
        elif ends:
            scene.copies.failed("a", DurableFailed(copy.folder, UNCHANGED, ""))
            scene.state.membership, _ = drive("2.0 exit a:0#1 signal=9", scene.state.membership)
        said = ""
        while "that was due" not in said:
            await asyncio.sleep(0.05)
            said += capfd.readouterr().err
        assert f"s ago is not saved: {reason}" in said.splitlines()[-1]
        assert "This driver has saved no copy" in said
        await asyncio.sleep(1)
        await scene.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert "that was due" not in capfd.readouterr().err


def test_the_start_of_a_newer_world_holds_all_that_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(durable, "_LATE_S", 0.5)

    async def run() -> None:
        scene = DurableScene(tmp_path / "events", COMMITTED)
        scene.copies.saved("a", DurableSaved((await scene.order()).folder, CommitId(2, 0), 1000, 0.5))
        await scene.order()
        await asyncio.sleep(1.5)
        await scene.close()

    asyncio.run(run())
    assert "that was due" not in capfd.readouterr().err


def test_a_job_without_a_commit_saves_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        scene = DurableScene(tmp_path / "events", RUNNING)
        await scene.copies.finish(asyncio.Event())
        assert scene.orders == []
        await scene.close()

    asyncio.run(run())


def test_the_end_of_a_job_waits_for_its_last_copy_until_it_is_hurried(tmp_path: Path) -> None:
    async def run() -> None:
        scene = DurableScene(tmp_path / "events", COMMITTED)
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


async def answers_at_the_end(scene: DurableScene, hurry: asyncio.Event, *kinds: str) -> None:
    """Answer the orders of the end of a job, the last kind again and again. Kind "": the copy is saved."""
    folder = (await scene.order()).folder
    scene.running.cancel()
    ending = asyncio.ensure_future(scene.copies.finish(hurry))
    scene.copies.saved("a", DurableSaved(folder, CommitId(1, 8), 1000, 0.5))
    left = list(kinds)
    while not ending.done():
        ordering = asyncio.ensure_future(scene.order())
        await asyncio.wait({ending, ordering}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        if not ordering.done():
            ordering.cancel()
            break
        kind = left.pop(0) if len(left) > 1 else left[0]
        if kind == "hurry":
            hurry.set()
        elif kind:
            scene.copies.failed("a", DurableFailed(ordering.result().folder, kind, f"{kind} it is"))
        else:
            scene.copies.saved("a", DurableSaved(ordering.result().folder, CommitId(1, 9), 1000, 0.5))
        await asyncio.sleep(0)
    await asyncio.wait_for(ending, 30)
    assert left == [kinds[-1]]


NEWEST = r"The newest copy, commit-\S+, is \d+ s old and has commit \(1, 8\): a job that resumes begins there"


@pytest.mark.parametrize(
    ("kinds", "warnings"),
    [
        ((ABSENT, BUSY, ""), []),
        ((UNCHANGED,), []),
        ((FULL, FULL, ""), ["could not be saved: full", "not saved yet: full", "was saved .* after 2 failures"]),
        ((ABSENT, BUSY, BUSY, ABSENT), [rf"commit of the job, \(1, 9\), is not saved: absent it is\. {NEWEST}"]),
        ((FULL,), ["could not be saved: full", "is not saved yet: full", rf"is not saved: full it is\. {NEWEST}"]),
        (("hurry",), [rf"is not saved: it took long, and a signal has ended the attempts\. {NEWEST}"]),
    ],
)
def test_the_last_commit_is_tried_again_and_the_end_says_what_is_not_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kinds: tuple[str, ...], warnings: list[str]
) -> None:
    async def run() -> None:
        scene = DurableScene(tmp_path / "events", COMMITTED)
        await answers_at_the_end(scene, asyncio.Event(), *kinds)
        unsaved = CommitId(1, 9) if kinds[-1] in (FULL, ABSENT, "hurry") else None
        assert scene.state.durable.unsaved == unsaved
        await scene.close()

    asyncio.run(run())
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len(warnings), lines
    assert all(re.search(warning, line) for warning, line in zip(warnings, lines, strict=True)), lines
