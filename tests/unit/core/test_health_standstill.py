"""Standstills: no member completes a tick. When the core asks and reports, once, and what the time counts as."""

from __future__ import annotations

import pytest

from elasticstate.core.diagnostics import waiting_for
from elasticstate.core.health import ANSWER_S, no_tick_text
from tests.kit.core import START, STARTED, after, kinds, notes, times

BOTH = ("a:0#1", "a:1#1")


def beat(at: float, ticks: int, still: float, *workers: str, place: str = "train") -> str:
    """Return a line in which members report that they have stood still for so long."""
    beats = (f"heartbeat {w} in=1 ticks={ticks} place={place} still={still} commits=1e-10" for w in workers or BOTH)
    return f"{at} {' + '.join(beats)}\n"


# Five ticks of about a second, the last one at 6.0; then nothing.
TICKED = START + "".join(beat(1.0 + tick, tick, 0.0) for tick in range(1, 6))
STILL = TICKED + beat(36.0, 5, 30.0) + beat(66.0, 5, 60.0)


def test_after_a_minute_the_core_asks_where_the_members_are_and_ends_nothing() -> None:
    _, effects = after(TICKED + beat(65.0, 5, 59.0))
    assert effects == []
    m, effects = after(STILL)
    assert kinds(effects) == ["AskWhere"]
    _, effects = after(beat(67.0, 5, 61.0), m)
    assert effects == [], "it asks once"


def test_the_answers_of_all_members_complete_the_report() -> None:
    m, _ = after(STILL)
    m, effects = after("66.1 where a:0#1 in=1 line=train.py:14 entered=1:all_reduce,2:all_reduce", m)
    assert effects == []
    m, effects = after("66.2 where a:1#1 in=1 line=train.py:20 entered=1:all_reduce", m)
    (note,) = notes(effects, "no_tick")
    assert (note.get("seconds"), note.get("ticks")) == (60.2, 5)
    assert (note.get("call"), note.get("number")) == ("all_reduce", 2)
    assert (note.get("entered"), note.get("missing"), note.get("silent")) == ([0], [1], [])
    assert note.get("lines") == {"0": "train.py:14", "1": "train.py:20"}
    assert note.get("stacks") == {"0": "stack of train.py:14", "1": "stack of train.py:20"}
    text = str(note.get("text"))
    assert text.startswith("no tick for 60 s, after 5 ticks of generation 1: rank 0 is at train.py:14; rank 1 is at")
    assert "was entered by rank 0 and not by rank 1" in text
    (line,) = waiting_for(m, 71.0)
    assert line.startswith("no tick for 65 s: rank 0 is at train.py:14; rank 1 is at train.py:20; all_reduce")
    assert no_tick_text(m, 71.0) == "no tick for 65 s"
    _, effects = after("90.0 where a:1#1 in=1 line=train.py:21\n" + beat(91.0, 5, 85.0), m)
    assert effects == [], "it reports once"


def test_different_operations_under_one_number_are_the_reason() -> None:
    m, _ = after(STILL)
    _, effects = after("66.1 where a:0#1 in=1 entered=7:barrier() + where a:1#1 in=1 entered=7:all_reduce(Float[3])", m)
    (note,) = notes(effects, "no_tick")
    assert "collective 7 of default_pg is barrier on rank 0 and all_reduce on rank 1" in str(note.get("text"))


def test_a_member_that_cannot_answer_is_not_awaited_for_long() -> None:
    m, _ = after(STILL)
    m, effects = after(f"66.1 where a:0#1 in=1 line=train.py:14\n{66.0 + ANSWER_S} time", m)
    (note,) = notes(effects, "no_tick")
    assert note.get("silent") == [1]
    assert "no answer from rank 1 (stopped, or in code that holds the GIL)" in str(note.get("text"))
    m, _ = after(STILL)
    _, effects = after(f"{66.0 + ANSWER_S} time", m)
    assert "no answer from ranks 0, 1" in str(notes(effects, "no_tick")[0].get("text"))


def test_the_time_of_a_standstill_is_no_goodput() -> None:
    m, _ = after(TICKED + beat(36.0, 5, 30.0))
    assert times(m, 36.0) == {**STARTED, "goodput": 34.5}, "a long tick is no standstill yet"
    m, _ = after(STILL)
    assert times(m, 66.0) == {**STARTED, "goodput": 4.5, "no_ticks": 60.0}
    assert times(m, 166.0) == {**STARTED, "goodput": 4.5, "no_ticks": 160.0}
    m, _ = after("166.0 exit a:1#1 signal=9\n166.5 ready a:0#1 in=1 ticks=5 paused=160.5 commit=1.5", m)
    found = times(m, 166.5)
    assert (found["goodput"], found["no_ticks"], found["regroup"]) == (4.5, 160.0, 0.5)
    assert "redone_ticks" not in found


def test_a_tick_that_is_completed_after_all_was_a_long_tick() -> None:
    m, _ = after(STILL + "66.1 where a:0#1 in=1 line=x + where a:1#1 in=1 line=x")
    m, effects = after(beat(80.0, 6, 0.0), m)
    (note,) = notes(effects, "no_tick_ended")
    assert (note.get("reason"), note.get("goes_on"), note.get("seconds")) == ("ticks go on", True, 74.0)
    assert times(m, 80.0) == {**STARTED, "goodput": 78.5}
    assert waiting_for(m, 80.0) == ()


def test_a_member_that_was_behind_ticks_before_any_other_goes_on() -> None:
    m, effects = after(TICKED + beat(36.0, 6, 30.0, "a:0#1") + beat(66.0, 6, 60.0, "a:0#1"))
    assert kinds(effects) == ["AskWhere"]
    _, effects = after("66.1 where a:0#1 in=1 line=x + where a:1#1 in=1 line=x\n" + beat(80.0, 6, 0.0, "a:1#1"), m)
    (note,) = notes(effects, "no_tick_ended")
    assert (note.get("reason"), note.get("goes_on")) == ("ticks go on", True)


def test_an_end_of_the_generation_ends_the_standstill() -> None:
    m, _ = after(STILL + "66.1 where a:0#1 in=1 line=x + where a:1#1 in=1 line=x")
    m, effects = after("70.0 exit a:1#1 signal=9", m)
    (note,) = notes(effects, "no_tick_ended")
    assert (note.get("reason"), note.get("goes_on")) == ("generation 1 has ended", False)
    assert no_tick_text(m, 71.0) == ""


def test_a_standstill_that_ends_before_its_report_is_not_reported() -> None:
    _, effects = after(STILL + beat(66.5, 6, 0.0))
    assert effects == []


def test_progress_postpones_it() -> None:
    _, effects = after(TICKED + beat(36.0, 5, 30.0) + beat(66.0, 5, 10.0, "a:0#1") + beat(66.5, 5, 60.5, "a:1#1"))
    assert effects == [], "a validation on rank 0"
    _, effects = after(TICKED + beat(66.0, 5, 10.0, "a:0#1") + beat(116.0, 5, 60.0))
    assert kinds(effects) == ["AskWhere"]


def test_before_the_first_tick_it_is_said_that_there_may_be_none() -> None:
    script = "\n".join(START.splitlines()[:-1]) + "\n" + beat(2.0, 0, 0.5) + beat(62.0, 0, 60.5)
    m, effects = after(script)
    assert kinds(effects) == ["AskWhere"]
    _, effects = after("62.1 where a:0#1 in=1 line=x + where a:1#1 in=1 line=x", m)
    text = str(notes(effects, "no_tick")[0].get("text"))
    assert "since generation 1 began to train" in text
    assert "a loop that calls neither commit() nor check_host_updates() makes no ticks" in text


def test_members_that_do_not_train_yet_do_not_stand_still() -> None:
    script = "\n".join(START.splitlines()[:-1]) + "\n" + beat(70.0, 0, 69.0, place="regroup")
    assert after(script)[1] == []


def test_the_exit_gate_has_a_notice_of_its_own() -> None:
    _, effects = after(TICKED + "30.0 gate a:0#1 in=1\n" + beat(66.0, 5, 60.0, "a:1#1"))
    assert kinds(effects) == ["waiting"]


def test_a_driver_that_was_stopped_itself_does_not_report() -> None:
    _, effects = after(TICKED + "500.0 time")
    assert effects == []
    _, effects = after(TICKED + "500.0 time\n" + beat(500.1, 6, 0.2, "a:0#1"))
    assert effects == []


@pytest.mark.parametrize(("tick_s", "limit_s"), [(1.0, 60.0), (5.0, 100.0)])
def test_the_limit_grows_with_long_ticks(tick_s: float, limit_s: float) -> None:
    script = START + "".join(beat(2.0 + tick_s * tick, tick, 0.0) for tick in range(1, 9))
    last = 2.0 + 8 * tick_s
    m, effects = after(script + beat(last + limit_s - 1.0, 8, limit_s - 1.0))
    assert effects == []
    _, effects = after(beat(last + limit_s, 8, limit_s), m)
    assert kinds(effects) == ["AskWhere"]


def test_a_hang_before_the_tick_of_a_planned_end_is_found_too() -> None:
    """The sentinels answer a hold although the main threads hang."""
    held = TICKED + "7.0 draining a:1#1\n8.0 time\n"
    held += "8.1 answer a:0#1 in=1 ticks=5 + answer a:1#1 in=1 ticks=5"
    m, effects = after(held, preemption_window_s=0.5, drain_timeout_s=600.0)
    assert "End" in kinds(effects)
    m, _ = after(beat(36.0, 5, 30.0), m)
    m, effects = after(beat(66.0, 5, 60.0), m)
    assert "AskWhere" in kinds(effects)
    assert m.phase_name == "FORMING(2)"
    assert times(m, 96.0)["no_ticks"] == 90.0
    assert waiting_for(m, 71.0)[0] == "no tick for 65 s"
    m, _ = after("97.0 ready a:0#1 in=1 ticks=6 paused=0.5 commit=1.6", m)
    assert times(m, 97.0).get("no_ticks", 0.0) == 0.0


def test_the_end_of_the_job_comes_after_that_of_the_standstill() -> None:
    held = STILL + "66.1 where a:0#1 in=1 line=x + where a:1#1 in=1 line=x\n67.0 draining a:1#1\n68.0 time\n"
    held += "68.1 answer a:0#1 in=1 ticks=5 + answer a:1#1 in=1 ticks=5\n"
    m, effects = after(held, preemption_window_s=0.5, drain_timeout_s=600.0)
    assert "End" in kinds(effects)
    _, effects = after("69.0 exit a:0#1 code=1 + exit a:1#1 code=1", m)
    assert kinds(effects)[-2:] == ["no_tick_ended", "EndJob"]
