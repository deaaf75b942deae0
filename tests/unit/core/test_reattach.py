"""Limits on failures, which count over all drivers of a job."""

from __future__ import annotations

import pytest

from elasticstate.core import types as t
from elasticstate.core.reattach import Recorded, Remains, reattach
from elasticstate.core.state import Membership
from elasticstate.driver.record import Record, newer
from elasticstate.options import Options
from tests.kit.core import START, after, ended, published

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
