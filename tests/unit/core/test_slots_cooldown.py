"""The formulas of backoff and cooldown, as tables, and the failures that they count."""

from __future__ import annotations

import pytest

from elasticstate.core import types as t
from elasticstate.core.slots import (
    JITTER,
    backoff_s,
    cooldown_s,
    patience_s,
)
from elasticstate.core.state import Membership
from elasticstate.core.step import next_deadline
from tests.kit.core import RUNNING, drive


def is_about(seconds: float, expected: float, limit_s: float) -> bool:
    """Return True if the time has its jitter: up to a tenth longer, at the limit up to a tenth shorter."""
    if expected < limit_s:
        return expected <= seconds <= expected * (1 + JITTER)
    return limit_s / (1 + JITTER) <= seconds <= limit_s


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (7, 32), (8, 60), (9, 60), (10_000, 60)]
)
def test_a_slot_is_restarted_after_0_1_2_4_to_60_seconds_with_a_small_jitter(failures: int, seconds: float) -> None:
    assert backoff_s(failures) == seconds
    for slot_id in ("a:0", "a:1", "b:0"):
        assert is_about(backoff_s(failures, slot_id), seconds, 60.0)


@pytest.mark.parametrize(("count", "seconds"), [(0, 10), (1, 20), (2, 40), (5, 320), (6, 600), (10_000, 600)])
def test_a_cooldown_doubles_up_to_its_limit_with_a_small_jitter(count: int, seconds: float) -> None:
    for host in ("a", "b", "c"):
        assert is_about(cooldown_s(host, count, 10.0, 600.0), seconds, 600.0)


@pytest.mark.parametrize("limits", [(0.0, 0.0), (5.0, 5.0), (10.0, 10.5), (10.0, 600.0), (0.2, 0.5)])
def test_no_cooldown_is_shorter_or_longer_than_the_limits(limits: tuple[float, float]) -> None:
    for host in (f"host{i}" for i in range(50)):
        for count in (*range(10), 99):
            assert limits[0] <= cooldown_s(host, count, *limits) <= limits[1]


@pytest.mark.parametrize(("failures", "limit_s", "seconds"), [(1, 600, 0), (4, 600, 4), (99, 600, 60), (99, 30, 3)])
def test_what_the_job_cannot_do_without_has_ten_attempts_before_it_is_given_up(
    failures: int, limit_s: float, seconds: float
) -> None:
    assert patience_s(failures, limit_s) == seconds


def test_the_jitter_differs_by_name_and_is_the_same_every_time() -> None:
    names = [f"host{i}" for i in range(50)]
    for spread in (
        lambda name: cooldown_s(name, 0, 10.0, 600.0),
        lambda name: cooldown_s(name, 9, 10.0, 600.0),
        lambda name: backoff_s(9, name),
    ):
        first = [spread(name) for name in names]
        assert len(set(first)) > 25
        assert first == [spread(name) for name in names]


# ----------------------------------------------------------------------------------------------- counted failures

BOOTS_FAIL = """
0.0 hosts a:2 b:1
0.1 agent-joined a + agent-joined b
1.0 ready b:0#1
2.0 exit a:0#1 code=1
4.0 exit a:0#2 code=1
"""


def cooling(m: Membership) -> list[str]:
    return [host.name for host in m.hosts.values() if host.cooldown_until > host.last_death >= 0]


def test_a_host_is_refused_when_its_only_living_slot_fails_again_and_again() -> None:
    script = BOOTS_FAIL.replace("a:2", "a:1") + "6.0 time\n7.0 exit a:0#3 code=1"
    m, effects = drive(script, np=2, min_np=1, max_np=2, max_no_progress=9)
    assert cooling(m) == ["a"]
    (note,) = [effect for effect in effects if isinstance(effect, t.Note) and effect.event == "host_cooldown"]
    assert note.get("reason") == "3 worker failures in a row, the last one: a:0#3 exited with 1"


def test_a_host_is_not_refused_for_one_slot_as_long_as_another_one_is_well() -> None:
    script = BOOTS_FAIL + "4.5 ready a:1#1\n6.0 time\n7.0 exit a:0#3 code=1"
    m, _ = drive(script, np=3, min_np=1, max_np=3, max_no_progress=9)
    assert cooling(m) == []
    assert m.slots[t.SlotId("a", 0)].not_before > 7.0, "but the slot waits"


def test_a_host_is_refused_when_several_of_its_slots_fail_even_if_one_is_well() -> None:
    script = BOOTS_FAIL.replace("a:2", "a:3") + "4.5 ready a:2#1\n6.0 time\n7.0 exit a:1#1 code=1"
    m, _ = drive(script, np=4, min_np=1, max_np=4, max_no_progress=9)
    assert cooling(m) == ["a"]


def test_deaths_within_a_second_count_once() -> None:
    script = "0.0 hosts a:4\n0.1 agent-joined a\n1.0 exit a:0#1 code=1\n1.5 exit a:1#1 code=1 + exit a:2#1 code=1"
    m, _ = drive(script, np=4, min_np=4, max_np=4, max_no_progress=9)
    assert m.hosts["a"].deaths == 1
    assert cooling(m) == []


@pytest.mark.parametrize(("well_for_s", "failures"), [(500.0, 4), (601.0, 1)])
def test_a_slot_without_failure_for_the_longest_cooldown_starts_anew_without_a_commit(
    well_for_s: float, failures: int
) -> None:
    fails = "2.0 exit a:2#1 code=1\n2.1 exit a:2#2 code=1\n3.5 time\n4.0 exit a:2#3 code=1"
    script = RUNNING.replace("+ ready a:2#1", "") + fails
    m, _ = drive(script + "\n7.0 time\n8.0 ready a:2#4", max_no_progress=9)
    assert m.slots[t.SlotId("a", 2)].failures == 3
    m, _ = drive(f"{8.0 + well_for_s} exit a:2#4 code=1", m)
    assert m.slots[t.SlotId("a", 2)].failures == failures


@pytest.mark.parametrize(("quiet_s", "cooldowns"), [(500.0, 2), (601.0, 1)])
def test_a_host_without_failure_for_the_longest_cooldown_starts_anew(quiet_s: float, cooldowns: int) -> None:
    m, _ = drive(RUNNING + "2.0 hosts a:3 b:1\n3.0 agent-lost b no_route")
    until = m.hosts["b"].cooldown_until
    m, _ = drive(f"{until} time\n{until + 1} agent-joined b\n{until + quiet_s} agent-lost b no_route", m)
    assert m.hosts["b"].cooldowns == cooldowns


@pytest.mark.parametrize(("min_np", "is_restarted"), [(2, False), (3, True)])
def test_the_backoff_of_a_slot_gives_way_when_the_job_would_be_below_min_np(min_np: int, is_restarted: bool) -> None:
    script = "0.0 hosts a:3\n0.1 agent-joined a\n1.0 ready a:0#1 + ready a:1#1\n2.0 exit a:2#1 code=1\n"
    script += "3.0 exit a:2#2 code=1\n4.2 time\n5.0 exit a:2#3 code=1\n6.1 time"
    m, _ = drive(script, min_np=min_np, start_timeout_s=10.0, max_no_progress=9)
    slot = m.slots[t.SlotId("a", 2)]
    assert (slot.failures, slot.gives_way_at) == (3, 6.0)
    assert slot.not_before >= 7.0
    assert (slot.worker is not None) == is_restarted


def test_a_slot_that_fails_repeatedly_does_not_keep_a_good_host_in_cooldown() -> None:
    script = "0.0 hosts a:2 b:1\n0.1 agent-joined a\n0.2 agent-lost b no_route\n1.0 ready a:0#1\n"
    m, _ = drive(script + "2.0 exit a:1#1 code=1\n3.0 exit a:1#2 code=1\n4.2 time", cooldown_range_s=(100.0, 600.0))
    assert m.hosts["b"].agent == "none", "the slot may yet do it"
    _, effects = drive("5.0 exit a:1#3 code=1", m)
    assert t.StartAgent("b") in effects


def test_after_half_of_the_time_nobody_counts_on_a_host_that_does_not_come() -> None:
    script = "0.0 hosts a:1 b:1 c:1\n0.1 agent-joined a\n0.2 agent-lost b no_route\n1.0 ready a:0#1\n"
    m, effects = drive(script + "299.0 time", cooldown_range_s=(600.0, 600.0))
    assert t.StartAgent("b") not in effects
    _, effects = drive("300.0 time", m)
    assert t.StartAgent("b") in effects


def test_a_slot_that_fails_again_and_again_is_not_counted_on_before_its_start_nor_after() -> None:
    script = """
    0.0 hosts a:1 b:1
    0.1 agent-joined a + agent-joined b
    0.5 run a:0#1
    1.0 exit b:0#1 signal=9 + exit a:0#1 code=1
    1.5 exit b:0#2 code=1
    2.8 time
    2.9 exit b:0#3 code=1
    """
    m, _ = drive(script, np=2, min_np=1, max_np=2, max_no_progress=9)
    assert next_deadline(m) == 4.922, "b:0 is tried again, and here a:0 fails, too"
    m, _ = drive("4.922 exit a:0#2 code=1", m)
    assert m.workers.keys() == {t.WorkerId("b", 0, 4)}
    assert next_deadline(m) == pytest.approx(5.922), "a:0 is not left alone for longer than the job can do without"
    m, _ = drive("4.922 time", m)
    assert next_deadline(m) == pytest.approx(5.922)
