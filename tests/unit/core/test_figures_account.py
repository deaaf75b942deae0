"""The account of time against the true activities of scripted jobs: seconds of each part, written by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from elasticstate.core import types as t
from elasticstate.core.accounting import figures_of
from elasticstate.core.reattach import Remains, reattach
from elasticstate.core.state import Membership
from tests.kit.core import POLICY, START, STARTED, TWO, after, times


def test_the_first_tick_divides_the_time_since_the_world_was_published() -> None:
    m, _ = after(START)
    assert times(m, 4.0) == {**STARTED, "goodput": 2.5}


def test_the_member_that_began_last_decides_where_sync_ends() -> None:
    """The others have waited for it in their first tick. Its groups existed 0.1 s later, too."""
    m, _ = after(START + "2.1 first a:1#1 in=1 train=0.1 sync=0.6")
    assert times(m, 4.0) == {"boot": 1.0, "world_formation": 0.3, "sync": 0.6, "goodput": 2.1}
    m, _ = after("2.2 first a:1#1 in=1 train=0.4 sync=0.9", m)
    assert times(m, 4.0) == {"boot": 1.0, "world_formation": 0.3, "sync": 0.6, "goodput": 2.1}


def test_times_of_a_worker_that_exceed_those_of_the_core_are_cut() -> None:
    m, _ = after(START.replace("train=0.5 sync=0.3", "train=0.9 sync=9"))
    assert times(m, 2.0) == {"boot": 1.0, "sync": 0.1, "goodput": 0.9}


def test_training_without_a_tick_is_no_goodput() -> None:
    script = START.splitlines()[:-1]
    m, _ = after("\n".join([*script, "3.0 heartbeat a:0#1 in=1 place=train + heartbeat a:1#1 in=1 place=regroup"]))
    assert times(m, 3.0) == {"boot": 1.0, "world_formation": 2.0}
    m, _ = after("4.0 heartbeat a:1#1 in=1 place=train", m)
    assert times(m, 6.0) == {"boot": 1.0, "world_formation": 3.0, "no_ticks": 2.0}
    m, _ = after("8.0 first a:0#1 in=1 train=4.5 sync=0.5", m)
    assert times(m, 8.0) == {"boot": 1.0, "world_formation": 2.0, "sync": 0.5, "goodput": 4.5}


def test_without_a_tick_the_member_that_began_last_to_train_decides_where_the_formation_ends() -> None:
    """Their places are known later: the reports say for how long they have trained."""
    script = "\n".join(START.splitlines()[:-1])
    m, _ = after(script + "\n3.0 heartbeat a:0#1 in=1 trained=1.6\n3.5 heartbeat a:1#1 in=1 trained=1.7")
    assert times(m, 6.0) == {"boot": 1.0, "world_formation": 0.8, "no_ticks": 4.2}
    m, _ = after("6.0 heartbeat a:0#1 in=1 trained=4.4 + heartbeat a:1#1 in=1 trained=4.0", m)
    assert times(m, 6.0) == {"boot": 1.0, "world_formation": 0.8, "no_ticks": 4.2}, "later reports may be late"
    m, _ = after("8.0 first a:0#1 in=1 train=6.2 sync=0.5", m)
    assert times(m, 8.0) == {"boot": 1.0, "world_formation": 0.3, "sync": 0.5, "goodput": 6.2}


def test_so_it_does_if_the_world_fails_before_any_report() -> None:
    script = "\n".join(START.splitlines()[:-1])
    m, _ = after(script + "\n1.9 exit a:1#1 signal=9\n2.0 ready a:0#1 in=1 trained=0.6")
    assert times(m, 2.5) == {"boot": 1.0, "world_formation": 0.9, "no_ticks": 0.5, "regroup": 0.1}
    m, _ = after("3.4 exit a:0#1 signal=9", m)
    assert times(m, 3.4)["no_ticks"] == 0.5, "no report has said that it trains in the second world"


def test_a_failure_costs_the_tick_that_it_cut_off_the_ticks_since_the_commit_and_the_regroup() -> None:
    script = (
        START
        + """
    7.4 heartbeat a:1#1 in=1 ticks=12 commit=1.9
    8.0 exit a:1#1 signal=9
    8.1 ready a:0#1 in=1 commit=1.9 ticks=12 paused=0.6
    """
    )
    m, effects = after(script)  # 12 ticks of 0.5 s from 1.5 to 7.5; three of them are done again
    expected = {**STARTED, "goodput": 4.5, "redone_ticks": 2.0, "regroup": 0.1}
    assert times(m, 8.1) == expected
    (note,) = [e for e in effects if isinstance(e, t.Note) and e.event == "generation_finished"]
    assert note.get("generation") == 1
    assert note.get("wall_s") == 7.1, "the boot belongs to generation 0"
    assert note.get("badput_s") == {"world_formation": 0.2, "sync": 0.3, "regroup": 0.1, "redone_ticks": 2.0}
    m, _ = after("9.0 first a:0#1 in=2 train=0.4", m)
    assert times(m, 10.0) == {**expected, "goodput": 4.5 + 1.4, "world_formation": 0.7}


def test_the_latest_end_of_a_tick_of_all_survivors_counts() -> None:
    script = START + "8.0 failure a:0#1 in=1\n8.1 ready a:0#1 in=1 commit=1.9 ticks=9 paused=1.1"
    m, _ = after(script)
    assert times(m, 8.1) == {**STARTED, "goodput": 5.5, "redone_ticks": 1.0, "regroup": 0.1}
    m, _ = after("8.2 ready a:1#1 in=1 commit=1.10 ticks=10 paused=0.3", m)
    assert times(m, 8.2) == {**STARTED, "goodput": 6.4, "redone_ticks": 0.1, "regroup": 0.2}


def test_after_the_loss_of_all_workers_the_job_boots_again() -> None:
    m, _ = after(START + "7.5 heartbeat a:1#1 in=1 ticks=12 commit=1.12\n8.0 exit a:0#1 signal=9 + exit a:1#1 signal=9")
    assert times(m, 9.0) == {**STARTED, "goodput": 6.5, "boot": 2.0}
    m, _ = after("9.5 ready a:0#2 commit=1.12 + ready a:1#2 commit=1.12", m)
    assert times(m, 9.5) == {**STARTED, "goodput": 6.5, "boot": 2.5}


def test_without_enough_slots_the_job_waits_for_hosts() -> None:
    script = "0.0 hosts a:1\n1.0 agent-joined a\n3.0 hosts a:1 b:1\n4.0 agent-joined b\n5.0 ready a:0#1 + ready b:0#1"
    m, _ = after(script, min_np=2)
    assert times(m, 5.0) == {"waiting_for_hosts": 3.0, "boot": 2.0}
    m, _ = after("6.0 first a:0#1 in=1 train=1\n7.0 agent-lost b is unreachable", m)
    m, _ = after("7.5 ready a:0#1 in=1 commit=1.1 ticks=1", m)
    assert times(m, 8.0) == {"waiting_for_hosts": 3.5, "boot": 2.0, "goodput": 2.0, "regroup": 0.5}


@pytest.mark.parametrize(("why", "part"), [("draining a:1#1", "drain"), ("ready a:1#2", "regroup")])
def test_a_planned_change_costs_from_the_end_of_tick_k_to_the_next_world(why: str, part: str) -> None:
    script = START + "2.5 draining a:1#1" if part == "drain" else START
    if part == "regroup":
        script = START.replace(" + ready a:1#1", "\n1.5 ready a:1#1").replace("1.0 ready", "1.0 run a:0#1 + ready")
        script = script.replace("\n1.5 ready a:1#1\n2.0 first a:0#1", "\n2.0 first a:0#1") + "2.5 ready a:1#1"
    m, _ = after(script, preemption_window_s=0.0, join_window_s=0.0)
    members = [p.worker for p in m.world.members] if m.world is not None else []
    m, _ = after("2.6 " + " + ".join(f"answer {w} in=1 ticks=10" for w in members), m)
    m, _ = after("3.0 " + f"ready {members[0]} in=1 commit=1.11 ticks=11 paused=0.2", m)
    if part == "drain":
        assert times(m, 3.0)["drain"] == 0.2
        m, _ = after("3.5 ready a:1#1 in=1 commit=1.11 ticks=11 paused=0.7", m)
    assert m.generation == 2
    found = times(m, 3.5)
    assert found["goodput"] == 1.3, "up to the end of the last tick"
    assert found[part] == (0.7 if part == "drain" else 0.2)


def test_time_inside_commit_is_no_goodput() -> None:
    m, _ = after(START + "4.0 heartbeat a:0#1 in=1 ticks=4 commits=0.5 + heartbeat a:1#1 in=1 ticks=4 commits=0.8")
    assert times(m, 4.0) == {**STARTED, "goodput": 1.7, "commit_stall": 0.8}
    m, _ = after("5.0 heartbeat a:0#1 in=1 ticks=6 commits=0.6\n6.0 exit a:1#1 signal=9", m)
    m, _ = after("6.0 ready a:0#1 in=1 commit=1.8 ticks=8 commits=1.0", m)
    assert times(m, 6.0) == {**STARTED, "goodput": 3.5, "commit_stall": 1.0}
    m, _ = after("7.0 first a:0#1 in=2 train=1\n8.0 heartbeat a:0#1 in=2 ticks=2 commits=0.25", m)
    assert times(m, 8.0) == {**STARTED, "goodput": 5.25, "commit_stall": 1.25}, "each generation counts anew"


def test_the_end_of_the_job_counts_from_the_first_member_in_the_exit_gate() -> None:
    m, effects = after(START + "4.0 gate a:0#1 in=1\n5.0 gate a:1#1 in=1\n6.0 exit a:0#1 code=0 + exit a:1#1 code=0")
    assert [type(effect) for effect in effects][-1] is t.EndJob
    assert times(m, 7.0) == {**STARTED, "goodput": 2.5, "exit": 3.0}, "up to the summary"


def test_plain_workers_have_no_ticks() -> None:
    m, _ = after("0.0 hosts a:2\n0.1 agent-joined a\n1.0 store-joined 1", horovod=False)
    assert m.phase_name == "RUNNING(1)"
    assert times(m, 3.0) == {"boot": 1.0, "no_ticks": 2.0}
    assert figures_of(m, 3.0).goodput is None


def test_ticks_of_an_earlier_generation_are_moved_in_the_account_of_the_job() -> None:
    script = (
        START
        + """
    7.5 heartbeat a:0#1 in=1 ticks=12 commit=1.12 + heartbeat a:1#1 in=1 ticks=12 commit=1.10
    7.5 exit a:1#1 signal=9
    7.5 ready a:0#1 in=1 commit=1.12 ticks=12
    8.5 first a:0#1 in=2 train=1
    9.5 heartbeat a:0#1 in=2 ticks=2
    9.5 exit a:0#1 signal=9
    10.5 ready a:1#2 commit=1.10
    """
    )
    m, effects = after(script, regroup_timeout_s=0.0, join_window_s=0.0)
    notes = [e for e in effects if isinstance(e, t.Note) and e.event == "generation_finished"]
    assert [(n.get("generation"), n.get("goodput_s"), n.get("redone_earlier_s")) for n in notes] == [(2, 0.0, 2.0)]
    assert times(m, 10.5)["redone_ticks"] == 4.0, "two ticks of a second each, and two of before at the same rate"
    assert times(m, 10.5)["goodput"] == 4.0


def left_behind(m: Membership, at: float, **changes: object) -> Remains:
    """Return the job of ``m``, whose driver has written its record at ``at`` and died later."""
    assert m.world is not None
    workers = [placement.worker for placement in m.world.members]
    known = Remains(
        epoch=2,
        world=m.world,
        ages=tuple(range(len(workers))),
        next_age=len(workers),
        highest=t.CommitId(1, 2),
        origins=m.ledger.origins,
        hosts=(t.HostSlots("a", 2),),
        lost=frozenset(),
        living=dict.fromkeys(workers, m.generation),
        exited=frozenset(),
        ticks=7,
        has_ended=False,
        gate_is_open=False,
        account=m.ledger.account.until(at),
        failures=m.ledger.failures,
        failed=m.ledger.failed,
        total=m.ledger.total,
        seen_at=6.0,
    )
    return msgspec.structs.replace(known, **changes)


def reattached(remains: Remains) -> Membership:
    return reattach(replace(POLICY, **TWO), remains, 10.0).next  # type: ignore[arg-type]


def test_workers_that_train_without_a_driver_have_goodput() -> None:
    m, _ = after(START)
    m = reattached(left_behind(m, 2.0))
    assert times(m, 12.0) == {**STARTED, "goodput": 10.5}


def test_a_first_tick_without_a_driver_begins_when_the_driver_was_last_seen() -> None:
    m, _ = after("\n".join(START.splitlines()[:-1]))
    m = reattached(left_behind(m, 1.0))
    assert times(m, 12.0) == {"boot": 1.0, "world_formation": 5.0, "goodput": 6.0}


def test_a_world_that_still_forms_goes_on_forming() -> None:
    m, _ = after("\n".join(START.splitlines()[:-1]))
    m = reattached(left_behind(m, 1.0, ticks=0, highest=None))
    assert times(m, 12.0) == {"boot": 1.0, "world_formation": 9.0, "no_ticks": 2.0}


BACK = "10.0 agent-joined a a:0#1=1 + exit a:1#1 signal=9"


def test_a_survivor_proves_the_ticks_that_it_completed_without_a_driver() -> None:
    m, _ = after(START)
    one = {t.WorkerId("a", 0, 1): 1}
    m = reattached(left_behind(m, 2.0, exited=frozenset({t.WorkerId("a", 1, 1)}), living=one))
    assert times(m, 10.0) == {**STARTED, "goodput": 4.5, "no_driver": 4.0}
    m, _ = after(BACK, m)
    m, _ = after("10.0 ready a:0#1 in=1 commit=1.7 ticks=7 paused=1.5", m)
    assert times(m, 10.0) == {**STARTED, "goodput": 7.0, "no_driver": 1.5}


def test_without_a_survivor_no_tick_without_a_driver_is_proven() -> None:
    m, _ = after(START)
    both = frozenset({t.WorkerId("a", 0, 1), t.WorkerId("a", 1, 1)})
    m = reattached(left_behind(m, 2.0, exited=both, living={}))
    m, _ = after("10.0 agent-joined a + exit a:0#1 signal=9 + exit a:1#1 signal=9", m)
    assert times(m, 11.0) == {**STARTED, "goodput": 4.5, "no_driver": 4.0, "boot": 2.0}


def test_a_generation_that_each_new_driver_ends_again_has_failed_once() -> None:
    m, _ = after(START + "4.0 exit a:1#1 signal=9")
    for _ in range(2):
        m = reattached(left_behind(m, 4.5, has_ended=True))
        assert figures_of(m, 10.0).failures == 1


def test_the_account_covers_all_drivers_of_a_job() -> None:
    m, _ = after(START + "4.0 exit a:1#1 signal=9\n4.5 ready a:0#1 in=1 commit=1.2 ticks=5\n5.0 first a:0#1 in=2")
    assert figures_of(m, 5.0).failures == 1
    m = reattached(left_behind(m, 5.0))
    figures = figures_of(m, 12.0)
    assert figures.failures == 1
    assert figures.losses.downtime_s == pytest.approx(1.0)
    assert figures.wall_s == pytest.approx(12.0)
