"""The end of a job says whether the script itself has failed: another attempt would fail in the same way."""

from __future__ import annotations

import pytest

from elasticstate.core import types as t
from elasticstate.core.state import Membership
from elasticstate.core.step import step
from tests.kit.core import RUNNING, THREE, drive, ended, kinds

LEFT = "ready a:0#1 in=1 commit=1.0 + ready a:1#1 in=1 commit=1.0"
GATE = RUNNING + "2.0 gate a:0#1 in=1 + gate a:1#1 in=1 + gate a:2#1 in=1\n"
ROUND = "0.0 hosts a:3\n0.1 agent-joined a\n"
SOON = {"reset_limit": 0}
CONFIRMED = f"""{RUNNING}
2.0 suspect a:2#1 in=1 error=ValueError
9.0 heartbeat a:0#1 in=1 ticks=2 + heartbeat a:1#1 in=1 ticks=2
9.1 failure a:1#1 in=1
9.2 {LEFT} + ready a:2#1 in=1 commit=1.0
"""


@pytest.mark.parametrize(
    ("script", "own", "policy"),
    [
        (f"{RUNNING}2.0 exit a:2#1 code=1\n2.1 {LEFT}", True, SOON),
        (f"{RUNNING}2.0 exit a:2#1 signal=9\n2.1 {LEFT}", False, SOON),
        (CONFIRMED, True, SOON),
        (f"{RUNNING}2.0 unresponsive a:2#1\n2.1 {LEFT}", False, SOON),
        (f"{RUNNING}2.0 agent-lost a was killed\n900.0 time", False, {}),
        (f"{RUNNING}2.0 exit a:2#1 code=1 + exit a:1#1 code=1\n2.1 ready a:0#1 in=1 commit=1.5\n900.0 time", False, {}),
        (f"{ROUND}1.0 exit a:0#1 code=2 + exit a:1#1 code=2 + exit a:2#1 code=2", True, {}),
        (
            f"{ROUND}1.0 store-joined 1\n2.0 exit a:1#1 code=1\n2.1 exit a:0#1 signal=15 + exit a:2#1 signal=15",
            True,
            SOON,
        ),
        (
            f"{ROUND}1.0 store-joined 1\n2.0 exit a:1#1 signal=11\n2.1 exit a:0#1 signal=15 + exit a:2#1 signal=15",
            False,
            SOON,
        ),
        (f"{GATE}3.0 exit a:0#1 code=0 + exit a:1#1 code=3 + exit a:2#1 code=0", True, {}),
        (f"{GATE}3.0 exit a:0#1 code=0 + exit a:1#1 code=0 + exit a:2#1 signal=9", False, {}),
    ],
    ids=(
        *(
            "an exit code",
            "a signal",
            "a confirmed error",
            "a hang",
            "a lost host",
            "a time-out after an exit code",
            "every worker at once",
        ),
        *(
            "an exit code without run",
            "a crash without run",
            "an exit code behind the gate",
            "a signal behind the gate",
        ),
    ),
)
def test_the_script_has_failed_if_a_worker_has_ended_with_an_exit_code(
    script: str, own: bool, policy: dict[str, int]
) -> None:
    lines = script.splitlines()
    effects: list[t.Effect] = []
    m: Membership | None = None
    for line in lines:
        m, more = drive(line, m, **policy) if line.strip() else (m, [])
        effects += more
    assert (ended(effects).succeeded, ended(effects).own_error) == (False, own)


def test_behind_the_gate_the_first_death_is_the_cause_although_it_is_reported_last() -> None:
    m, _ = drive(GATE + "3.0 exit a:0#1 code=1 at=20 + exit a:1#1 code=1 at=21")
    _, effects = drive("3.1 exit a:2#1 signal=9 at=10", m)
    end = ended(effects)
    assert (end.own_error, end.root_cause and end.root_cause.signal) == (False, 9)


def test_who_exits_after_an_own_error_keeps_no_newer_commit_from_being_awaited() -> None:
    m, _ = drive("0.0 hosts a:2 b:1\n0.1 agent-joined a + agent-joined b", **THREE)
    m, _ = drive("1.0 ready a:0#1 + ready a:1#1 + ready b:0#1\n1.1 first a:0#1 in=1", m)
    m, _ = drive("2.0 suspect a:1#1 in=1 error=ValueError + suspect b:0#1 in=1 error=ValueError", m)
    held = {"a:0#1": "1.2", "a:1#1": "1.4", "b:0#1": "1.4"}
    beats = " + ".join(f"heartbeat {worker} in=1 ticks=4 commit={commit}" for worker, commit in held.items())
    m, effects = drive(f"9.0 {beats}", m)
    assert kinds(effects) == ["ConfirmOwnError", "ConfirmOwnError"]
    m, _ = drive("9.1 exit b:0#1 code=1 held=1.4,1.3", m)
    behind = t.Ready(1, t.CommitId(1, 2), None, "a:5000", 4, behind=True)  # it has ended ticks without training
    m, effects, reason = step(m, t.FromWorker(t.WorkerId("a", 0, 1), behind), 9.2)
    assert "World" not in kinds(list(effects))
    assert reason == "waiting for a:1, which retains the newest commit (1, 4)"
