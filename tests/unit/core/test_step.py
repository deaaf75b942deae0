"""Decisions of the core that the transcripts do not cover, in the same script language."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from elasticstate.core import types as t
from elasticstate.core.diagnostics import waiting_for
from elasticstate.core.state import Membership
from elasticstate.core.step import next_deadline, step
from tests.kit.core import RUNNING, drive, ended, kinds, only, published


def elastic(m: Membership) -> Membership:
    """Return the state of a job whose command is known to use ``run``: its workers start one by one."""
    return replace(m, ledger=msgspec.structs.replace(m.ledger, kind="elastic"))


def warnings_of(effects: list[t.Effect]) -> list[str]:
    return [str(e.get("text")) for e in effects if isinstance(e, t.Note) and e.event == "warning"]


def test_an_exit_with_0_in_mid_training_is_a_failure() -> None:
    _, effects = drive(RUNNING + "2.0 exit a:1#1 code=0")
    end = only(effects, t.End)
    assert isinstance(end, t.End)
    assert end.at_tick is None
    assert end.cause == "a:1#1 exited with 0 without returning from train"


def test_an_answer_to_a_hold_that_was_released_does_not_count() -> None:
    script = RUNNING + "2.0 draining a:2#1\n4.0 time\n9.0 time\n9.1 answer a:0#1 in=1 ticks=3"
    script += " + answer a:1#1 in=1 ticks=3 + answer a:2#1 in=1 ticks=3"
    m, effects = drive(script)
    assert effects == [], "these were sent before the release: the workers have run on"
    _, effects = drive(
        "9.2 answer a:0#1 in=1 ticks=9 to=2 + answer a:1#1 in=1 ticks=9 to=2 + answer a:2#1 in=1 ticks=9 to=2", m
    )
    end = only(effects, t.End)
    assert isinstance(end, t.End)
    assert end.at_tick == 10


def test_three_holds_in_a_row_that_fail_name_the_likely_mistake() -> None:
    _, effects = drive(
        RUNNING + "2.0 draining a:2#1\n4.0 time\n9.0 time\n11.0 time\n16.0 time\n18.0 time", drain_timeout_s=60.0
    )
    warnings = warnings_of(effects)
    assert len(warnings) == 2
    assert "3 holds in a row" in warnings[1]
    assert "Call commit() equally often on all ranks" in warnings[1]


def test_no_interrupt_while_a_member_is_in_the_exit_gate() -> None:
    held, _ = drive(RUNNING + "2.0 draining a:2#1")
    m, effects = drive("2.1 answer a:0#1 in=1 ticks=3 gate", held)
    assert kinds(effects) == ["Release", "release"]
    m, effects = drive("2.2 gate a:0#1 in=1\n8.0 time", m)
    assert effects == []
    _, effects = drive("8.1 gate a:1#1 in=1 + gate a:2#1 in=1", m)
    assert "OpenGate" in kinds(effects)


def test_train_returning_everywhere_before_tick_k_opens_the_gate() -> None:
    script = RUNNING + "2.0 draining a:2#1\n2.1 answer a:0#1 in=1 ticks=3 + answer a:1#1 in=1 ticks=3"
    script += " + answer a:2#1 in=1 ticks=3\n2.2 gate a:0#1 in=1 + gate a:1#1 in=1 + gate a:2#1 in=1"
    m, effects = drive(script)
    assert kinds(effects) == ["OpenGate"]
    assert m.phase_name == "FINISHING(1)"


def test_the_job_ends_when_a_worker_that_left_earlier_has_exited_too_or_after_the_stop_time_out() -> None:
    script = """
        2.0 draining a:2#1
        2.1 answer a:0#1 in=1 ticks=3 + answer a:1#1 in=1 ticks=3 + answer a:2#1 in=1 ticks=3
        2.2 ready a:0#1 in=1 commit=1.3 + ready a:1#1 in=1 commit=1.3 + ready a:2#1 in=1 commit=1.3
        2.3 gate a:0#1 in=2 + gate a:1#1 in=2
        2.4 exit a:0#1 code=0 + exit a:1#1 code=0
    """
    m, effects = drive(RUNNING + script.strip(), stop_timeout_s=10.0)
    assert kinds(effects) == ["worker_exited", "worker_exited"]
    assert waiting_for(m, 2.4) == ("a:2#1 has not exited",)
    _, effects = drive("2.5 exit a:2#1 code=0", m)
    assert kinds(effects) == ["worker_exited", "EndJob"]
    assert ended(effects).succeeded

    assert next_deadline(m) == 12.3
    _, effects = drive("12.3 time", m)
    assert ended(effects).succeeded


def test_the_gate_time_out_ends_the_generation() -> None:
    _, effects = drive(RUNNING + "2.0 gate a:0#1 in=1\n5.0 time", collective_timeout_s=3.0)
    end = only(effects, t.End)
    assert isinstance(end, t.End)
    assert end.cause == (
        "a:1#1 (rank 1), a:2#1 (rank 2) did not enter the exit gate, where the others have waited for 3 s, and made no "
        "progress for --collective-timeout of 3 s. Work after the last tick may call state.progress()"
    )
    assert warnings_of(effects) == [f"generation 1 ends: {end.cause}"], "no worker has died, which would be a reason"


def test_the_gate_time_out_counts_from_the_last_progress_of_those_outside() -> None:
    ticks = "".join(f"\n{at} heartbeat a:1#1 in=1 ticks={at} place=train still=0" for at in range(3, 10))
    m, effects = drive(RUNNING + "2.0 gate a:0#1 in=1" + ticks, collective_timeout_s=3.0)
    assert effects == []
    beat = "heartbeat a:1#1 in=1 ticks=9 place=train"
    m, effects = drive(f"10.0 {beat} still=0\n12.0 {beat} still=2", m)
    assert effects == []
    assert next_deadline(m) == 13.0, "the script called state.progress() at 10.0"
    _, effects = drive("13.0 time", m)
    assert isinstance(only(effects, t.End), t.End)


def test_the_exits_behind_the_gate_are_awaited_without_a_limit_and_reported_once() -> None:
    gate = RUNNING + "2.0 gate a:0#1 in=1 + gate a:1#1 in=1 + gate a:2#1 in=1\n2.5 exit a:1#1 code=0"
    m, effects = drive(gate + "\n31.9 time", collective_timeout_s=3.0)
    assert effects == []
    m, effects = drive("32.0 time", m)
    (note,) = effects
    assert isinstance(note, t.Note)
    assert note.get("who") == "a:0#1 (rank 0), a:2#1 (rank 2)"
    m, effects = drive("9000.0 time", m)
    assert effects == []
    _, effects = drive("9001.0 exit a:0#1 code=0 + exit a:2#1 code=0", m)
    assert ended(effects).succeeded


@pytest.mark.parametrize(("how", "code", "signal"), [("code=3", 3, None), ("signal=11", None, 11)])
def test_an_end_behind_the_gate_other_than_0_fails_the_job_when_all_have_exited(
    how: str, code: int | None, signal: int | None
) -> None:
    script = RUNNING + f"2.0 gate a:0#1 in=1 + gate a:1#1 in=1 + gate a:2#1 in=1\n2.1 exit a:1#1 {how}"
    m, effects = drive(script)
    assert kinds(effects) == ["worker_exited"]
    _, effects = drive("2.2 exit a:0#1 code=0 + exit a:2#1 code=0", m)
    cause = ended(effects).root_cause
    assert cause is not None
    assert (cause.worker, cause.rank, cause.exit_code, cause.signal) == (t.WorkerId("a", 1, 1), 1, code, signal)


def test_a_late_member_keeps_its_slot_and_comes_back_as_a_newcomer() -> None:
    m, effects = drive(
        RUNNING + "2.0 exit a:0#1 signal=9\n2.1 ready a:1#1 in=1 commit=1.5\n2.2 ready a:2#1 in=1 commit=1.5"
    )
    assert published(effects).size == 2
    m, effects = drive(
        RUNNING + "2.0 failure a:0#1 in=1\n2.1 ready a:1#1 in=1 commit=1.5 + ready a:2#1 in=1 commit=1.5\n62.0 time"
    )
    assert [str(p.worker) for p in published(effects).members] == ["a:1#1", "a:2#1"]
    m, _ = drive("62.1 first a:1#1 in=2", m)
    m, effects = drive("70.0 ready a:0#1 in=1 commit=1.5", m)
    assert "Hold" in kinds(effects)
    m, effects = drive("70.1 answer a:1#1 in=2 ticks=4 + answer a:2#1 in=2 ticks=4", m)
    m, effects = drive("70.2 ready a:1#1 in=2 commit=2.5 + ready a:2#1 in=2 commit=2.5", m)
    world = published(effects)
    assert [str(p.worker) for p in world.members] == ["a:1#1", "a:2#1", "a:0#1"]
    assert world.lacking == (2,)


def test_a_world_waits_for_the_late_one_that_alone_may_hold_a_commit() -> None:
    script = "0.0 hosts a:1\n0.1 agent-joined a\n1.0 ready a:0#1\n1.1 first a:0#1 in=1\n2.0 hosts a:2\n4.0 ready a:1#1"
    script += "\n4.1 answer a:0#1 in=1 ticks=3\n10.0 failure a:0#1 in=1\n70.0 time"
    m, effects = drive(script, np=1, min_np=1, max_np=2)
    assert m.phase_name == "WAITING"
    assert "World" not in kinds(effects)
    m, effects = drive("71.0 ready a:0#1 in=1 commit=1.3", m)
    world = published(effects)
    assert world.members[world.root].worker == t.WorkerId("a", 0, 1)


def test_an_overdue_drain_becomes_a_failure_without_the_drained_worker() -> None:
    _, effects = drive(RUNNING + "2.0 draining a:2#1\n4.0 time\n32.0 time")
    assert kinds(effects) == ["StopWorker", "warning", "End", "end"]
    (warning,) = warnings_of(effects)
    assert warning == "generation 1 ends: a:2#1 (rank 2) did not drain within --drain-timeout of 30 s"


@pytest.mark.parametrize("found", ["failure a:0#1 in=1", "ready a:0#1 in=1"])
def test_a_generation_that_ends_without_a_death_has_its_reason_on_the_terminal(found: str) -> None:
    left = " + ".join(f"ready a:{slot}#1 in=1" for slot in range(3))
    m, effects = drive(RUNNING + f"2.0 {found}")
    assert warnings_of(effects) == [], "a death may follow that explains it"
    _, effects = drive(f"2.5 {left}", m)
    (warning,) = warnings_of(effects)
    reason = "reported a broken generation" if "failure" in found else "left generation 1"
    assert warning == f"generation 1 ended: a:0#1 {reason}"
    m, _ = drive("2.1 exit a:2#1 signal=9", m)
    _, effects = drive("2.5 ready a:0#1 in=1 + ready a:1#1 in=1", m)
    assert warnings_of(effects) == [], "the death has a line of its own"


def ends(script: str, **policy: object) -> dict[str, object]:
    """Return for each worker that has ended if its end was expected."""
    found: dict[str, object] = {}
    lines = script.strip().splitlines()
    m, effects = drive(lines[0], **policy)
    for line in lines[1:]:
        m, effects = drive(line, m)
        exits = [e for e in effects if isinstance(e, t.Note) and e.event == "worker_exited"]
        found |= {str(note.get("worker")): note.get("expected") for note in exits}
    return found


DRAINED = """
2.0 draining a:2#1
2.1 answer a:0#1 in=1 ticks=3 + answer a:1#1 in=1 ticks=3 + answer a:2#1 in=1 ticks=3
2.2 ready a:0#1 in=1 commit=1.3 + ready a:1#1 in=1 commit=1.3 + ready a:2#1 in=1 commit=1.3
"""


@pytest.mark.parametrize("end", ["exit a:2#1 code=0", "exit a:2#1 signal=9", "agent-lost a is gone"])
@pytest.mark.parametrize("min_np", [2, 3])
def test_a_worker_that_has_drained_is_not_lost_whatever_ends_it(min_np: int, end: str) -> None:
    """Before the next world, and after it."""
    found = ends(f"{RUNNING}{DRAINED.strip()}\n2.3 {end}", min_np=min_np)
    assert found["a:2#1"] is True
    assert [found[name] for name in found if name != "a:2#1"] == ([False] * 2 if "agent" in end else [])


def test_a_worker_that_dies_before_it_has_drained_is_lost() -> None:
    assert ends(RUNNING + "2.0 draining a:2#1\n2.1 exit a:2#1 signal=9") == {"a:2#1": False}
    overdue = RUNNING + "2.0 draining a:2#1\n4.0 time\n32.0 time\n33.0 exit a:2#1 signal=15"
    assert ends(overdue) == {"a:2#1": False}
    assert ends(RUNNING + "2.0 exit a:2#1 code=0") == {"a:2#1": False}, "train has not returned"


def test_workers_without_run_that_are_stopped_by_plan_are_not_lost() -> None:
    begin = "0.0 hosts a:3\n0.1 agent-joined a\n2.0 store-joined 1\n"
    stopped = "{0} exit a:0#1 signal=15 + exit a:1#1 signal=15 + exit a:2#1 signal=15"
    assert set(ends(f"{begin}9.0 draining a:2#1\n{stopped.format(9.1)}").values()) == {True}
    died = f"{begin}9.0 exit a:2#1 signal=9\n9.1 exit a:0#1 signal=15 + exit a:1#1 signal=15"
    assert ends(died) == {"a:2#1": False, "a:0#1": True, "a:1#1": True}


def test_boots_that_fail_again_and_again_end_the_job_with_the_first_error() -> None:
    script = "0.0 hosts a:2\n0.1 agent-joined a\n"
    script += (
        "1.0 exit a:0#1 signal=9 error=first + exit a:1#1 code=1\n3.0 exit a:0#2 code=1 + exit a:1#2 code=1\n4.0 time\n"
    )
    _, effects = drive(script + "6.0 exit a:0#3 code=1 + exit a:1#3 code=1", np=2)
    cause = ended(effects).root_cause
    assert cause is not None
    assert cause.error == "first"


def test_the_start_time_out_lists_the_last_report_of_each_host() -> None:
    m, _ = drive("0.0 hosts a:4 b:1 c:1 d:2 e:1 f:1", np=8, min_np=8, max_np=8)
    script = """
        1.0 agent-joined a
        2.0 agent-lost b is unreachable
        3.0 agent-joined e
        4.0 agent-draining e SIGTERM to its agent
        5.0 ready a:0#1
        500.0 exit a:1#1 signal=9
        590.0 time
        597.0 agent-lost d exited with 1
        598.0 agent-joined f
        599.0 heartbeat a:2#1 in=0
        599.5 exit a:1#2 code=3
        600.0 time
    """
    _, effects = drive(script, elastic(m))
    cause = ended(effects).root_cause
    assert cause is not None
    reason, _, missing = cause.reason.partition("; missing: ")
    assert reason == "--start-timeout of 600 s expired: 1 worker ready, --min-np is 8"
    assert missing.split("; ") == [
        "a:1 failed 2 times in a row: a:1#1 was killed by SIGKILL (restart in 0.6 s)",
        "a:2 is booting for 599.0 s, last heartbeat 1.0 s ago",
        "a:3 is booting for 599.0 s, no heartbeat yet",
        "host b: agent started (100.0 s ago, not connected yet), the last agent is unreachable",
        "host c: agent started (600.0 s ago, not connected yet)",
        "host d: agent started (3.0 s ago, not connected yet), the last agent exited with 1, "
        "in cooldown for 7.4 s: its agent was lost",
        "host e drains: preemption notice: SIGTERM to its agent",
        "e:0 is stopping",
        "f:0 is booting for 2.0 s, no heartbeat yet",
        "first failure: a:1#1 was killed by SIGKILL",
    ]


@pytest.mark.parametrize(("losses", "agent"), [(1, "asked"), (2, "none")])
def test_the_notice_of_waiting_has_the_reason_why_an_agent_was_lost_once(losses: int, agent: str) -> None:
    """During the next attempt, and before it."""
    m, effects = drive("0.0 hosts a:3" + losses * "\n29.5 agent-lost a is unreachable by ssh: unknown host")
    assert m.hosts["a"].agent == agent
    reasons = [str(effect.get("reason")) for effect in effects if isinstance(effect, t.Note)]
    assert reasons[0] == "is unreachable by ssh: unknown host"
    assert reasons[1].startswith("its agent was lost")
    _, effects = drive("30.0 time", m)
    (note,) = [effect for effect in effects if isinstance(effect, t.Note) and effect.event == "waiting"]
    who = str(note.get("who"))
    assert who.startswith("host a: ")
    assert who.count("is unreachable by ssh: unknown host") == 1


def test_an_agent_that_connects_ends_the_report_of_the_last_loss() -> None:
    script = "0.0 hosts a:3\n1.0 agent-lost a is unreachable\n20.0 time\n21.0 agent-joined a"
    m, _ = drive(script)
    assert not [line for line in waiting_for(m, 21.0) if "unreachable" in line]


def test_a_running_world_names_members_that_are_more_than_a_tick_behind() -> None:
    _, effects = drive(
        RUNNING + "3.0 heartbeat a:0#1 in=1 ticks=8 + heartbeat a:1#1 in=1 ticks=2 + heartbeat a:2#1 in=1 ticks=8\n"
        "33.0 heartbeat a:0#1 in=1 ticks=9 + heartbeat a:2#1 in=1 ticks=9 + heartbeat a:1#1 in=1 ticks=2"
    )
    (note,) = [effect for effect in effects if isinstance(effect, t.Note)]
    assert (note.event, note.get("who")) == ("waiting", "a:1#1 (rank 1)")
    assert str(note.get("remedy")).startswith("Call commit() equally often on all ranks")


def test_a_newcomer_that_does_not_become_ready_is_killed_and_its_slot_has_failed() -> None:
    m, effects = drive(
        RUNNING + "2.0 exit a:2#1 signal=9\n2.1 ready a:0#1 in=1 + ready a:1#1 in=1\n2.2 first a:0#1 in=2"
    )
    assert t.StartWorker(t.WorkerId("a", 2, 2)) in effects
    m, effects = drive("602.2 time", m)
    assert kinds(effects) == ["warning", "StopWorker"]
    assert warnings_of(effects) == ["a:2#2 is killed: not ready within --start-timeout of 600 s"]
    m, effects = drive("602.3 exit a:2#2 signal=9\n603.4 time", m)
    assert t.StartWorker(t.WorkerId("a", 2, 3)) in effects


def test_who_boots_for_too_long_when_the_first_world_forms_gives_its_place_to_another() -> None:
    script = "0.0 hosts a:2 b:2\n0.1 agent-joined a + agent-joined b\n0.2 ready a:0#1"
    m, _ = drive(script, np=3, min_np=2, max_np=3, start_timeout_s=20.0)
    _, effects = drive("20.1 ready b:0#1", m)
    assert "World" in kinds(effects)
    assert only(effects, t.StopWorker) == t.StopWorker(
        t.WorkerId("a", 1, 1), "not ready within --start-timeout of 20 s", kill=True
    )
    started = only(effects, t.StartWorker)
    assert started == t.StartWorker(t.WorkerId("b", 1, 1))


def test_waiting_for_answers_at_any_time() -> None:
    m, _ = drive("0.0 hosts a:1 b:1\n0.1 agent-joined a", np=1, min_np=1, max_np=2)
    assert waiting_for(m, 3.1) == (
        "a:0 is booting for 3.0 s, no heartbeat yet",
        "host b: agent started (3.1 s ago, not connected yet)",
    )
    m, _ = drive(RUNNING + "2.0 exit a:0#1 signal=9")
    assert waiting_for(m, 2.0) == ("a:1#1 has not left generation 1", "a:2#1 has not left generation 1")
    m, _ = drive(RUNNING)
    assert waiting_for(m, 2.0) == ()


def test_a_job_without_hosts_ends_at_the_start_time_out() -> None:
    m, _ = drive("0.0 time")
    assert next_deadline(m) == 30.0
    _, effects = drive("600.0 time", m)
    cause = ended(effects).root_cause
    assert cause is not None
    assert "no hosts: discovery named no host, and no agent connected" in cause.reason


def test_after_the_end_nothing_has_an_effect() -> None:
    m, _ = drive("0.0 time\n600.0 time")
    assert step(m, t.HostsDiscovered((t.HostSlots("a", 1),)), 601.0).next is m


def test_the_first_of_several_errors_is_the_first_by_time_not_by_report() -> None:
    script = RUNNING + "2.0 suspect a:0#1 in=1 + suspect a:1#1 in=1 + suspect a:2#1 in=1\n9.0 time\n"
    ends = "9.1 exit a:0#1 code=1 at=30\n9.2 exit a:1#1 code=1 at=20\n9.3 exit a:2#1 code=1"
    _, effects = drive(script + ends, min_np=1, failure_grace_s=1.0)
    cause = ended(effects).root_cause
    assert cause is not None
    assert (cause.worker, cause.time_ns) == (t.WorkerId("a", 1, 1), 20)


def test_a_death_in_the_same_step_as_reports_of_others_is_the_cause() -> None:
    _, effects = drive(RUNNING + "2.0 failure a:0#1 in=1 + exit a:1#1 signal=9 at=30 + exit a:2#1 signal=11 at=20")
    end = only(effects, t.End)
    assert isinstance(end, t.End)
    assert end.cause == "a:2#1 was killed by SIGSEGV"


def test_what_others_find_broken_by_a_member_with_an_own_error_has_that_error_as_its_cause() -> None:
    script = (
        RUNNING + "2.0 suspect a:0#1 in=1 error=mine\n4.0 heartbeat a:1#1 in=1 ticks=1 + heartbeat a:2#1 in=1 ticks=1"
    )
    m, effects = drive(script)
    assert kinds(effects) == ["ConfirmOwnError"]
    m, effects = drive("4.1 failure a:1#1 in=1 error=closed", m)
    end = only(effects, t.End)
    assert isinstance(end, t.End)
    assert end.cause == "a:0#1 failed with its own error"
    m, _ = drive("4.2 ready a:1#1 in=1 + ready a:2#1 in=1 + exit a:0#1 code=1", m)
    cause = m.ledger.no_progress_cause
    assert cause is not None
    assert (cause.worker, cause.error) == (t.WorkerId("a", 0, 1), "mine")


@pytest.mark.parametrize(
    ("hosts", "lines"),
    [
        ("a:0", ("too few slots: the hosts have 0 slots, --min-np is 2", "host a: has 0 slots in discovery")),
        ("a:1", ("too few slots: the hosts have 1 slot, --min-np is 2",)),
    ],
)
def test_hosts_with_too_few_slots_are_listed(hosts: str, lines: tuple[str, ...]) -> None:
    m, _ = drive(f"0.0 hosts {hosts}")
    assert waiting_for(m, 2.0)[: len(lines)] == lines
    m, effects, _ = step(m, t.TimePassed(), 700.0)
    cause = ended(list(effects)).root_cause
    assert cause is not None
    assert f"missing: {'; '.join(lines)}" in cause.reason


def test_a_host_named_with_0_slots_after_it_had_some_is_not_gone() -> None:
    m, _ = drive("0.0 hosts a:2 b:2\n0.1 agent-joined a + agent-joined b\n0.2 hosts a:2 b:0")
    assert "host b: has 0 slots in discovery" in waiting_for(m, 1.0)
    m, _ = drive("0.3 hosts a:2", m)
    assert "host b: removed by discovery" in waiting_for(m, 1.0)


# ---------------------------------------------------------------------------------------------------------- spares

SPARE = """
0.0 hosts a:2 b:2
0.1 agent-joined a + agent-joined b
1.0 ready a:0#1 + ready a:1#1
"""


def started(effects: list[t.Effect]) -> list[str]:
    return [str(effect.worker) for effect in effects if isinstance(effect, t.StartWorker)]


def test_a_spare_is_started_when_the_world_trains_on_a_host_without_members() -> None:
    m, effects = drive(SPARE, np=2, min_np=1, max_np=2, spares=1)
    assert started(effects) == []
    m, effects = drive("1.1 first a:0#1 in=1", m)
    assert started(effects) == ["b:0#1"]
    m, effects = drive("2.0 ready b:0#1\n30.0 time", m)
    assert kinds(effects) == []  # it is READY, and waits


def test_a_spare_replaces_a_dead_member_in_the_next_world_and_another_one_is_started() -> None:
    m, _ = drive(SPARE + "1.1 first a:0#1 in=1\n2.0 ready b:0#1", np=2, min_np=1, max_np=2, spares=1)
    m, effects = drive("3.0 exit a:1#1 signal=9\n3.1 ready a:0#1 in=1 commit=1.5", m)
    assert m.world is not None
    assert [str(placement.worker) for placement in m.world.members] == ["a:0#1", "b:0#1"]
    assert started(effects) == []
    m, effects = drive("3.2 first a:0#1 in=2", m)
    assert len(started(effects)) == 1


def test_without_spares_no_worker_is_started_beyond_max_np() -> None:
    _, effects = drive(SPARE + "1.1 first a:0#1 in=1", np=2, min_np=1, max_np=2)
    assert started(effects) == []


# ------------------------------------------------------------------------------------------------ preempted hosts


def test_a_preempted_host_that_discovery_names_again_has_no_cooldown_even_if_its_agent_ends_later() -> None:
    m, _ = drive(SPARE, np=2, min_np=1, max_np=2)
    m, _ = drive("2.0 agent-draining b SIGTERM to its agent\n3.0 hosts a:2", m)
    assert m.hosts["b"].agent == "stopping"
    m, _ = drive("3.1 hosts a:2 b:2\n3.2 agent-lost b stopped", m)
    assert m.hosts["b"].cooldown_until == float("-inf")
    assert m.hosts["b"].agent == "asked"


@pytest.mark.parametrize("listen", [None, ":7000"])
def test_a_preempted_host_has_a_cooldown_unless_another_agent_has_dialled_in_there(listen: str | None) -> None:
    m, _ = drive(SPARE, np=2, min_np=1, max_np=2, listen=listen)
    m, _ = drive("2.0 agent-draining b SIGTERM to its agent\n3.0 agent-lost b gone", m)
    assert (m.hosts["b"].cooldown_until > 3.0) == (listen is None)


@pytest.mark.parametrize(("host", "names", "near"), [("a", 7, (2,)), ("a", 8, ()), ("a", 0, ()), ("b", 7, ())], ids=str)
def test_a_newcomer_is_near_if_the_root_has_the_same_names_on_the_same_host(
    host: str, names: int, near: tuple[int, ...]
) -> None:
    hosts = "a:3" if host == "a" else "a:2 b:1"
    m, _ = drive(f"0.0 hosts {hosts}\n0.1 agent-joined a\n0.2 agent-joined b", np=2, min_np=2, max_np=3)
    ids = [t.WorkerId("a", 0, 1), t.WorkerId("a", 1, 1), t.WorkerId(host, 2 if host == "a" else 0, 1)]
    commit = t.CommitId(1, 4)
    for worker in ids[:2]:
        m, effects, _ = step(m, t.FromWorker(worker, t.Ready(0, None, None, "h:1", names=7)), 1.0)
    first = published(list(effects))
    assert (first.lacking, first.near) == ((1,), ()), "no member holds a commit that another one could read"
    m, _, _ = step(m, t.FromWorker(ids[0], t.First(1)), 1.1)
    m, _, _ = step(m, t.FromWorker(ids[2], t.Ready(0, None, None, "h:1", names=names)), 20.0)
    m, _, _ = step(m, t.Several(tuple(t.FromWorker(worker, t.HoldAnswer(1, 3, False, 1)) for worker in ids[:2])), 20.1)
    for worker in ids[:2]:
        m, effects, _ = step(m, t.FromWorker(worker, t.Ready(1, commit, None, "h:1", 4, names=7)), 20.2)
    world = published(list(effects))
    assert (world.root, world.lacking, world.near) == (0, (2,), near)
