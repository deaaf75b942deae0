"""A job that commits nothing: the warning before a failure, and what the failure has lost."""

from __future__ import annotations

import pytest

from elasticstate.core import types as t
from elasticstate.core.accounting import figures_of
from tests.kit.core import START, after, notes


def beat(at: float, ticks: int, more: str = "") -> str:
    return f"{at} heartbeat a:0#1 in=1 ticks={ticks}{more} + heartbeat a:1#1 in=1 ticks={ticks}{more}\n"


def warnings(effects: list[t.Effect]) -> list[str]:
    return [str(note.get("text")) for note in notes(effects, "warning")]


def test_many_ticks_without_a_commit_cause_one_warning() -> None:
    m, effects = after(START + beat(6.9, 101))
    assert warnings(effects) == [
        "nothing was committed in the first 101 ticks (6 s) of generation 1: a failure may lose them all. "
        "Call state.commit() in the training loop; commit(every=N) saves at each N-th tick"
    ]
    assert after(beat(70.0, 900), m)[1] == []


def test_so_do_few_ticks_in_a_minute() -> None:
    assert after(START + beat(60.0, 10))[1] == []
    assert len(warnings(after(START + beat(61.0, 10))[1])) == 1
    assert after(START + beat(61.0, 4))[1] == []


def test_work_of_a_few_seconds_is_not_worth_a_warning() -> None:
    assert after(START + beat(4.0, 1000))[1] == []


def test_commits_that_will_come_are_enough() -> None:
    assert after(START + beat(2.5, 1, " commits=0.000001") + beat(70.0, 900))[1] == []
    assert after(START + beat(70.0, 900, " commit=1.100"))[1] == []


def test_ticks_that_no_commit_holds_are_named_when_they_are_lost() -> None:
    m, _ = after(START + beat(4.0, 40))
    m, _ = after("5.0 exit a:1#1 signal=9\n5.1 ready a:0#1 in=1 ticks=40 paused=0.1", m)
    _, effects = after("5.5 first a:0#1 in=2", m)
    (resumed,) = notes(effects, "training_resumed")
    assert (resumed.get("commits_lost"), resumed.get("ticks_lost")) == (0, 40)
    assert resumed.get("uncommitted_s") == 3.5, "from the begin of training to the failure"
    figures = figures_of(m, 5.1)
    assert "40 ticks redone, 3.5 s of training lost because nothing was committed" in figures.text()


def test_work_without_ticks_is_lost_to_an_unknown_amount() -> None:
    untrained = "\n".join(START.splitlines()[:-1]) + "\n"
    m, _ = after(untrained + beat(2.0, 0) + "5.0 exit a:1#1 signal=9\n")
    m, effects = after("5.1 ready a:0#1 in=1", m)
    assert warnings(effects) == [
        "generation 2 begins from scratch: generation 1 made no tick and no commit, so all of its work (3.0 s, an "
        "unknown number of steps) is lost. Call state.commit() in the training loop"
    ]
    fields = figures_of(m, 6.0).fields()
    assert (fields["uncommitted_s"], fields["lower_bounds"]) == (3.0, ["ticks_lost"])
    text = "downtime unknown (no ticks), 0 commits lost, an unknown number of steps redone, 3.0 s of training lost"
    assert text in figures_of(m, 6.0).text()


def test_work_before_the_first_report_counts() -> None:
    """The place of a worker is reported once in a second, and the world may fail before that."""
    untrained = "\n".join(START.splitlines()[:-1]) + "\n"
    m, _ = after(untrained + "1.9 heartbeat a:1#1 in=1 place=train trained=0.5 + exit a:1#1 signal=9\n")
    m, effects = after("2.0 ready a:0#1 in=1 trained=0.7", m)
    assert "all of its work (0.5 s, an unknown number of steps) is lost" in warnings(effects)[0]
    assert figures_of(m, 2.0).fields()["uncommitted_s"] == 0.5


def test_a_job_with_commits_loses_no_more_than_its_ticks() -> None:
    m, _ = after(START + beat(4.0, 40, " commit=1.30"))
    m, _ = after("5.0 exit a:1#1 signal=9\n5.1 ready a:0#1 in=1 ticks=40 paused=0.1 commit=1.30", m)
    _, effects = after("5.5 first a:0#1 in=2", m)
    (resumed,) = notes(effects, "training_resumed")
    assert (resumed.get("ticks_lost"), "uncommitted_s" in dict(resumed.fields)) == (10, False)


def test_a_long_tick_that_is_cut_off_is_named() -> None:
    m, _ = after(START + beat(4.0, 1, " commit=1.1"))
    m, _ = after("15.0 exit a:1#1 signal=9\n15.2 ready a:0#1 in=1 ticks=1 paused=11.2 commit=1.1", m)
    _, effects = after("15.5 first a:0#1 in=2", m)
    (resumed,) = notes(effects, "training_resumed")
    assert (resumed.get("ticks_lost"), resumed.get("unfinished_s")) == (0, 11.0), "up to the failure"
    assert "0 commits lost, 0 ticks redone, 11.0 s of uncompleted ticks lost" in figures_of(m, 15.5).text()


def test_so_is_one_of_workers_that_all_die() -> None:
    m, _ = after(START + beat(4.0, 1, " commit=1.1"))
    m, _ = after("15.0 exit a:0#1 signal=9 commit=1.1 + exit a:1#1 signal=9 commit=1.1\n", m)
    assert not figures_of(m, 15.5).losses.unfinished_s
    m, _ = after("15.1 ready a:0#2 commit=1.1 + ready a:1#2 commit=1.1\n", m)
    assert figures_of(m, 15.5).losses.unfinished_s == 11.0


def test_a_world_that_never_ends_a_tick_after_a_commit_is_lost_as_a_whole() -> None:
    m, _ = after(START + beat(4.0, 1, " commit=1.1"))
    m, _ = after("4.5 exit a:1#1 signal=9\n4.6 ready a:0#1 in=1 ticks=1 paused=0.5 commit=1.1", m)
    assert m.generation == 2
    m, _ = after("5.0 heartbeat a:0#1 in=2 place=train trained=0.2\n25.0 exit a:0#1 signal=9 commit=1.1\n", m)
    m, _ = after("25.1 ready a:0#2 commit=1.1\n26.1 ready a:1#2 commit=1.1\n", m)
    assert figures_of(m, 27.0).losses.unfinished_s == pytest.approx(20.2)
