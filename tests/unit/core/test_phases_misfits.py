"""New processes that cannot load the state of the job."""

from __future__ import annotations

from elasticstate.core import types as t
from tests.kit.core import RUNNING, drive, ended, kinds

MISFIT = "error=elasticstate.errors.StateMisfitError"
TRAINED = RUNNING + "1.2 heartbeat a:0#1 in=1 ticks=9 commit=1.9 + heartbeat a:1#1 in=1 ticks=9 commit=1.9\n"
ALL_DIE = TRAINED + "2.0 exit a:0#1 signal=9 + exit a:1#1 signal=9 + exit a:2#1 signal=9\n"


def started(effects: list[t.Effect]) -> list[str]:
    return [str(effect.worker) for effect in effects if isinstance(effect, t.StartWorker)]


def test_the_job_ends_when_no_new_process_can_load_the_newest_commit() -> None:
    m, effects = drive(ALL_DIE + f"3.0 exit a:0#2 code=1 {MISFIT}")
    assert "EndJob" not in kinds(effects), "the other slot that holds the commit may still load it"
    _, effects = drive(f"3.1 exit a:1#2 code=1 {MISFIT}", m)
    cause = ended(effects).root_cause
    assert cause is not None
    assert cause.reason.startswith("the newest commit does not fit the objects of a new process")
    assert "StateMisfitError" in cause.error


def test_another_error_is_no_misfit() -> None:
    _, effects = drive(ALL_DIE + f"3.0 exit a:0#2 code=1 {MISFIT}\n3.1 exit a:1#2 code=1 error=ImportError")
    assert "EndJob" not in kinds(effects)


def test_a_process_that_loads_the_commit_after_all_ends_the_suspicion() -> None:
    m, _ = drive(ALL_DIE + f"3.0 exit a:0#2 code=1 {MISFIT}\n4.2 time\n4.5 ready a:0#3 commit=1.9")
    _, effects = drive(f"4.6 exit a:1#2 code=1 {MISFIT}", m)
    assert "EndJob" not in kinds(effects)


def test_the_others_stop_once_for_newcomers_of_another_host() -> None:
    script = """
    0.0 hosts a:1 b:2
    0.1 agent-joined a
    1.0 ready a:0#1
    6.0 time
    6.1 first a:0#1 in=1
    6.2 heartbeat a:0#1 in=1 ticks=3 commit=1.3
    7.0 agent-joined b
    8.0 ready b:0#1
    8.1 answer a:0#1 in=1 ticks=4
    8.2 ready a:0#1 in=1 commit=1.4
    8.3 exit b:0#1 code=1 error=elasticstate.errors.StateMisfitError
    """
    m, effects = drive(script, np=1, min_np=1, max_np=3)
    assert [str(e.worker) for e in effects if isinstance(e, t.StopWorker)] == ["b:1#1"]
    assert started(effects) == []
    (warning,) = [e for e in effects if isinstance(e, t.Note) and e.event == "warning"]
    assert str(warning.get("text")).startswith("slots b:0, b:1: no worker is started there any more")
    m, effects = drive("8.4 exit b:1#1 signal=15\n9.0 ready a:0#1 in=2 commit=1.4\n99.0 time", m)
    assert started(effects) == []
    assert all(m.slots[t.SlotId("b", index)].worker is None for index in (0, 1))
