"""The health check of hosts: nothing starts on a host before it is known to be well, and nobody waits for that."""

from __future__ import annotations

import pytest

from elasticstate.core import types as t
from elasticstate.core.diagnostics import hosts_in_cooldown, waiting_for
from elasticstate.core.state import Membership
from elasticstate.core.step import next_deadline
from tests.kit.core import drive, ended, kinds, notes

CHECKED = {"health_check": "check", "cooldown_range_s": (10.0, 600.0)}
PAIR = {"np": 2, "min_np": 1, "max_np": 2, **CHECKED}
BOTH = "0.0 hosts a:1 b:1\n0.1 agent-joined a + agent-joined b\n"
TRAINS = BOTH + "0.5 healthy a + healthy b\n1.0 ready a:0#1 + ready b:0#1\n1.1 first a:0#1 in=1\n"
ALONE = BOTH + "0.5 healthy a + sick b the disk is full\n1.0 ready a:0#1\n6.0 time\n6.1 first a:0#1 in=1\n"


def asked(effects: list[t.Effect]) -> list[str]:
    return [effect.host for effect in effects if isinstance(effect, t.CheckHealth)]


def started(effects: list[t.Effect]) -> list[str]:
    return [str(effect.worker) for effect in effects if isinstance(effect, t.StartWorker)]


def until(m: Membership, host: str) -> float:
    return m.hosts[host].cooldown_until


def test_a_new_host_is_asked_first_and_starts_workers_when_it_is_well() -> None:
    m, effects = drive(BOTH, **PAIR)
    assert asked(effects) == ["a", "b"]
    assert started(effects) == []
    about = "host b: agent connected (0.4 s ago, no worker started yet), its health check runs for 0.4 s"
    assert about in waiting_for(m, 0.5)
    m, effects = drive("0.5 healthy b + healthy a", m)
    assert (started(effects), asked(effects)) == (["a:0#1", "b:0#1"], [])


def test_without_the_option_no_host_is_asked() -> None:
    _, effects = drive(BOTH, **(PAIR | {"health_check": None}))
    assert (started(effects), asked(effects)) == (["a:0#1", "b:0#1"], [])


def test_a_sick_host_has_a_cooldown_with_the_reason_and_is_asked_again_after_it() -> None:
    m, _ = drive(BOTH + "0.5 healthy a", **PAIR)
    m, effects = drive("0.6 sick b the disk is full", m)
    (note,) = notes(effects, "host_cooldown")
    assert (note.get("host"), note.get("reason")) == ("b", "health check: the disk is full")
    assert started(effects) == ["a:0#1"]
    (line,) = hosts_in_cooldown(m, 1.0)
    assert line.startswith("host b: in cooldown for ")
    assert line.endswith("s: health check: the disk is full")
    m, effects = drive(f"1.0 ready a:0#1\n{until(m, 'b') - 0.01} time", m)
    assert asked(effects) == []
    at = until(m, "b")
    m, effects = drive(f"{at} time", m)
    assert (asked(effects), started(effects)) == (["b"], [])
    m, effects = drive(f"{at + 1} healthy b", m)
    assert started(effects) == ["b:0#1"]


def test_the_cooldown_grows_with_each_failed_check() -> None:
    m, _ = drive(BOTH + "0.5 healthy a", **PAIR)
    lasted, at = [], 1.0
    for _ in range(3):
        m, _ = drive(f"{at} sick b no memory", m)
        lasted.append(until(m, "b") - at)
        at = until(m, "b")
        m, effects = drive(f"{at} time", m)
        assert asked(effects) == ["b"]
    assert 10 <= lasted[0] < 12
    assert 20 <= lasted[1] < 23
    assert 40 <= lasted[2] < 45
    assert m.hosts["b"].cooldown_reason == "health check: no memory (cooldown 3 in a row)"


def test_nobody_waits_for_a_check_while_others_can_train() -> None:
    m, effects = drive(BOTH + "0.5 healthy a\n5.5 time", **PAIR)
    assert started(effects) == ["a:0#1"], "after --join-window, as beside any host that starts"
    m, effects = drive("6.0 ready a:0#1\n11.0 time", m)
    assert m.phase_name == "RUNNING(1)"
    assert m.hosts["b"].health == "checking"
    m, effects = drive("11.1 first a:0#1 in=1\n30.0 healthy b", m)
    assert started(effects) == ["b:0#1"]
    m, effects = drive("31.0 ready b:0#1", m)
    assert "Hold" in kinds(effects), "it joins"


def test_a_failed_check_stops_no_worker_and_refuses_the_next_start() -> None:
    m, _ = drive(TRAINS.replace("b:1", "b:2"), **(PAIR | {"np": 3, "max_np": 3}))
    m, _ = drive("2.0 ready b:1#1\n2.1 time", m)
    m, effects = drive("20.0 exit b:1#1 signal=11", m)
    assert asked(effects) == ["b"]
    assert started(effects) == []
    m, effects = drive("21.0 sick b ECC error", m)
    assert not {"StopWorker", "Leave", "End"} & {*kinds(effects)}
    assert [str(worker) for worker in m.workers] == ["a:0#1", "b:0#1"]
    assert started(drive(f"{until(m, 'b') - 0.1} time", m)[1]) == []


@pytest.mark.parametrize("failure", ["exit b:0#1 signal=9", "exit b:0#1 code=1"])
def test_after_a_failure_the_host_is_asked_again_before_the_restart(failure: str) -> None:
    m, effects = drive(TRAINS + f"5.0 {failure}", **PAIR)
    assert asked(effects) == ["b"]
    m, effects = drive("5.1 ready a:0#1 in=1\n5.2 first a:0#1 in=2\n8.0 time", m)
    assert m.generation == 2, "the other one trains"
    assert started(effects) == []
    m, effects = drive("9.0 healthy b", m)
    assert started(effects) == ["b:0#2"]


def test_after_an_unresponsive_worker_the_host_is_asked_again() -> None:
    m, _ = drive(TRAINS + "5.0 unresponsive b:0#1", **PAIR)
    _, effects = drive("5.1 exit b:0#1 signal=9", m)
    assert asked(effects) == ["b"]


def test_a_worker_that_ends_as_it_should_is_no_reason_to_ask() -> None:
    m, effects = drive(TRAINS + "5.0 hosts a:1\n5.1 answer a:0#1 in=1 + answer b:0#1 in=1", **PAIR)
    m, effects = drive("5.2 ready a:0#1 in=1 ticks=1 + ready b:0#1 in=1 ticks=1\n5.3 exit b:0#1 code=0", m)
    assert asked(effects) == []
    assert m.hosts["a"].health == "well"


def test_a_sick_host_is_not_used_even_if_the_job_falls_below_min_np() -> None:
    """The job waits with the reason, and ends with --elastic-timeout if the host does not recover."""
    policy = PAIR | {"min_np": 2, "elastic_timeout_s": 100.0, "cooldown_range_s": (200.0, 200.0)}
    m, _ = drive(TRAINS + "5.0 exit b:0#1 signal=9\n5.1 ready a:0#1 in=1\n6.0 sick b no GPU", **policy)
    assert "health check: no GPU" in "\n".join(waiting_for(m, 7.0))
    assert m.phase_name == "WAITING"
    effects: list[t.Effect] = []
    while m.phase_name == "WAITING":
        at = next_deadline(m)
        assert at is not None
        m, effects = drive(f"{at} time", m)
        assert started(effects) == asked(effects) == []
    cause = ended(effects).root_cause
    assert cause is not None
    assert "--elastic-timeout of 100 s expired" in cause.reason
    assert "health check: no GPU" in cause.reason


def test_a_usual_cooldown_gives_way_as_before_if_the_host_is_well() -> None:
    policy = PAIR | {"min_np": 2, "elastic_timeout_s": 100.0, "cooldown_range_s": (200.0, 200.0)}
    m, _ = drive(TRAINS + "5.0 agent-lost b closed\n5.1 ready a:0#1 in=1\n15.1 time", **policy)
    assert m.hosts["b"].agent == "asked", "in its cooldown"
    m, effects = drive("16.0 agent-joined b", m)
    assert (asked(effects), started(effects)) == (["b"], [])
    m, effects = drive("17.0 healthy b", m)
    assert started(effects) == ["b:0#2"]


def test_a_sick_host_whose_agent_is_lost_stays_sick() -> None:
    m, _ = drive(ALONE + "7.0 agent-lost b closed", **PAIR)
    assert m.hosts["b"].health == "sick"
    m, effects = drive("8.0 agent-joined b", m)
    assert asked(effects) == started(effects) == []
    m, effects = drive(f"{until(m, 'b')} time", m)
    assert asked(effects) == ["b"]


def test_a_check_that_was_lost_with_its_agent_is_asked_for_again() -> None:
    m, _ = drive(BOTH + "0.5 agent-lost b closed", **PAIR)
    at = until(m, "b")
    m, effects = drive(f"{at} time\n{at + 1} agent-joined b", m)
    assert asked(effects) == ["b"]


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    m, _ = drive(TRAINS, **PAIR)
    for answer in ("sick b late", "healthy b", "sick z unknown"):
        after, effects = drive(f"2.0 {answer}", m)
        assert (after.hosts, effects) == (m.hosts, [])


def test_plain_workers_start_again_without_the_host_whose_check_hangs() -> None:
    m, _ = drive(BOTH + "0.5 healthy a + healthy b\n1.0 store-joined 1\n5.0 exit b:0#1 signal=9", **PAIR)
    m, effects = drive("6.0 time\n6.1 exit a:0#1 signal=15", m)
    assert m.hosts["b"].health == "checking"
    while not started(effects):
        at = next_deadline(m)
        assert at is not None
        assert at < 15
        m, effects = drive(f"{at} time", m)
    assert started(effects) == ["a:0#2"]
