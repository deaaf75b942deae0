"""The newest commit, in a process or as a retained commit: the core waits for it, keeps it, and uses it again."""

from __future__ import annotations

import pytest

from elasticstate.core import types as t
from elasticstate.core.accounting import figures_of
from elasticstate.core.diagnostics import waiting_for
from elasticstate.core.step import next_deadline
from tests.kit.core import RUNNING, drive, ended, kinds, only, published

HELD = RUNNING + "1.2 heartbeat a:0#1 in=1 ticks=9 commit=1.9 + heartbeat a:1#1 in=1 ticks=9 commit=1.9\n"
ALL_DIE = "2.0 exit a:0#1 signal=9 + exit a:1#1 signal=9 + exit a:2#1 signal=9\n"


def test_the_only_holder_of_the_newest_commit_leaves_one_world_later() -> None:
    script = (
        "0.0 hosts a:1 b:1\n0.1 agent-joined a\n1.0 ready a:0#1\n6.0 time\n6.1 first a:0#1 in=1\n7.0 agent-joined b"
    )
    script += "\n8.0 ready b:0#1 + draining a:0#1 + heartbeat a:0#1 in=1 ticks=3 commit=1.3\n8.1 failure a:0#1 in=1"
    m, effects = drive(script + "\n8.2 ready a:0#1 in=1 commit=1.3 ticks=4", np=1, min_np=1, max_np=2)
    world = published(effects)
    assert world.members[world.root].worker == t.WorkerId("a", 0, 1)
    _, effects = drive("8.3 first b:0#1 in=2", m)
    assert "Hold" in kinds(effects), "and it drains again after that world's first tick"


def test_a_draining_host_that_retains_the_only_commit_is_used_once_more() -> None:
    script = """
    0.0 hosts a:1 b:1
    0.1 agent-joined a
    1.0 ready a:0#1
    6.0 time
    6.1 first a:0#1 in=1
    7.0 agent-joined b
    8.0 heartbeat a:0#1 in=1 ticks=3 commit=1.3 + exit a:0#1 signal=9
    9.0 agent-draining a
    """
    m, effects = drive(script, np=1, min_np=1, max_np=2)
    assert "StopAgent" not in kinds(effects), "it would take the commit with it"
    m, effects = drive("9.1 ready b:0#1", m)
    assert "World" not in kinds(effects)
    assert "EndJob" not in kinds(effects)
    assert m.workers[t.WorkerId("a", 0, 2)].draining
    m, effects = drive("11.0 ready a:0#2 commit=1.3", m)
    world = published(effects)
    assert world.members[world.root].worker == t.WorkerId("a", 0, 2)
    m, effects = drive("11.1 first b:0#1 in=2", m)
    assert "Hold" in kinds(effects), "and it leaves after that world's first tick"


def test_a_worker_started_on_a_draining_host_does_not_count_for_max_np() -> None:
    script = """
    0.0 hosts a:2 b:2
    0.1 agent-joined a + agent-joined b
    1.0 ready a:0#1 + ready a:1#1 + ready b:0#1
    1.1 first a:0#1 in=1
    1.2 heartbeat a:0#1 in=1 ticks=3 commit=1.3 + heartbeat a:1#1 in=1 ticks=3 commit=1.3
    2.0 agent-draining a + exit b:0#1 signal=9
    """
    m, _ = drive(script, np=3, min_np=2, max_np=3)
    m, effects = drive("2.1 exit a:0#1 signal=9 + exit a:1#1 signal=9", m)
    started = [str(effect.worker) for effect in effects if isinstance(effect, t.StartWorker)]
    assert started == ["a:0#2", "a:1#2", "b:0#2", "b:1#1"]
    assert drive("2.2 time", m)[1] == []


def test_a_draining_worker_that_may_hold_the_newest_commit_is_not_stopped_while_a_world_is_sought() -> None:
    script = """
    0.0 hosts a:1 b:1
    0.1 agent-joined a
    1.0 ready a:0#1
    1.1 first a:0#1 in=1
    2.0 agent-unreachable a silent
    3.0 agent-joined b
    4.0 ready b:0#1
    500.0 time
    501.0 exit b:0#1 signal=9
    502.0 agent-joined a a:0#1=1 + hosts b:1
    """
    m, effects = drive(script, np=1, min_np=1, max_np=1)
    assert m.generation == 2, "that of a was given up: it had not committed anything"
    assert "StopWorker" not in kinds(effects)
    m, effects = drive("503.0 ready b:0#2", m)
    assert "World" not in kinds(effects)
    m, effects = drive("504.0 ready a:0#1 in=1 commit=1.2", m)
    world = published(effects)
    assert world.members[world.root].worker == t.WorkerId("a", 0, 1)


@pytest.mark.parametrize("is_ready", [True, False])
def test_the_only_holder_of_the_newest_commit_is_awaited_though_its_host_is_lost_a_second_time(is_ready: bool) -> None:
    """Back for a moment, its worker was no member any more."""
    script = """
    0.0 hosts a:1 b:1
    0.1 agent-joined a
    1.0 ready a:0#1
    1.1 first a:0#1 in=1
    1.2 heartbeat a:0#1 in=1 ticks=6 commit=1.6 previous=1.5
    2.0 agent-joined b
    3.0 ready b:0#1
    3.1 answer a:0#1 in=1 ticks=9
    3.2 ready a:0#1 in=1 commit=1.10 previous=1.9
    4.0 agent-unreachable a silent
    4.1 agent-joined a 0=1.10,1.9 a:0#1=1
    4.2 ready a:0#1 in=1 commit=1.10 previous=1.9
    4.3 agent-unreachable a silent
    4.4 ready b:0#1 in=2
    """
    script = "\n".join(line for line in script.splitlines() if is_ready or "4.2 ready" not in line)
    m, _ = drive(script, np=1, min_np=1, max_np=2, regroup_timeout_s=10.0, driver_timeout_s=300.0)
    assert (m.generation, m.phase_name) == (2, "WAITING")
    m, effects = drive("60.0 time", m)
    assert "EndJob" not in kinds(effects)
    m, effects = drive("90.0 agent-joined a 0=1.10,1.9 a:0#1=1\n91.0 ready a:0#1 in=1 commit=1.10 previous=1.9", m)
    world = published(effects)
    assert [str(place.worker) for place in world.members] == ["b:0#1", "a:0#1"]
    assert (world.root, world.lacking) == (1, (0,))


def test_with_a_living_member_the_core_does_not_wait_for_retained_commits() -> None:
    script = HELD + "2.0 exit a:0#1 signal=9 + exit a:1#1 signal=9\n"
    m, _ = drive(script, min_np=1)
    _, effects = drive("2.1 ready a:2#1 in=1 commit=1.8", m)
    assert published(effects).size == 1, "(1, 9) was not sealed by all"


def test_the_core_does_not_wait_for_a_slot_that_reports_no_commit() -> None:
    m, effects = drive(HELD + ALL_DIE + "5.0 ready a:0#2 + ready a:2#2\n10.0 time")
    assert m.phase_name == "WAITING"
    assert waiting_for(m, 10.0)[0] == "a:1 retains the newest commit (1, 9)"
    m, effects = drive("10.1 ready a:1#2", m)
    cause = ended(effects).root_cause
    assert cause is not None
    assert "no host holds a commit any more; the newest commit was (1, 9), on a" in cause.reason
    assert "at least 1 commit lost, at least 9 ticks redone" in figures_of(m, 11.0).text(), "all of them"


def test_an_older_commit_is_better_than_a_longer_wait() -> None:
    m, effects = drive(HELD + ALL_DIE + "5.0 ready a:0#2 commit=1.8 + ready a:2#2\n10.0 time")
    assert m.phase_name == "WAITING"
    assert next_deadline(m) == 32.0
    m, effects = drive("32.0 time\n70.0 time", m)
    world = published(effects)
    assert world.members[world.root].worker == t.WorkerId("a", 0, 2)
    warning = only([e for e in effects if isinstance(e, t.Note) and e.event == "warning"], t.Note)
    assert isinstance(warning, t.Note)
    assert "retained commit (1, 9) of a:1 is given up" in str(warning.get("text"))


def test_while_the_only_holder_boots_the_state_is_not_lost() -> None:
    m, _ = drive(HELD + ALL_DIE + "5.0 ready a:0#2 + ready a:2#2\n10.0 time\n70.0 time\n100.0 time")
    assert m.phase_name == "WAITING", "its boot is bounded by --start-timeout"
    _, effects = drive("101.0 ready a:1#2 commit=1.9", m)
    assert published(effects).lacking == (0, 2)
