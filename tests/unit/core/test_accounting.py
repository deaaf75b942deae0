"""Measured figures of a change of worlds: time without training, lost commits, ticks to redo. None is a constant."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from elasticstate.core import types as t
from elasticstate.core.accounting import figures_of
from elasticstate.core.figures import Losses
from elasticstate.core.reattach import Remains, reattach
from elasticstate.core.state import Membership
from tests.kit.core import POLICY, drive

START = """
0.0 hosts a:2
0.1 agent-joined a
1.0 ready a:0#1 + ready a:1#1
1.1 first a:0#1 in=1
"""
ALL_DIE = (
    START
    + """
4.0 heartbeat a:0#1 in=1 ticks=10 commit=1.10 + heartbeat a:1#1 in=1 ticks=11 commit=1.10
5.0 exit a:0#1 signal=9 + exit a:1#1 signal=9
"""
)


def after(script: str, m: Membership | None = None, **policy: object) -> tuple[Membership, list[t.Effect]]:
    """Return the membership after the script, and all effects of its last line."""
    return drive("\n".join(filter(str.strip, script.splitlines())), m, **{"np": 2, "max_np": 2, **policy})


def resumed(script: str, m: Membership | None = None, **policy: object) -> dict[str, object]:
    """Return the fields of training_resumed, which the last line of the script must cause."""
    _, effects = after(script, m, **policy)
    (note,) = [e for e in effects if isinstance(e, t.Note) and e.event == "training_resumed"]
    found = dict(note.fields)
    del found["generation"]
    return found


def figures(downtime_s: float, commits: int, ticks: int, *lower_bounds: str) -> dict[str, object]:
    return {
        "downtime_s": downtime_s,
        "commits_lost": commits,
        "ticks_lost": ticks,
        "lower_bounds": list(lower_bounds),
    }


def test_a_survivor_does_its_ticks_since_the_commit_again() -> None:
    script = (
        START
        + """
    4.0 heartbeat a:0#1 in=1 ticks=12 commit=1.9 + heartbeat a:1#1 in=1 ticks=12 commit=1.9
    5.0 exit a:1#1 signal=9
    5.1 ready a:0#1 in=1 commit=1.9 ticks=12
    5.5 first a:0#1 in=2
    """
    )
    assert resumed(script, min_np=1) == figures(0.5, 0, 3)


def test_ticks_of_workers_that_all_died_are_done_again() -> None:
    assert resumed(ALL_DIE + "7.0 ready a:0#2 commit=1.10 + ready a:1#2 commit=1.10\n7.5 first a:0#2 in=2") == figures(
        2.5, 0, 1
    )


def test_a_commit_that_all_had_sealed_and_nobody_has_whole_is_lost() -> None:
    script = ALL_DIE + "7.0 ready a:0#2 commit=1.7 + ready a:1#2 commit=1.7\n7.5 first a:0#2 in=2"
    assert resumed(script) == figures(2.5, 1, 4)


def test_a_commit_that_one_alone_had_sealed_is_not_lost() -> None:
    script = (
        START
        + """
    4.0 heartbeat a:0#1 in=1 ticks=10 commit=1.7 + heartbeat a:1#1 in=1 ticks=11 commit=1.10
    5.0 exit a:0#1 signal=9 + exit a:1#1 signal=9
    7.0 ready a:0#2 commit=1.7 + ready a:1#2 commit=1.7
    7.5 first a:0#2 in=2
    """
    )
    assert resumed(script) == figures(2.5, 0, 4)


def test_a_survivor_reports_a_sealed_commit_that_is_damaged() -> None:
    """No heartbeat has reported that commit."""
    script = (
        START
        + """
    5.0 exit a:1#1 signal=9
    5.1 ready a:0#1 in=1 commit=1.4 sealed=1.6 ticks=6
    5.5 first a:0#1 in=2
    """
    )
    assert resumed(script.replace("5.0 ", "4.9 heartbeat a:1#1 in=1 ticks=6 commit=1.6\n5.0 "), min_np=1) == figures(
        0.5, 1, 2
    )


def test_a_lost_commit_is_counted_once_however_many_worlds_fail_before_the_first_tick() -> None:
    script = (
        ALL_DIE
        + """
    7.0 ready a:0#2 commit=1.7 + ready a:1#2 commit=1.7
    7.2 exit a:1#2 signal=9
    7.3 ready a:0#2 in=2 commit=1.7
    7.5 first a:0#2 in=3
    """
    )
    assert resumed(script, min_np=1) == figures(2.5, 1, 4)


def test_ticks_count_back_to_a_commit_of_an_earlier_generation() -> None:
    script = (
        START
        + """
    2.0 exit a:1#1 signal=9
    2.1 ready a:0#1 in=1 commit=1.5 ticks=5
    2.2 first a:0#1 in=2
    4.0 heartbeat a:0#1 in=2 ticks=20 commit=2.20
    5.0 exit a:0#1 signal=9
    7.0 ready a:1#2 commit=1.4
    90.0 first a:1#2 in=3
    """
    )
    policy = {"min_np": 1, "np": 1, "regroup_timeout_s": 0.0}
    found = resumed(script, **policy)
    assert found == figures(85.0, 2, 21, "commits_lost")


def test_ticks_of_a_lost_host_are_a_lower_bound_from_its_last_heartbeat() -> None:
    script = (
        START
        + """
    4.0 heartbeat a:0#1 in=1 ticks=10 commit=1.10 + heartbeat a:1#1 in=1 ticks=11 commit=1.10
    5.0 agent-lost a has ended
    6.0 agent-joined a 0=1.12 1=1.12
    7.0 ready a:0#2 commit=1.12 + ready a:1#2 commit=1.12
    7.5 first a:0#2 in=2
    """
    )
    assert resumed(script, cooldown_range_s=(0.0, 600.0)) == figures(2.5, 0, 0, "ticks_lost")


def test_training_stands_still_from_the_last_tick_though_all_leave_by_plan() -> None:
    script = (
        START
        + """
    8.0 draining a:0#1 + draining a:1#1
    8.1 answer a:0#1 in=1 ticks=10 + answer a:1#1 in=1 ticks=10
    8.3 ready a:0#1 in=1 commit=1.11 ticks=11 paused=0.1 + ready a:1#1 in=1 commit=1.11 ticks=11
    8.4 exit a:0#1 code=0 + exit a:1#1 code=0
    12.0 ready a:0#2 commit=1.11 + ready a:1#2 commit=1.11
    12.2 first a:0#2 in=2
    """
    )
    assert resumed(script, cooldown_range_s=(0.0, 600.0)) == figures(4.0, 0, 0)


def test_a_job_that_ends_while_training_stands_still_has_that_downtime() -> None:
    m, _ = after(ALL_DIE)
    assert figures_of(m, 8.0).losses.downtime_s == 3.0
    m, _ = after("9.0 ready a:0#2 commit=1.10 + ready a:1#2 commit=1.10", m)
    assert figures_of(m, 9.5).losses.downtime_s == 4.5
    assert figures_of(m, 9.5).losses.ticks == 1


def test_a_world_without_a_tick_has_resumed_training_in_its_gate() -> None:
    m, _ = after(ALL_DIE + "7.0 ready a:0#2 commit=1.10 + ready a:1#2 commit=1.10")
    assert resumed("7.5 gate a:0#2 in=2\n7.9 gate a:1#2 in=2", m) == figures(2.5, 0, 1)


def test_downtime_of_a_job_without_ticks_is_not_known() -> None:
    script = (
        START.replace("1.1 first a:0#1 in=1\n", "")
        + """
    5.0 exit a:1#1 signal=9
    5.1 ready a:0#1 in=1
    6.0 ready a:1#2
    """
    )
    m, _ = after(script)
    assert figures_of(m, 9.0).losses.downtime_s is None


def remains(**changes: object) -> Remains:
    """Return a job of two workers in generation 2 whose driver has died. Both workers are well and have ticked."""
    m, _ = after(START + "2.0 exit a:1#1 signal=9\n2.1 ready a:0#1 in=1 commit=1.5 ticks=5\n2.2 ready a:1#2")
    assert m.generation == 2
    assert m.world is not None
    workers = [placement.worker for placement in m.world.members]
    known = Remains(
        epoch=2,
        world=m.world,
        ages=(0, 1),
        next_age=2,
        highest=t.CommitId(1, 5),
        origins=m.ledger.origins,
        hosts=(t.HostSlots("a", 2),),
        lost=frozenset(),
        living=dict.fromkeys(workers, 2),
        exited=frozenset(),
        ticks=7,
        has_ended=False,
        gate_is_open=False,
    )
    return msgspec.structs.replace(known, **changes)


A1 = t.WorkerId("a", 1, 2)
BACK = """
10.1 agent-joined a a:0#1=2
10.2 exit a:1#2 signal=9
10.3 ready a:0#1 in=2 commit=2.9 ticks=9
10.7 first a:0#1 in=3
"""


@pytest.mark.parametrize(
    ("changes", "events", "expected"),
    [
        ({"exited": frozenset({A1}), "living": {t.WorkerId("a", 0, 1): 2}}, BACK, figures(0.5, 0, 0, "downtime_s")),
        ({"ticks": 0}, "10.4 first a:0#1 in=2", figures(0.4, 0, 0, "downtime_s")),
    ],
)
def test_after_a_reattach_the_downtime_is_a_lower_bound(
    changes: dict[str, object], events: str, expected: dict[str, object]
) -> None:
    policy = replace(POLICY, np=2, min_np=1, max_np=2)
    m = reattach(policy, remains(**changes), 10.0).next
    assert resumed(events, m) == expected


def test_a_new_driver_counts_the_loss_of_the_commit_that_the_world_started_from() -> None:
    """Its only holder is lost, and a commit before it is found: without the record of the origin nothing was lost."""
    changes = {"ticks": 0, "exited": frozenset({t.WorkerId("a", 0, 1)}), "living": {A1: 2}}
    m = reattach(replace(POLICY, np=2, min_np=1, max_np=2), remains(**changes), 10.0).next
    events = """
    10.1 agent-joined a a:1#2=2
    10.2 exit a:0#1 signal=9
    10.3 ready a:1#2 in=2 commit=1.3 ticks=0
    10.7 first a:1#2 in=3
    """
    fields = resumed(events, m)
    assert (fields["commits_lost"], fields["ticks_lost"]) == (1, 2)
    assert "commits_lost" in fields["lower_bounds"]


def test_a_world_that_trains_through_a_reattach_has_no_downtime() -> None:
    m = reattach(replace(POLICY, np=2, min_np=1, max_np=2), remains(), 10.0).next
    assert figures_of(m, 12.0).losses == Losses()


def test_goodput_counts_from_the_first_tick_to_the_failure_without_redone_ticks() -> None:
    m, _ = after(ALL_DIE)
    figures = figures_of(m, 10.0)
    assert figures.goodput == pytest.approx((5.0 - 1.1) / 10.0)
    assert (figures.generations, figures.failures) == (1, 1)
    m, _ = after("7.0 ready a:0#2 commit=1.7 + ready a:1#2 commit=1.7", m)
    figures = figures_of(m, 10.0)
    assert (figures.losses.ticks, figures.losses.commits) == (4, 1)
    assert figures.goodput == pytest.approx((5.0 - 1.1 - 4 * 3.9 / 11) / 10.0)  # 11 ticks
    m, _ = after("7.5 first a:0#2 in=2", m)
    assert figures_of(m, 10.0).goodput == pytest.approx((5.0 - 1.1 - 4 * 3.9 / 11 + 2.5) / 10.0)


def test_a_planned_end_is_not_a_failure_and_ends_with_the_first_member_that_leaves() -> None:
    script = (
        START
        + """
    8.0 draining a:1#1
    8.1 answer a:0#1 in=1 ticks=10 + answer a:1#1 in=1 ticks=10
    8.3 ready a:0#1 in=1 commit=1.11 ticks=11 paused=0.1
    8.9 ready a:1#1 in=1 commit=1.11 ticks=11
    """
    )
    m, _ = after(script, min_np=1, preemption_window_s=0.0)
    figures = figures_of(m, 10.0)
    assert (figures.generations, figures.failures) == (2, 0)
    assert figures.goodput == pytest.approx((8.2 - 1.1) / 10.0)


def test_a_failure_behind_the_exit_gate_counts() -> None:
    m, _ = after(START + "2.0 gate a:0#1 in=1 + gate a:1#1 in=1\n3.0 exit a:0#1 code=0\n3.5 exit a:1#1 code=3")
    assert figures_of(m, 4.0).failures == 1
    assert figures_of(m, 4.0).goodput == pytest.approx(0.9 / 4.0)


def test_the_downtime_ends_with_the_job() -> None:
    """The stop of the remaining workers takes time that is no downtime."""
    script = START + "2.0 sealed a:0#1 commit=1.1\n5.0 exit a:0#1 signal=9 + exit a:1#1 signal=9"
    m, effects = after(script + "\n66.0 time", np=2, min_np=2, elastic_timeout_s=60.0)
    assert [type(effect) for effect in effects][-1] is t.EndJob
    assert figures_of(m, 70.0).losses.downtime_s == 61.0
