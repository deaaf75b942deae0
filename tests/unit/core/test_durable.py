"""A world in which no worker holds a commit starts from a durable copy, if the job has a place for them."""

from __future__ import annotations

from elasticstate.core import types as t
from tests.unit.core.test_membership import drive, ended, published

FIRST = "0.0 hosts a:1\n0.1 agent-joined a\n1.0 ready a:0#1"
LOST = """
1.1 first a:0#1 in=1
1.2 heartbeat a:0#1 in=1 ticks=3 commit=1.3
2.0 exit a:0#1 signal=9
9.0 ready a:0#2
"""
SIZE = {"np": 1, "min_np": 1, "max_np": 1}


def test_the_first_world_may_start_from_a_copy() -> None:
    _, effects = drive(FIRST, **SIZE, durable_dir="/copies", durable_timeout_s=7.0)
    assert published(effects).durable == t.DurableSource("/copies", 7.0, is_required=False)
    _, effects = drive(FIRST, **SIZE)
    assert published(effects).durable is None


def test_a_job_that_has_lost_all_commits_needs_a_copy() -> None:
    m, _ = drive(FIRST, **SIZE, durable_dir="/copies")
    _, effects = drive(LOST, m)
    assert published(effects).durable == t.DurableSource("/copies", m.policy.durable_timeout_s, is_required=True)
    warnings = [effect.get("text") for effect in effects if isinstance(effect, t.Note) and effect.event == "warning"]
    assert warnings == ["no host holds a commit any more; the job resumes from the newest durable copy"]


def test_a_job_without_a_place_for_copies_is_lost() -> None:
    m, _ = drive(FIRST, **SIZE)
    _, effects = drive(LOST, m)
    cause = ended(effects).root_cause
    assert cause is not None
    assert "StateLostError" in cause.reason


def test_a_world_with_a_commit_reads_no_copy() -> None:
    m, _ = drive(FIRST, **SIZE, durable_dir="/copies")
    _, effects = drive(LOST.replace("ready a:0#2", "ready a:0#2 commit=1.3"), m)
    assert published(effects).durable is None
