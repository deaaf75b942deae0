"""Whole groups, ``--np-multiple``: sizes of worlds, which workers are spares, and which hosts stay whole."""

from __future__ import annotations

from itertools import combinations

import pytest

from elasticstate.core import types as t
from elasticstate.core.accounting import figures_of
from elasticstate.core.state import Membership
from elasticstate.core.worlds import whole_hosts
from elasticstate.driver.status import status_text
from tests.kit.core import drive, kinds, published
from tests.kit.policy import policy_of

PAIRS = {"np": 4, "min_np": 2, "max_np": None, "np_multiple": 2, "min_interrupt_distance_s": 0.0}
FIVE = """
0.0 hosts a:2 b:2 c:1
0.1 agent-joined a + agent-joined b + agent-joined c
1.0 ready a:0#1 + ready a:1#1 + ready b:0#1 + ready b:1#1
"""
TRAINING = FIVE + "1.1 first a:0#1 in=1\n1.2 ready c:0#1"
SPARE = "spare: worlds have a multiple of 2 workers"


def members(m: Membership) -> list[str]:
    assert m.world is not None
    return [str(placement.worker) for placement in m.world.members]


def leave(*names: str, generation: int = 1) -> str:
    return " + ".join(f"ready {name} in={generation} commit={generation}.5" for name in names)


def spares_of(m: Membership) -> list[str]:
    lines = status_text("j", m, figures_of(m, 9.0), "", 9.0).splitlines()
    return [line.split()[0] for line in lines if line.endswith(SPARE)]


def test_the_world_has_whole_groups_of_whole_hosts_and_the_spare_is_named_with_its_reason() -> None:
    m, effects = drive(FIVE, **PAIRS)
    assert published(effects).size == 4
    assert members(m) == ["a:0#1", "a:1#1", "b:0#1", "b:1#1"]
    m, effects = drive("1.1 first a:0#1 in=1\n1.2 ready c:0#1\n30.0 time", m)
    assert kinds(effects) == []
    assert spares_of(m) == ["c:0#1"]


def test_a_spare_fills_the_gap_of_a_lost_worker() -> None:
    m, _ = drive(TRAINING, **PAIRS)
    m, effects = drive("2.0 exit b:1#1 signal=9\n2.1 " + leave("a:0#1", "a:1#1", "b:0#1"), m)
    assert published(effects).size == 4
    assert members(m) == ["a:0#1", "a:1#1", "b:0#1", "c:0#1"]


def test_without_a_spare_a_smaller_world_forms_at_once_and_the_next_worker_completes_a_group() -> None:
    four = TRAINING.replace(" c:1", "").replace(" + agent-joined c", "").replace("\n1.2 ready c:0#1", "")
    m, _ = drive(four, **PAIRS)
    m, effects = drive("2.0 exit a:1#1 signal=9\n2.1 " + leave("a:0#1", "b:0#1", "b:1#1"), m)
    assert members(m) == ["b:0#1", "b:1#1"], "the whole host"
    m, _ = drive("2.2 first b:0#1 in=2", m)
    assert spares_of(m) == ["a:0#1"]
    m, effects = drive("3.0 time\n5.0 ready a:1#2 commit=1.5", m)
    assert "Hold" in kinds(effects)
    m, effects = drive("5.1 answer b:0#1 in=2 ticks=9 + answer b:1#1 in=2 ticks=9", m)
    m, effects = drive("5.2 " + leave("b:0#1", "b:1#1", generation=2), m)
    assert published(effects).size == 4
    assert sorted(members(m)) == ["a:0#1", "a:1#2", "b:0#1", "b:1#1"]


def test_a_newcomer_that_completes_no_group_interrupts_nobody() -> None:
    m, _ = drive(TRAINING.replace("hosts a:2 b:2 c:1", "hosts a:2 b:2 c:2"), **PAIRS)
    m, effects = drive("30.0 time", m)
    assert "Hold" not in kinds(effects)
    m, effects = drive("31.0 ready c:1#1", m)
    assert "Hold" in kinds(effects)


def test_too_few_workers_for_min_np_wait_although_they_have_a_whole_group() -> None:
    m, _ = drive(FIVE.replace(" + ready b:1#1", ""), **{**PAIRS, "min_np": 4})
    assert m.phase_name == "WAITING"


def test_a_draining_member_does_not_leave_with_its_partner_if_a_spare_is_there() -> None:
    m, _ = drive(TRAINING + "\n2.0 agent-draining b SIGTERM", **PAIRS)
    m, _ = drive("3.0 time", m)
    answers = " + ".join(f"answer {name} in=1 ticks=9" for name in members(m))
    m, _ = drive(f"3.1 {answers}\n3.2 " + leave(*members(m)), m)
    assert members(m) == ["a:0#1", "a:1#1"], "c:0 has no partner"


def test_the_newest_commit_comes_before_whole_hosts() -> None:
    script = """
0.0 hosts a:1 b:1 c:2
0.1 agent-joined a + agent-joined b
1.0 ready a:0#1 + ready b:0#1
1.1 first a:0#1 in=1
2.0 agent-joined c
3.0 ready c:0#1 + ready c:1#1
4.0 exit a:0#1 signal=9
"""
    m, _ = drive(script, **{**PAIRS, "np": 2, "max_np": 2, "spares": 2})
    m, _ = drive("4.1 ready b:0#1 in=1 commit=1.5", m)
    assert members(m) == ["b:0#1", "c:0#1"]


def test_a_plain_command_has_whole_groups_too() -> None:
    m, effects = drive("0.0 hosts a:3 b:2\n0.1 agent-joined a + agent-joined b", **PAIRS)
    started = [effect.worker.slot_id for effect in effects if isinstance(effect, t.StartWorker)]
    assert started == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    m, effects = drive("1.0 store-joined 1\n700.0 time", m)
    assert kinds(effects) == [], "one free slot is no group"


@pytest.mark.parametrize("multiple", [1, 2, 3, 4, 8])
def test_no_other_choice_has_more_groups_on_one_host(multiple: int) -> None:
    for hosts in ("aabbc", "abcabcab", "aaabbbb", "abbbbcccc", "aaaabbb", "abbaccc"):
        size = policy_of(1, 1, np_multiple=multiple).fitting(len(hosts))
        found = [hosts[place] for place in whole_hosts(hosts, size, multiple)]
        groups = max(_groups(choice, multiple) for choice in combinations(hosts, size))
        assert (len(found), _groups(tuple(found), multiple)) == (size, groups)


def test_of_hosts_that_are_smaller_than_a_group_those_without_a_loss_stay() -> None:
    assert [*whole_hosts("aaabbbbcccc", 8, 8)] == [*range(3, 11)]


def _groups(chosen: tuple[str, ...], multiple: int) -> int:
    return sum(chosen.count(host) // multiple for host in set(chosen))
