"""Plans of durable copies of sharded jobs: one commit, each shard digest once, the work spread over the hosts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elasticstate.core.ids import CommitId, SlotId
from elasticstate.core.state import Membership
from elasticstate.driver.durable import (
    CopyPlan,
    Pace,
    plan_copy,
    plan_last,
)
from elasticstate.durable.stored_copies import FULL
from elasticstate.net.messages import (
    CompleteDurable,
    DropDurable,
    DurableFailed,
    DurablePart,
    DurableSaved,
    SaveDurable,
)
from tests.kit.core import DISTINCT, FOUR, HSDP, drive
from tests.kit.driver import DurableScene

NAMES = ("a:0#1", "a:1#1", "b:0#1", "b:1#1")


def beats(at: float, ticks: int, commit: int, previous: int) -> str:
    held = f"in=1 ticks={ticks} commit=1.{commit} previous=1.{previous}"
    return f"{at} " + " + ".join(f"heartbeat {name} {held}" for name in NAMES) + "\n"


def plan(m: Membership, ticks_per_s: float = 0.0, now: float = 3.0, saved: CommitId | None = None) -> CopyPlan:
    found = plan_copy(m, ticks_per_s, now, 0.5, saved)
    assert found is not None
    return found


def test_rare_commits_are_saved_as_they_are_and_once() -> None:
    m, _ = drive(DISTINCT + beats(2.0, 40, 40, 20), **FOUR)
    found = plan(m, ticks_per_s=1.0)
    assert found.first == CommitId(1, 40)
    assert found.total == 4
    assert found.parts == {
        "a": (DurablePart(SlotId("a", 0), 1, 7), DurablePart(SlotId("a", 1), 2, 8)),
        "b": (DurablePart(SlotId("b", 0), 3, 9), DurablePart(SlotId("b", 1), 4, 3)),
    }
    assert plan_copy(m, 1.0, 3.0, 0.5, CommitId(1, 40)) is None


def test_replicas_of_a_mesh_dimension_are_saved_once_and_by_different_hosts() -> None:
    m, _ = drive(HSDP + beats(2.0, 40, 40, 20), **FOUR)
    assert plan(m, ticks_per_s=1.0).parts == {
        "a": (DurablePart(SlotId("a", 0), 1, 7),),
        "b": (DurablePart(SlotId("b", 1), 2, 8),),
    }


def test_frequent_commits_are_saved_at_one_that_is_to_come() -> None:
    m, _ = drive(DISTINCT + beats(2.0, 240, 240, 239), **FOUR)
    found = plan(m, ticks_per_s=100.0, now=2.25)
    assert found.first == CommitId(1, 241 + 75), "0.25 s after the report, and 0.5 s for the orders"
    assert sum(map(len, found.parts.values())) == found.total == 4


def test_a_job_that_has_not_committed_has_nothing_to_save() -> None:
    m, _ = drive(DISTINCT, **FOUR)
    assert plan_copy(m, 0.0, 12.0, 0.5, None) is None
    assert plan_last(m) is None


@pytest.mark.parametrize(("now", "first"), [(8.0, None), (15.0, CommitId(2, 0))])
def test_a_world_that_has_just_begun_may_commit_soon(now: float, first: CommitId | None) -> None:
    m, _ = drive(DISTINCT + beats(2.0, 40, 40, 20) + "3.0 exit b:1#1 signal=9 held=1.40,1.20\n", **FOUR)
    ready = " + ".join(f"ready {name} in=1 ticks=40 commit=1.40 previous=1.20" for name in NAMES[:3])
    m, _ = drive(f"3.1 {ready}\n3.5 attached {NAMES[0]} in=2 digests=20,21,22\n", m)
    assert m.shards.line == CommitId(2, 0)
    found = plan_copy(m, 0.0, now, 0.5, None)
    assert (found.first if found is not None else None) == first


def test_a_world_that_has_not_attached_or_has_lost_a_member_saves_nothing() -> None:
    attached = DISTINCT.splitlines()[:-1]
    m, _ = drive("\n".join(attached) + "\n" + beats(2.0, 40, 40, 20) + "3.0 exit b:1#1 signal=9\n", **FOUR)
    assert plan_copy(m, 1.0, 3.0, 0.5, None) is None
    m, _ = drive("\n".join(attached) + "\n" + beats(2.0, 0, 0, 0), **FOUR)
    assert plan_copy(m, 1.0, 3.0, 0.5, None) is None, "a commit of a slot may have shards"


def test_the_last_copy_is_that_of_the_commit_line_also_from_kept_copies() -> None:
    m, _ = drive(DISTINCT + beats(2.0, 40, 40, 20) + "2.5 kept a b:0 1.40 + kept a b:1 1.40\n", **FOUR)
    m, _ = drive("3.0 agent-lost b exited\n", m)
    found = plan_last(m)
    assert found is not None
    assert found.first == CommitId(1, 40)
    assert {host: [part.slot.host for part in parts] for host, parts in found.parts.items()} == {
        "a": ["a", "a", "b", "b"]
    }


def test_the_pace_is_that_of_the_last_second() -> None:
    m, _ = drive(DISTINCT + beats(2.0, 40, 40, 20), **FOUR)
    pace = Pace()
    pace.look(m, 2.0)
    assert pace.ticks_per_s == 0.0
    m, _ = drive(beats(2.25, 50, 40, 20), m)
    pace.look(m, 2.25)
    m, _ = drive(beats(3.0, 90, 80, 60), m)
    pace.look(m, 3.0)
    assert pace.ticks_per_s == 50.0


def test_one_agent_completes_a_copy_and_the_failure_of_one_part_is_that_of_the_copy(tmp_path: Path) -> None:
    async def run() -> None:
        scene = DurableScene(tmp_path / "events", DISTINCT + beats(2.0, 40, 40, 20), **FOUR)
        copies, figures = scene.copies, scene.state.durable
        folder = (await scene.order()).folder
        assert {host for host, _ in scene.orders} == {"a", "b"}
        copies.saved("a", DurableSaved(folder, CommitId(1, 40), 10, 0.5))
        copies.saved("a", DurableSaved(folder, CommitId(1, 40), 10, 0.5))
        assert not scene.others, "the part of host b is missing"
        copies.saved("b", DurableSaved(folder, CommitId(1, 40), 10, 0.5))
        assert scene.others == [("b", CompleteDurable(folder, CommitId(1, 40), 4, 4))]
        assert figures.saved == 0
        copies.saved("b", DurableSaved(folder, CommitId(1, 40), 1000, 0.5))
        assert (figures.saved, figures.newest, figures.newest_bytes) == (1, (1, 40), 1000)

        figures.newest = None
        folder = (await scene.order()).folder
        copies.failed("b", DurableFailed(folder, FULL, "full"))
        assert scene.others[1:] == [("a", DropDurable(folder))]
        copies.saved("a", DurableSaved(folder, CommitId(1, 40), 10, 0.5))
        assert (figures.saved, figures.failed) == (1, 1)

        folder = (await scene.order()).folder
        copies.host_lost("b")
        assert scene.others[2:] == [("a", DropDurable(folder))]
        assert figures.failed == 2

        folder = (await scene.order()).folder
        copies.saved("a", DurableSaved(folder, CommitId(1, 40), 10, 0.5))
        copies.saved("b", DurableSaved(folder, CommitId(1, 41), 10, 0.5))
        assert figures.trouble == f"its parts are of different commits: {CommitId(1, 40)}, {CommitId(1, 41)}"
        await scene.close()

    asyncio.run(run())


def test_the_other_agents_of_a_copy_stop_if_one_is_lost_as_it_is_ordered(tmp_path: Path) -> None:
    async def run() -> None:
        scene = DurableScene(tmp_path / "events", DISTINCT + beats(2.0, 40, 40, 20), **FOUR)
        scene.lost = {"a"}
        folder = (await scene.order()).folder
        to_b = [message for host, message in scene.sent if host == "b"]
        assert [type(message) for message in to_b] == [SaveDurable, DropDurable]
        scene.lost = {"b"}
        assert (await scene.order()).folder > folder
        assert scene.sent[-1] == ("a", DropDurable(scene.orders[-1][1].folder))
        assert scene.state.durable.failed == 2
        scene.lost = set()
        folder = (await scene.order()).folder
        scene.copies.saved("a", DurableSaved(folder, CommitId(1, 40), 10, 0.5))
        scene.lost = {"b"}
        scene.copies.saved("b", DurableSaved(folder, CommitId(1, 40), 10, 0.5))
        assert scene.state.durable.failed == 3, "nobody is there to complete the copy"
        await scene.close()

    asyncio.run(run())
