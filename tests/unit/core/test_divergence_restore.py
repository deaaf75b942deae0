"""``--divergence restore`` in the core: which commits may be overwritten, and from which one the next world starts."""

from __future__ import annotations

import pytest

from elasticstate.core import types as t
from elasticstate.core.divergence import suspect_lines
from elasticstate.core.state import Forming, Membership, Running
from elasticstate.driver.durable import plan_copy, plan_last
from tests.kit.core import ALL_KEPT, RUNNING, attach, drive, kinds, notes, only, published

TWO = """
0.0 hosts a:1 b:1
0.1 agent-joined a + agent-joined b
1.0 ready a:0#1 + ready b:0#1
1.1 first a:0#1 in=1
"""


def running(script: str = RUNNING, **policy: object) -> Membership:
    return drive(script, divergence="restore", **policy)[0]


def digests(tick: int, *values: int | None, generation: int = 1, hosts: str = "a:0#1 a:1#1 a:2#1") -> str:
    """Return events: the digest of this tick's commit, of each rank that has sent one."""
    sent = zip(hosts.split(), values, strict=False)
    found = [(name, value) for name, value in sent if value is not None]
    return " + ".join(f"digests {name} in={generation} digests={tick - 1}:{tick}:{value}" for name, value in found)


def verdicts(effects: list[t.Effect]) -> list[tuple[int, int]]:
    return [(effect.equal, effect.compared) for effect in effects if isinstance(effect, t.CommitsCompared)]


def test_commits_that_are_equal_on_all_members_are_told_at_once() -> None:
    m, effects = drive(f"2.0 {digests(1, 7, 7)}", running())
    assert verdicts(effects) == []
    m, effects = drive(f"2.1 {digests(1, None, None, 7)}", m)
    assert verdicts(effects) == [(1, 1)]
    assert m.ledger.digests.pending_since == float("inf")


def test_no_verdicts_are_sent_without_restore() -> None:
    _, effects = drive(f"2.0 {digests(1, 7, 7, 7)}", drive(RUNNING)[0])
    assert verdicts(effects) == []


def test_a_commit_that_one_member_lacks_is_not_equal_and_nobody_waits_for_it() -> None:
    m, effects = drive(f"2.0 {digests(1, 7, 7, 7)} + {digests(2, 8, 8)}", running())
    assert verdicts(effects) == [(1, 1)]
    _, effects = drive(f"2.1 {digests(2, None, None, t.LACKED)}", m)
    assert verdicts(effects) == [(1, 2)]
    _, effects = drive(f"2.1 {digests(3, None, None, 9)}", m)  # the next digest of a member proves it as well
    assert verdicts(effects) == [(1, 2)]


def test_a_member_without_inputs_takes_no_part() -> None:
    m, _ = drive(f"2.0 {digests(1, 7, 7, 7)} + {digests(2, None, None, t.OUT_OF_INPUTS)}", running())
    m, effects = drive(f"2.1 {digests(2, 8, 8)} + {digests(3, 9, 9)}", m)
    assert verdicts(effects) == [(3, 3)]
    _, effects = drive(f"2.2 {digests(4, 5, 5, 5)}", m)
    assert verdicts(effects) == [(4, 4)]


def test_members_that_make_no_commits_are_not_awaited_for_ever() -> None:
    m, effects = drive(f"2.0 {digests(1, 7)} + heartbeat a:1#1 in=1 ticks=3 + heartbeat a:2#1 in=1 ticks=3", running())
    assert verdicts(effects) == []
    limit_s = m.policy.regroup_timeout_s
    m, effects = drive(f"{1.9 + limit_s} time", m)
    assert verdicts(effects) == []
    assert m.deadlines["members without commits"] == 2.0 + limit_s
    m, effects = drive(f"{2.0 + limit_s} time", m)
    assert verdicts(effects) == [(1, 1)]
    _, effects = drive(f"{2.1 + limit_s} {digests(2, 8)}", m)
    assert verdicts(effects) == [(2, 2)]


def test_a_digest_that_is_lost_is_not_awaited_for_ever() -> None:
    sent = f"{digests(1, 7, 7, 7)} + {digests(2, 8, 8)} + heartbeat a:2#1 in=1 ticks=3"
    m, effects = drive(f"2.0 {sent}", running())
    assert verdicts(effects) == [(1, 1)]
    m, effects = drive(f"{2.0 + m.policy.regroup_timeout_s} time", m)
    assert verdicts(effects) == [(1, 2)]
    _, effects = drive(f"{2.1 + m.policy.regroup_timeout_s} {digests(3, 9, 9, 9)}", m)
    assert verdicts(effects) == [(3, 3)], "it makes commits, so they count"


def test_a_member_that_has_not_ended_the_tick_is_awaited() -> None:
    m, _ = drive(f"2.0 {digests(1, 7, 7)} + heartbeat a:2#1 in=1 ticks=0", running())
    _, effects = drive("3000.0 time", m)
    assert verdicts(effects) == []


READY = (
    "ready a:0#1 in=1 commit=1.{0} previous=1.{1} ticks={0} + ready a:2#1 in=1 commit=1.{0} previous=1.{1} ticks={0}"
)


def test_the_rank_that_differs_is_replaced_and_the_others_go_back_to_the_newest_equal_commit() -> None:
    m, effects = drive(f"2.0 {digests(4, 7, 7, 7)} + {digests(5, 8, 9, 8)}", running(min_np=3))
    assert verdicts(effects) == [(4, 4)]
    (note,) = notes(effects, "divergence")
    assert note.get("ranks") == [1]
    assert str(note.get("text")).endswith("of the other 2 ranks; the job goes back to commit (1, 4)")
    assert isinstance(m.phase, Running), "the workers are asked for the value first"
    m, effects = drive("4.0 time", m)
    assert isinstance(m.phase, Forming)
    assert only(effects, t.StopWorker) == t.StopWorker(
        t.WorkerId("a", 1, 1), "values of its worker differ in commit (1, 5)", True
    )
    assert only(effects, t.End).cause == note.get("text")  # type: ignore[union-attr]
    assert kinds(effects).count("host_cooldown") == 1
    m, effects = drive(f"4.1 exit a:1#1 signal=9 held=1.5,1.4\n4.1 {READY.format(5, 4)}", m)
    assert all(worker.ready is None or worker.ready.commit == t.CommitId(1, 4) for worker in m.workers.values())
    assert only(effects, t.StartWorker).worker == t.WorkerId("a", 1, 2)  # type: ignore[union-attr]
    m, effects = drive("6.0 ready a:1#2 commit=1.5 previous=1.4", m)
    world = published(effects)
    assert (world.start, world.lacking) == (t.CommitId(1, 4), ())
    assert [str(member.worker) for member in world.members] == ["a:0#1", "a:1#2", "a:2#1"], "it takes the rank"
    m, effects = drive("6.1 first a:0#1 in=2", m)
    assert notes(effects, "training_resumed")[0].get("ticks_lost") == 1


def test_the_end_comes_as_soon_as_the_value_is_found() -> None:
    script = f"""2.0 {digests(4, 7, 7, 7)} + {digests(5, 8, 9, 8)}
    2.1 digest_answer a:0#1 in=1 question=0:0:0 parts=5,50 + digest_answer a:1#1 in=1 question=0:0:0 parts=5,60
    2.2 digest_answer a:0#1 in=1 question=5:0:0 parts=3,4 names=x,y + """
    m, effects = drive(f"{script}digest_answer a:1#1 in=1 question=5:0:0 parts=3,5 names=x,y", running())
    assert "the first value that differs is 'y'" in only(effects, t.End).cause  # type: ignore[union-attr]
    assert isinstance(m.phase, Forming)


def test_a_failure_ends_the_search_and_the_rank_that_differs_is_replaced_at_once() -> None:
    m, effects = drive(f"2.0 {digests(1, 7, 7, 7)} + {digests(2, 8, 9, 8)}", running())
    assert "StopWorker" not in kinds(effects), "members are asked for the value"
    m, effects = drive("2.1 failure a:0#1 in=1", m)
    assert isinstance(m.phase, Forming)
    stop = only(effects, t.StopWorker)
    assert isinstance(stop, t.StopWorker)
    assert stop.worker == t.WorkerId("a", 1, 1)
    assert drive("2.1 time", m)[1] == []


def test_two_ranks_both_go_back_and_none_is_replaced() -> None:
    two = {"np": 2, "min_np": 2, "max_np": 2}
    hosts = "a:0#1 b:0#1"
    m, _ = drive(f"2.0 {digests(1, 7, 7, hosts=hosts)} + {digests(2, 8, 9, hosts=hosts)}", running(TWO, **two))
    m, effects = drive("4.0 time", m)
    assert "StopWorker" not in kinds(effects)
    assert "host_cooldown" not in kinds(effects)
    ready = "ready {}:0#1 in=1 commit=1.2 previous=1.1 ticks=2"
    m, effects = drive(f"4.1 {ready.format('a')} + {ready.format('b')}", m)
    assert published(effects).start == t.CommitId(1, 1)
    assert m.ledger.highest == t.CommitId(1, 1)
    assert list(suspect_lines(m, 5.0)) == []
    m, effects = drive(f"5.0 first a:0#1 in=2\n6.0 {digests(1, 1, 2, generation=2, hosts=hosts)}", m)
    (note,) = notes(effects, "divergence")
    assert note.get("suspects") == ["a", "b"]
    assert list(suspect_lines(m, 6.0)) == [
        f"host {host} is suspect: 2 divergences within an hour" for host in ("a", "b")
    ]
    assert list(suspect_lines(m, 3602.1)) == []


def test_a_divergence_in_the_last_commit_is_found_before_the_exit_gate_opens() -> None:
    gates = " + ".join(f"gate {name} in=1" for name in ("a:0#1", "a:1#1", "a:2#1"))
    _, effects = drive(f"2.0 {digests(4, 7, 7, 7)} + {digests(5, 8, 8, 9)} + {gates}", running())
    assert "OpenGate" not in kinds(effects)
    assert only(effects, t.End).at_tick is None  # type: ignore[union-attr]
    _, effects = drive(f"2.0 {digests(4, 7, 7, 7)} + {digests(5, 8, 8, 8)} + {gates}", running())
    assert "OpenGate" in kinds(effects)


def test_while_the_job_is_stopped_nobody_waits_for_a_verdict() -> None:
    m, _ = drive(f"2.0 {digests(4, 7, 7, 7)}\n2.1 stop SIGTERM\n2.2 exit a:2#1 signal=15", running())
    m, effects = drive(f"2.3 {digests(5, 8, 8)}", m)
    assert verdicts(effects) == [(5, 5)]
    m, effects = drive(f"2.4 {digests(6, 8, 9)}", m)
    assert verdicts(effects) == [(5, 6)]
    assert "goes back" not in str(notes(effects, "divergence")[0].get("text"))
    m, effects = drive(f"2.5 {digests(7, 8, 8)}", m)
    assert verdicts(effects) == [(7, 7)]
    assert "End" not in kinds(effects)


def ended(script: str) -> tuple[Membership, list[t.Effect]]:
    """Return the state after the death of rank 1, whose slot is not used again."""
    policy = {"min_np": 2, "np": 3, "cooldown_range_s": (1000.0, 1000.0)}
    m, _ = drive(script, running(**policy))
    return drive("2.5 exit a:1#1 signal=9", m)


@pytest.mark.parametrize(
    ("sent", "start"),
    [
        (f"{digests(4, 7, 7, 7)} + {digests(5, 8, 8, 8)}", 5),
        (f"{digests(4, 7, 7, 7)} + {digests(5, 8, None, 8)}", 4),  # dead before it has sent the digest
        (f"{digests(4, 7, 7, 7)} + {digests(5, 8, 9, 8)}", 4),  # it differed
        (f"{digests(4, 7, 7, 7)} + {digests(5, 8, 8)}", 4),  # a living member has not sealed it
        (f"{digests(4, 7, 7, 7)} + {digests(5, None, 9, 8)}", 4),
    ],
)
def test_a_death_while_the_verdict_is_pending(sent: str, start: int) -> None:
    m, effects = ended(f"2.0 {sent}")
    ready = READY.format(5, 4)
    if "digests a:2#1 in=1 digests=4:5" not in sent:
        ready = ready.replace("a:2#1 in=1 commit=1.5 previous=1.4", "a:2#1 in=1 commit=1.4 previous=1.3")
    if "digests a:0#1 in=1 digests=4:5" not in sent:
        ready = ready.replace("a:0#1 in=1 commit=1.5 previous=1.4", "a:0#1 in=1 commit=1.4 previous=1.3")
    m, effects = drive(f"2.6 {ready}", m)
    assert published(effects).start == t.CommitId(1, start)
    assert published(effects).lacking == ()


def test_a_planned_change_while_the_verdict_is_pending_starts_from_a_commit_that_is_equal() -> None:
    policy = {"np": 2, "min_np": 2, "max_np": 3}
    script = RUNNING.replace(" + ready a:2#1", "")
    both = "ready a:0#1 in=1 commit=1.6 previous=1.5 ticks=6 + ready a:1#1 in=1 commit=1.6 previous=1.5 ticks=6"
    for last, start in ((8, 6), (9, 5)):
        m, _ = drive(f"2.0 {digests(5, 7, 7)}\n3.0 ready a:2#1", running(script, **policy))
        m, effects = drive("4.0 answer a:0#1 in=1 ticks=5 + answer a:1#1 in=1 ticks=5", m)
        assert only(effects, t.End).at_tick == 6  # type: ignore[union-attr]
        m, effects = drive(f"4.1 {digests(6, 8, last)} + {both}", m)
        while "World" not in kinds(effects):
            assert m.deadlines, m.phase
            m, effects = drive(f"{min(m.deadlines.values())} time", m)
        assert published(effects).start == t.CommitId(1, start)


def test_rejected_commits_are_not_used_whoever_returns_with_them() -> None:
    policy = {"np": 2, "min_np": 1, "max_np": 2, "elastic_timeout_s": 50.0}
    hosts = "a:0#1 b:0#1"
    m, _ = drive(f"2.0 {digests(1, 7, 7, hosts=hosts)} + {digests(2, 8, 9, hosts=hosts)}", running(TWO, **policy))
    m, _ = drive("2.1 agent-lost b is unreachable + agent-lost a is unreachable", m)
    m, effects = drive("40.0 agent-joined a 0=1.2,1.1", m)
    assert m.slots[t.SlotId("a", 0)].retained == t.CommitId(1, 1)
    m, effects = drive("41.0 ready a:0#2 commit=1.2 previous=1.1", m)
    while "World" not in kinds(effects):
        m, effects = drive(f"{min(m.deadlines.values())} time", m)
    assert published(effects).start == t.CommitId(1, 1)


def test_a_rejected_commit_is_used_when_a_slot_proves_later_that_it_is_equal() -> None:
    """A new driver does not hear the digest of a member that has died. Another member was slow to leave: its newer
    commit proves that the last driver had found the commit before it to be equal."""
    policy = {"np": 2, "min_np": 2, "max_np": 2}
    m, _ = drive(
        f"2.0 heartbeat b:0#1 in=1 commit=1.2 previous=1.0 ticks=2 + {digests(2, None, 7)}", running(TWO, **policy)
    )
    m, _ = drive(f"2.1 agent-lost a is unreachable\n{2.2 + m.policy.regroup_timeout_s} time", m)
    assert m.slots[t.SlotId("b", 0)].retained == t.CommitId(1, 0)
    m, effects = drive(
        "40.0 ready b:0#1 in=1 commit=1.4 previous=1.2 ticks=4\n41.0 agent-joined a\n42.0 ready a:0#2", m
    )
    world = published(effects)
    assert world.start == t.CommitId(1, 2)
    assert m.ledger.highest == t.CommitId(1, 2)


def test_the_first_commit_of_a_world_has_not_overwritten_its_start() -> None:
    policy = {"np": 2, "min_np": 2, "max_np": 2}
    m, _ = drive("2.0 sealed a:0#1 commit=1.1 + sealed b:0#1 commit=1.1", running(TWO, **policy))
    m, _ = drive(f"2.1 {digests(1, 7, 8, hosts='a:0#1 b:0#1')}", m)
    assert {slot.retained for slot in m.slots.values()} == {t.CommitId(1, 0)}


def test_a_late_report_of_the_first_commit_hides_no_newer_one() -> None:
    newer = "2.0 heartbeat a:0#1 in=1 commit=1.5 previous=1.4 ticks=5"
    m, _ = drive(f"{newer}\n2.1 sealed a:0#1 commit=1.1\n2.2 exit a:0#1 signal=9", running())
    slot = m.slots[t.SlotId("a", 0)]
    assert (slot.retained, slot.previous) == (t.CommitId(1, 5), t.CommitId(1, 4))


def test_the_commit_before_is_used_if_all_members_die_before_their_last_digests_arrive() -> None:
    """A slot that holds it has no older one any more, which had proven it to be equal."""
    policy = {"np": 2, "min_np": 2, "max_np": 2}
    m, effects = drive(
        "2.0 exit a:0#1 signal=9 held=1.5,1.4 + exit b:0#1 signal=9 held=1.4,1.3", running(TWO, **policy)
    )
    assert [worker.incarnation for worker in m.workers] == [2, 2]
    m, effects = drive("3.0 ready a:0#2 commit=1.5 previous=1.4 + ready b:0#2 commit=1.4 previous=1.3", m)
    while "World" not in kinds(effects):
        m, effects = drive(f"{min(m.deadlines.values())} time", m)
    assert published(effects).start == t.CommitId(1, 4)


def test_a_job_that_differs_at_its_first_commit_again_and_again_ends() -> None:
    two = {"np": 2, "min_np": 2, "max_np": 2, "max_no_progress": 2}
    m, effects = running(TWO, **two), []
    for g in (1, 2):
        sent = digests(1, 8, 9, generation=g, hosts="a:0#1 b:0#1")
        m, _ = drive(f"{10 * g}.0 {sent}\n{10 * g + 3}.0 time", m)
        both = " + ".join(f"ready {host}:0#1 in={g} commit={g}.1 previous={g}.0 ticks=1" for host in "ab")
        m, effects = drive(f"{10 * g + 4}.0 {both}", m)
        if g == 1:
            assert published(effects).start == t.CommitId(1, 0)
    end = only(effects, t.EndJob)
    assert "no progress: 2 generations in a row failed without a commit" in end.root_cause.reason  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------- with shards and copies

HELD = " + ".join(f"heartbeat {host}:0#1 in=1 ticks=5 commit=1.5 previous=1.4" for host in "abc")
ABC = "a:0#1 b:0#1 c:0#1"


def test_a_commit_is_replicated_when_it_is_known_to_be_equal() -> None:
    script = f"1.2 first a:0#1 in=1 + {ALL_KEPT.format('1.0')}\n2.0 {HELD}"
    m, effects = drive(script, attach(divergence="restore")[0])
    assert "Replicate" not in kinds(effects)
    m, effects = drive(f"2.1 {digests(4, 7, 7, 7, hosts=ABC)}", m)
    assert [effect.commit for effect in effects if isinstance(effect, t.Replicate)] == [t.CommitId(1, 4)]


def test_a_sharded_job_goes_back_to_the_line_that_is_equal() -> None:
    m, _ = drive(f"1.2 first a:0#1 in=1\n2.0 {HELD}", attach(divergence="restore", min_np=3, replicas=0)[0])
    m, _ = drive(f"2.1 {digests(4, 7, 7, 7, hosts=ABC)} + {digests(5, 8, 9, 8, hosts=ABC)}\n4.2 time", m)
    ready = " + ".join(f"ready {host}:0#1 in=1 commit=1.5 previous=1.4 ticks=5 shards=1" for host in "ac")
    m, _ = drive(f"4.3 exit b:0#1 signal=9 held=1.5,1.4\n4.4 {ready}", m)
    m, effects = drive("6.0 ready b:0#2 commit=1.5 previous=1.4 shards=1", m)
    world = published(effects)
    assert world.line == t.CommitId(1, 4)
    assert {source.copy.commit for source in world.sources} == {t.CommitId(1, 4)}


def test_a_durable_copy_is_made_of_a_commit_that_is_known_to_be_equal() -> None:
    held = " + ".join(f"heartbeat a:{slot}#1 in=1 ticks=5 commit=1.5 previous=1.4" for slot in range(3))
    m, _ = drive(f"2.0 {held} + {digests(5, 7, 7)}", running())
    assert plan_copy(m, 1.0, 2.0, 0.5, None) is None
    m, _ = drive(f"2.1 {digests(4, 6, 6, 6)}", running())
    m, _ = drive(f"2.2 {held} + {digests(5, 7, 7)}", m)
    plan = plan_copy(m, 1.0, 2.2, 0.5, None)
    assert plan is not None
    assert plan.first == t.CommitId(1, 4)
    assert plan_last(m) == plan
