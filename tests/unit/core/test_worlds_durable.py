"""A world in which no worker holds a commit starts from a durable copy, if the job has a place for them."""

from __future__ import annotations

from elasticstate.core import types as t
from tests.kit.core import DISTINCT, FOUR, drive, ended, published

NAMES = ("a:0#1", "a:1#1", "b:0#1", "b:1#1")

FIRST = "0.0 hosts a:1\n0.1 agent-joined a\n1.0 ready a:0#1"
LOST = """
1.1 first a:0#1 in=1
1.2 heartbeat a:0#1 in=1 ticks=3 commit=1.3
2.0 exit a:0#1 signal=9
9.0 ready a:0#2
"""
ONE = {"np": 1, "min_np": 1, "max_np": 1}


def test_the_first_world_may_start_from_a_copy() -> None:
    _, effects = drive(FIRST, **ONE, durable_dir="/copies", durable_timeout_s=7.0)
    assert published(effects).durable == t.DurableSource("/copies", 7.0, is_required=False)
    _, effects = drive(FIRST, **ONE)
    assert published(effects).durable is None


def test_a_job_that_has_lost_all_commits_needs_a_copy() -> None:
    m, _ = drive(FIRST, **ONE, durable_dir="/copies")
    _, effects = drive(LOST, m)
    assert published(effects).durable == t.DurableSource("/copies", m.policy.durable_timeout_s, is_required=True)
    warnings = [effect.get("text") for effect in effects if isinstance(effect, t.Note) and effect.event == "warning"]
    assert warnings == [
        "no host holds a commit any more; the newest commit was (1, 3), on a; the job resumes from the newest durable "
        "copy"
    ]


def test_a_job_without_a_place_for_copies_is_lost() -> None:
    m, _ = drive(FIRST, **ONE)
    _, effects = drive(LOST, m)
    cause = ended(effects).root_cause
    assert cause is not None
    assert "StateLostError" in cause.reason


def test_a_world_with_a_commit_reads_no_copy() -> None:
    m, _ = drive(FIRST, **ONE, durable_dir="/copies")
    _, effects = drive(LOST.replace("ready a:0#2", "ready a:0#2 commit=1.3"), m)
    assert published(effects).durable is None


# ----------------------------------------------------------------------------------------------------- sharded jobs

COMMITTED = DISTINCT + (
    "2.0 "
    + " + ".join(f"heartbeat {name} in=1 ticks=40 commit=1.40 previous=1.39" for name in NAMES)
    + "\n2.1 saved 1.30\n"
)
HOST_LOST = """
3.0 agent-lost b exited
3.1 ready a:0#1 in=1 commit=1.40 previous=1.39 ticks=40 + ready a:1#1 in=1 commit=1.40 previous=1.39 ticks=40
"""


def world_of(effects: list[t.Effect]) -> list[t.World]:
    return [effect for effect in effects if isinstance(effect, t.World)]


def test_an_unreachable_line_is_awaited_then_a_copy_decides() -> None:
    m, _ = drive(COMMITTED, **FOUR, durable_dir="/copies", regroup_timeout_s=30.0)
    m, _ = drive(HOST_LOST + "32.9 time", m)
    assert m.generation == 1, "the host may return"
    m, effects = drive("33.2 time", m)
    (world,) = world_of(effects)
    assert world.durable == t.DurableSource("/copies", m.policy.durable_timeout_s, is_required=True, is_sharded=True)
    assert (world.line, world.sources, world.lacking, world.near) == (None, (), (), ())
    (text,) = [effect.get("text") for effect in effects if isinstance(effect, t.Note) and effect.event == "warning"]
    assert "host b with shards of commit 1.40 (b:0, b:1)" in text.replace("(1, 40)", "1.40")
    assert text.endswith("the job resumes from the newest durable copy")
    m, effects = drive("33.3 first a:0#1 in=2 + first a:1#1 in=2", m)
    (resumed,) = [effect for effect in effects if isinstance(effect, t.Note) and effect.event == "training_resumed"]
    assert resumed.get("ticks_lost") == 10
    assert "ticks_lost" in resumed.get("lower_bounds"), "the newest copy may be damaged"


def test_without_a_place_for_copies_the_error_names_the_host() -> None:
    m, _ = drive(COMMITTED, **FOUR, regroup_timeout_s=30.0)
    _, effects = drive(HOST_LOST + "33.2 time", m)
    cause = ended(effects).root_cause
    assert cause is not None
    assert "StateLostError" in cause.reason
    assert "host b" in cause.reason


def test_a_line_that_is_back_in_time_needs_no_copy() -> None:
    m, _ = drive(COMMITTED, **FOUR, durable_dir="/copies", regroup_timeout_s=30.0)
    m, _ = drive(HOST_LOST + "9.0 agent-joined b 0=1.40,1.39 1=1.40,1.39", m)
    assert m.world is not None
    assert (m.world.generation, m.world.line, m.world.durable) == (2, t.CommitId(1, 40), None)


def test_a_world_that_fails_before_it_has_attached_reads_the_copy_again() -> None:
    m, _ = drive(COMMITTED, **FOUR, durable_dir="/copies", regroup_timeout_s=30.0)
    m, _ = drive(HOST_LOST + "33.2 time\n33.5 exit a:1#1 signal=9", m)
    m, _ = drive("33.6 ready a:0#1 in=2 commit=2.0 previous=1.40 + ready a:1#2 commit=1.40\n70.0 time", m)
    world = m.world
    assert world is not None
    assert world.generation == 3
    assert world.durable is not None
    assert world.lacking == ()


def test_shards_of_an_incomplete_first_attach_are_no_state() -> None:
    first = "\n".join(line for line in DISTINCT.splitlines() if "attached" not in line)
    m, _ = drive(first + "\n2.0 exit b:1#1 signal=9", **FOUR, durable_dir="/copies")
    ready = " + ".join(f"ready {name} in=1 commit=1.0 shards=yes" for name in NAMES[:3])
    m, effects = drive(f"2.1 {ready}", m)
    world = world_of(effects)[0]
    assert world.durable is not None
    assert (world.durable.is_required, world.durable.is_sharded) == (False, True)
    assert world.line is None
