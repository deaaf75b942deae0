"""Facts that count over all drivers of a job: limits on failures, ended worlds of shards, and unreachable members."""

from __future__ import annotations

import pytest

from elasticstate.core import types as t
from elasticstate.core.diagnostics import waiting_for
from elasticstate.core.reattach import Recorded, Remains, reattach
from elasticstate.core.sharded import find_line
from elasticstate.core.state import Membership
from elasticstate.driver.record import Record, newer
from elasticstate.options import Options
from tests.kit.core import ATTACHED, START, THREE, THREE_HOSTS, after, drive, ended, kinds, notes, published

SURVIVOR, DEAD = t.WorkerId("a", 0, 1), t.WorkerId("a", 1, 1)
DEATH = "3.0 exit a:1#1 signal=9"
READY = "3.1 ready a:0#1 in=1 commit=1.5 ticks=5"


def next_driver(m: Membership, now: float, **facts: object) -> Membership:
    """Return the first state of another driver, which knows the record of this one."""
    record = newer(Record("job", "id", "token", (), Options(command=("true",)), "/", epoch=1), m, (), (now, now))
    assert record is not None
    known = {name: getattr(record, name) for name in Recorded.__struct_fields__} | {"epoch": 2}
    told = {"lost": frozenset(), "exited": frozenset(), "ticks": 5, "has_ended": False, "gate_is_open": False}
    return reattach(m.policy, Remains(**{**known, **told, **facts}), now).next  # type: ignore[arg-type]


def test_failures_under_earlier_drivers_count_towards_the_reset_limit() -> None:
    m, _ = after(f"{START}\n{DEATH}\n{READY}\n3.2 ready a:1#2\n3.5 first a:0#1 in=2", reset_limit=1)
    m = next_driver(m, 4.0, living={SURVIVOR: 2, t.WorkerId("a", 1, 2): 2})
    m, _ = after("4.1 agent-joined a a:0#1=2 a:1#2=2\n5.0 exit a:1#2 signal=9", m)
    _, effects = after("5.1 ready a:0#1 in=2 commit=2.5 ticks=5", m)
    cause = ended(effects).root_cause
    assert cause is not None
    assert "reset limit: 2 generations have failed, --reset-limit is 1" in cause.reason


@pytest.mark.parametrize("has_counted", [False, True])
def test_a_failure_at_which_the_driver_dies_counts_once(has_counted: bool) -> None:
    m, _ = after("\n".join([START, DEATH, *([READY] if has_counted else [])]), min_np=2, reset_limit=1)
    assert m.phase_name == ("WAITING" if has_counted else "FORMING(2)")
    m = next_driver(m, 4.0, living={SURVIVOR: 1}, exited=frozenset({DEAD}), has_ended=True)
    m, _ = after("4.1 agent-joined a a:0#1=1\n4.2 exit a:1#1 signal=9", m)
    m, effects = after("4.3 ready a:0#1 in=1 commit=1.5 ticks=5\n6.0 ready a:1#2", m)
    assert published(effects).generation == 2
    assert m.ledger.resets == 1


def test_the_only_report_that_all_have_attached_counts_after_the_next_driver_has_started_too() -> None:
    """Host c has the report. It is away while the next world begins, and while that driver is replaced."""
    began = ATTACHED.format(7) + "1.2 first a:0#1 in=1\n2.0 exit b:0#1 signal=9 held=1.0"
    m, _ = drive(began, np=3, min_np=1, max_np=3, replicas=0)
    m, _ = drive("2.1 ready a:0#1 in=1 commit=1.0 + ready c:0#1 in=1 commit=1.0\n2.2 agent-unreachable c silent", m)
    m, _ = drive("2.3 ready a:0#1 in=2 commit=2.0 previous=1.0", m)
    m = next_driver(m, 3.0, living={SURVIVOR: 3}, lost=frozenset({"b", "c"}))
    m, _ = drive("3.1 agent-lost b exited + agent-lost c silent + agent-joined a a:0#1=3 0=2.0,1.0", m)
    m, _ = drive("3.2 agent-joined c 0=2.0,1.0 + attached c:0#1 in=2 digests=5,6", m)
    found = find_line(m)
    assert found is not None
    assert found[0] == t.CommitId(2, 0)


@pytest.mark.parametrize("newest", ["time", "heartbeat b:0#1 in=2 ticks=4 commit=2.4"])
def test_the_next_driver_waits_for_an_unreachable_member_as_the_last_one_would(newest: str) -> None:
    """Host a has the commits of generation 1, host c those of generation 2. Host b loses power, and c is cut off."""
    m, _ = drive(f"{THREE_HOSTS}1.1 first a:0#1 in=1\n2.0 agent-lost a exited", **THREE)
    m, _ = drive("2.1 ready b:0#1 in=1 commit=1.3 + ready c:0#1 in=1 commit=1.3\n2.2 first b:0#1 in=2", m)
    m, _ = drive(f"2.5 {newest}", m)
    m = next_driver(m, 3.0, living={}, lost=frozenset({"c"}))
    m, _ = drive("3.1 agent-joined b + agent-unreachable c silent + agent-joined a 0=1.3", m)
    m, effects = drive("4.0 ready a:0#1 commit=1.3 + ready b:0#2\n10.0 time", m)
    assert "World" not in kinds(effects)
    assert any("c:0 retains the newest commit (2, " in line for line in waiting_for(m, 10.1))
    returned, _ = drive("11.0 agent-joined c 0=2.9,2.8", m)
    _, effects = drive("11.1 ready c:0#2 commit=2.9", returned)
    world = published(effects)
    assert (world.members[world.root].worker.host, world.lacking) == ("c", (0, 1))
    m, effects = drive(f"{10.1 + m.policy.regroup_timeout_s} time", m)
    assert published(effects).generation == 3
    assert "c:0 is given up" in str(notes(effects, "warning"))
