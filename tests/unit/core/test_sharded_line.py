"""The commit line of a sharded job: layouts, reachable commits, the hosts that are needed, and the wait for others."""

from __future__ import annotations

import pytest

from elasticstate.core import types as t
from elasticstate.core.diagnostics import waiting_for
from elasticstate.core.sharded import find_line
from elasticstate.core.state import Membership
from tests.kit.core import ATTACHED, DISTINCT, FOUR, HSDP, TWO_HOSTS, drive, ended, kinds, published


def line_of(m: Membership) -> t.CommitId | None:
    found = find_line(m)
    return None if found is None else found[0]


def reason_of(effects: list[t.Effect]) -> str:
    cause = ended(effects).root_cause
    assert cause is not None
    return cause.reason


def test_a_job_is_sharded_when_all_members_have_attached() -> None:
    m, _ = drive(TWO_HOSTS, **FOUR)
    for report in ("b:1#1 in=2 digests=7,8,7,8", "b:1#2 in=1 digests=7,8,7,8", "b:1#1 in=1 digests=7,8"):
        m, _ = drive(f"1.1 attached {report}", m)
        assert not m.shards.layouts, "a report counts for its generation, from a member of it"
    m, _ = drive("1.3 exit b:1#1 signal=9 held=1.0 + attached b:1#1 in=1 digests=7,8,7,8", m)
    assert [layout.generation for layout in m.shards.layouts] == [1], "a late report of a dead member counts"
    assert line_of(m) == t.CommitId(1, 0)
    again, _ = drive("1.4 attached a:0#1 in=1 digests=7,8,7,8", m)
    assert again.shards == m.shards


def test_the_report_of_one_agent_is_enough_and_the_others_may_have_died_before_theirs() -> None:
    m, _ = drive(TWO_HOSTS + "1.1 agent-lost b exited\n1.2 attached a:1#1 in=1 digests=7,8,9,3", **FOUR)
    assert line_of(m) is None, "host b is away"
    ready = " + ".join(f"ready {name} in=1 commit=1.0" for name in ("a:0#1", "a:1#1"))
    m, effects = drive(f"2.1 {ready}", m)
    assert "World" not in kinds(effects)
    assert "host b has shards of b:0 of commit (1, 0)" in waiting_for(m, 2.2)
    _, effects = drive("3.0 agent-joined b 0=1.0 1=1.0", m)
    assert published(effects).line == t.CommitId(1, 0)


def test_the_only_report_of_an_ended_world_counts_when_it_comes_with_its_host() -> None:
    """Meanwhile the older line has lost a shard for good."""
    began = ATTACHED.format(7) + "1.2 first a:0#1 in=1\n2.0 exit b:0#1 signal=9 held=1.0"
    m, _ = drive(began, np=3, min_np=1, max_np=3, replicas=0)
    m, effects = drive("2.1 ready a:0#1 in=1 commit=1.0 + ready c:0#1 in=1 commit=1.0", m)
    assert [p.worker.host for p in published(effects).members] == ["a", "c"]
    m, _ = drive("2.2 agent-unreachable c silent", m)
    m, effects = drive("2.3 ready a:0#1 in=2 commit=2.0 previous=1.0", m)
    assert published(effects).line == t.CommitId(1, 0), "nobody has told that all have attached"
    m, _ = drive("2.4 agent-lost b exited\n2.5 agent-joined c 0=2.0,1.0 + attached c:0#1 in=2 digests=5,6", m)
    assert line_of(m) == t.CommitId(2, 0)
    m, effects = drive("2.6 agent-joined b\n2.7 ready a:0#1 in=3 commit=2.0 previous=1.0", m)
    assert published(effects).line == t.CommitId(2, 0)
    assert [source.copy.host for source in published(effects).sources] == ["a", "c"]


def test_a_damaged_commit_counts_as_not_held_whatever_later_reports_say() -> None:
    names = ("a:0#1", "a:1#1", "b:0#1")
    beats = " + ".join(f"heartbeat {name} in=1 ticks=4 commit=1.4 previous=1.3" for name in names)
    m, _ = drive(f"{DISTINCT}2.0 exit b:1#1 signal=9 held=1.4,1.3 + {beats}", **FOUR)
    assert line_of(m) == t.CommitId(1, 4)
    m, effects = drive("2.1 damaged b:1 1.4", m)
    assert line_of(m) == t.CommitId(1, 3)
    (warning,) = [effect for effect in effects if isinstance(effect, t.Note)]
    assert "commit (1, 4) in the memory of slot b:1 is damaged" in str(warning)
    for later in ("damaged b:1 1.4", "agent-lost b exited\n2.3 agent-joined b 0=1.4,1.3 1=1.4,1.3"):
        m, effects = drive(f"2.2 {later}", m)
        assert line_of(m) == t.CommitId(1, 3)
    m, _ = drive("2.4 kept a b:1 1.4", m)
    assert line_of(m) == t.CommitId(1, 4), "a kept copy is another copy"
    m, _ = drive("2.5 dropped a b:1 1.4 it is damaged + damaged b:1 1.3", m)
    assert line_of(m) is None


def test_replicas_of_a_mesh_dimension_make_a_commit_whole_that_not_all_have_sealed() -> None:
    held = {"a": "commit=1.4 previous=1.3", "b": "commit=1.3 previous=1.2"}
    names = ("a:0#1", "a:1#1", "b:0#1", "b:1#1")
    beats = "2.0 " + " + ".join(f"heartbeat {name} in=1 ticks=4 {held[name[0]]}" for name in names)
    m, _ = drive(HSDP + beats, **FOUR)
    assert line_of(m) == t.CommitId(1, 4)
    m, _ = drive("2.1 agent-lost b exited", m)
    assert line_of(m) == t.CommitId(1, 4), "host a has all shards"
    m, _ = drive(DISTINCT + beats, **FOUR)
    assert line_of(m) == t.CommitId(1, 3)
    m, _ = drive("2.1 agent-lost b exited", m)
    assert line_of(m) is None


def test_a_generation_in_which_not_all_have_attached_has_no_commits() -> None:
    m, _ = drive(DISTINCT + "2.0 exit b:1#1 signal=9 held=1.4,1.3 + exit b:0#1 signal=9 held=1.4,1.3", **FOUR)
    m, effects = drive("2.1 ready a:0#1 in=1 commit=1.4 previous=1.3 + ready a:1#1 in=1 commit=1.4 previous=1.3", m)
    world = published(effects)
    assert (world.line, world.lacking, world.near) == (t.CommitId(1, 4), (), ())
    m, _ = drive("2.2 failure a:0#1 in=2", m)
    m, effects = drive("2.3 ready a:0#1 in=2 commit=2.0 previous=1.4 + ready a:1#1 in=2 commit=1.4 previous=1.3", m)
    assert published(effects).line == t.CommitId(1, 4)


def test_sources_name_own_buffers_first_and_kept_copies_after_them() -> None:
    m, _ = drive(DISTINCT + "2.0 kept a b:0 1.0 + kept a a:0 1.0 + kept z a:0 1.0", **FOUR)
    found = find_line(m)
    assert found is not None
    copies = [(source.digest, source.copy.host, str(source.copy.slot)) for source in found[1]]
    expected = [(7, "a", "a:0"), (7, "a", "a:0"), (8, "a", "a:1"), (9, "b", "b:0"), (9, "a", "b:0"), (3, "b", "b:1")]
    assert copies == expected


def test_the_job_waits_for_the_exit_report_of_a_killed_worker() -> None:
    m, effects = drive(DISTINCT + "2.0 unresponsive b:1#1", **FOUR)
    ready = " + ".join(f"ready {name} in=1 commit=1.4 previous=1.3" for name in ("a:0#1", "a:1#1", "b:0#1"))
    m, effects = drive(f"2.1 {ready}", m)
    assert "World" not in kinds(effects), "its last report says (1, 0)"
    m, effects = drive("2.2 exit b:1#1 signal=9 held=1.4,1.3", m)
    assert published(effects).line == t.CommitId(1, 4)


def test_the_job_waits_for_hosts_with_missing_shards_and_names_them() -> None:
    m, _ = drive(DISTINCT + "2.0 agent-lost b exited", **FOUR)
    ready = " + ".join(f"ready {name} in=1 commit=1.4 previous=1.3" for name in ("a:0#1", "a:1#1"))
    m, effects = drive(f"2.1 {ready}", m)
    assert "World" not in kinds(effects)
    assert "host b has shards of b:0 of commit (1, 4)" in waiting_for(m, 2.2)
    _, effects = drive("3.0 agent-joined b 0=1.4,1.3 1=1.4,1.3", m)
    assert published(effects).line == t.CommitId(1, 4)
    _, effects = drive("62.2 time", m)
    assert "host b with shards of commit (1, 4) (b:0, b:1)" in reason_of(effects)
    _, effects = drive("3.0 agent-joined b", m)
    assert "StateLostError" in reason_of(effects), "the host is back without them, so the wait is over"


@pytest.mark.parametrize("first_tick", [False, True])
def test_the_loss_of_a_host_with_shards_ends_a_world_that_may_be_reading_them(first_tick: bool) -> None:
    """The kept copy on host c is the only one of a slot whose host was lost before."""
    m, _ = drive("0.0 hosts a:1 b:1 c:0\n0.1 agent-joined a + agent-joined b", np=2, min_np=1, max_np=2, replicas=0)
    m, _ = drive("0.2 hosts a:1 b:1 c:1\n0.3 agent-joined c\n1.0 ready a:0#1 + ready b:0#1", m)
    m, _ = drive("1.1 attached a:0#1 in=1 digests=7,8\n1.2 first a:0#1 in=1\n1.3 kept c b:0 1.0", m)
    m, _ = drive("2.0 agent-lost b exited", m)
    m, effects = drive("2.1 ready a:0#1 in=1 commit=1.0", m)
    assert [source.copy.host for source in published(effects).sources] == ["a", "c"]
    m, _ = drive("2.2 first a:0#1 in=2" if first_tick else "2.2 time", m)
    _, effects = drive("2.3 agent-lost c exited", m)
    ends = [effect for effect in effects if isinstance(effect, t.End)]
    assert bool(ends) != first_tick
    if ends:
        assert ends[0].cause == "host c, from which the world reads shards, was lost: its agent exited"


@pytest.mark.parametrize("first_tick", [False, True])
def test_a_host_that_leaves_keeps_its_agent_until_the_first_tick(first_tick: bool) -> None:
    m, _ = drive(DISTINCT + "2.0 hosts a:2\n2.1 failure a:0#1 in=1", **FOUR)
    names = ("a:0#1", "a:1#1", "b:0#1", "b:1#1")
    m, effects = drive("2.2 " + " + ".join(f"ready {name} in=1 commit=1.4 previous=1.3" for name in names), m)
    assert {p.worker.host for p in published(effects).members} == {"a"}
    assert "Leave" in kinds(effects)
    m, effects = drive("2.3 exit b:0#1 code=0 held=1.4,1.3 + exit b:1#1 code=0 held=1.4,1.3", m)
    assert "StopAgent" not in kinds(effects)
    m, effects = drive("2.4 first a:0#1 in=2" if first_tick else "2.4 failure a:0#1 in=2", m)
    assert ("StopAgent" in kinds(effects)) == first_tick
