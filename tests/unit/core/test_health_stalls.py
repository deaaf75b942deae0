"""Stalls in the core: what the transcripts do not show."""

from __future__ import annotations

from elasticstate.core import types as t
from elasticstate.core.diagnostics import waiting_for
from elasticstate.core.state import Membership
from elasticstate.core.step import next_deadline
from tests.kit.core import RUNNING, drive, kinds

LONG = "70.0 call a:0#1 in=1 number=7 waits=60"


def running(**policy: object) -> Membership:
    return drive(RUNNING, **policy)[0]


def note(effects: list[t.Effect], event: str) -> t.Note:
    (found,) = [effect for effect in effects if isinstance(effect, t.Note) and effect.event == event]
    return found


def test_without_the_check_a_wait_has_no_effect() -> None:
    m, effects = drive(LONG, running(stall_check_s=None))
    assert effects == []
    assert next_deadline(m) is None


def test_a_wait_that_is_not_long_enough_is_reported_when_it_is() -> None:
    m, effects = drive("30.0 call a:0#1 in=1 number=7 waits=20", running())
    assert effects == []
    assert next_deadline(m) == 70.0
    _, effects = drive("70.0 time", m)
    assert effects == [t.WatchCalls(1, True)]


def test_there_is_no_stall_if_the_answers_show_that_all_have_made_the_call() -> None:
    m, _ = drive(LONG, running())
    m, effects = drive("70.2 call a:1#1 in=1 number=7 waits=1 + call a:2#1 in=1 number=7 waits=3", m)
    assert effects == [t.WatchCalls(1, False)]
    _, effects = drive("90.0 time", m)
    assert effects == []


def test_a_rank_that_makes_another_call_is_missing_and_both_calls_stall() -> None:
    m, _ = drive(LONG + "\n70.1 call a:1#1 in=1 number=1 set=2 ranks=1,2 waits=60 text=x", running())
    _, effects = drive("71.0 time", m)
    stalls = {effect.get("call"): effect for effect in effects if isinstance(effect, t.Note)}
    assert (stalls["barrier()"].get("waiting"), stalls["barrier()"].get("missing")) == ([0], [1, 2])
    assert (stalls["x"].get("waiting"), stalls["x"].get("missing")) == ([1], [2]), "rank 0 is not in the process set"
    assert str(stalls["barrier()"].get("who")).startswith("a:1#1 (rank 1): waits in x, a:2#1 (rank 2): no call")


def test_the_text_is_that_of_the_call_and_not_of_the_ranks_in_join() -> None:
    m, _ = drive("70.0 call a:0#1 in=1 number=7 waits=60 text=join()", running())
    _, effects = drive("70.1 call a:1#1 in=1 number=7 waits=60\n71.0 time", m)
    assert note(effects, "stall").get("call") == "barrier()"


def test_a_missing_rank_may_be_in_the_exit_gate() -> None:
    m, _ = drive("60.0 gate a:2#1 in=1\n" + LONG, running())
    _, effects = drive("71.0 time", m)
    assert note(effects, "stall").get("who") == "a:1#1 (rank 1): no call in this world reported, " + (
        "a:2#1 (rank 2): in the exit gate"
    )


def test_the_status_shows_the_stall_until_it_ends() -> None:
    m, _ = drive(LONG + "\n71.0 time", running())
    (line,) = waiting_for(m, 75.0)
    assert line.startswith("stall for 65.0 s: rank 0 in barrier(); missing: a:1#1 (rank 1): no call")
    m, effects = drive("76.0 call a:0#1 in=1 number=7", m)
    assert kinds(effects) == ["stall_ended", "WatchCalls"]
    assert waiting_for(m, 77.0) == ()


def test_a_planned_change_still_ends_the_generation_and_the_stall() -> None:
    m, _ = drive(LONG + "\n71.0 time\n72.0 draining a:2#1", running())
    _, effects = drive("72.1 answer a:0#1 in=1 ticks=3 + answer a:1#1 in=1 ticks=3 + answer a:2#1 in=1 ticks=3", m)
    assert kinds(effects) == ["End", "end", "stall_ended"]


def test_calls_of_the_last_world_do_not_count_in_the_next() -> None:
    m, _ = drive(LONG + "\n71.0 exit a:2#1 signal=9", running())
    m, effects = drive("72.0 ready a:0#1 in=1 + ready a:1#1 in=1", m)
    assert "world_formed" in kinds(effects)
    m, effects = drive("72.1 call a:0#1 in=1 number=7 waits=62", m)
    assert effects == [], "a late report"
    m, effects = drive("72.2 call a:1#1 in=2 number=1 waits=0.5", m)
    assert effects == [], "rank 0 does not wait any more"
