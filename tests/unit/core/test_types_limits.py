"""Slot numbers from discovery that are too large: they cause a warning, and do not crash the driver."""

from __future__ import annotations

import tracemalloc

import pytest

from elasticstate.core import types as t
from elasticstate.core.accounting import figures_of
from elasticstate.core.policy import Policy
from elasticstate.core.state import Membership
from elasticstate.core.step import new_membership, step
from elasticstate.core.types import MAX_SLOTS, MAX_SLOTS_OF_HOST, within_limits
from elasticstate.driver.status import status_text
from tests.kit.policy import policy_of

POLICY = policy_of(np=2, min_np=1, max_np=2)


def warnings(effects: tuple[t.Effect, ...]) -> list[object]:
    return [e.get("text") for e in effects if isinstance(e, t.Note) and e.event == "warning"]


def discovered(*hosts: tuple[str, int], policy: Policy = POLICY) -> tuple[Membership, list[object]]:
    found = t.HostsDiscovered(tuple(t.HostSlots(*host) for host in hosts))
    m, effects, _ = step(new_membership(policy), found, 0.0)
    return m, warnings(effects)


@pytest.mark.parametrize("slots", [3_000_000, 20_000_000, 10**18])
def test_a_host_with_far_too_many_slots_is_used_with_a_bounded_number_and_a_warning(slots: int) -> None:
    tracemalloc.start()
    try:
        m, warned = discovered(("localhost", slots))
        m, effects, _ = step(m, t.AgentJoined("localhost"), 0.1)
        text = status_text("j", m, figures_of(m, 0.2), "", 0.2)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert m.hosts["localhost"].slots == MAX_SLOTS_OF_HOST
    assert warned == [
        f"discovery names {slots} slots on host localhost: the job uses the first {MAX_SLOTS_OF_HOST} of them. "
        "A larger --max-np raises this limit."
    ]
    assert len([e for e in effects if isinstance(e, t.StartWorker)]) == 2
    assert len(text.splitlines()) < 2 * MAX_SLOTS_OF_HOST


def test_all_hosts_together_are_bounded_with_a_warning() -> None:
    hosts = [(f"h{i}", 1000) for i in range(100)]
    m, warned = discovered(*hosts, policy=policy_of(np=2, min_np=1))
    assert sum(host.slots for host in m.hosts.values()) == MAX_SLOTS
    assert warned == [
        f"discovery names 100000 slots on 100 hosts: the job uses the first {MAX_SLOTS} of them. "
        "A larger --max-np raises this limit."
    ]


def test_max_np_raises_both_limits() -> None:
    m, warned = discovered(("a", 100_000), policy=policy_of(np=2, min_np=1, max_np=100_000))
    assert (m.hosts["a"].slots, warned) == (100_000, [])


def test_spare_slots_beyond_max_np_are_kept() -> None:
    """Spare slots replace a lost host, or a slot that fails repeatedly."""
    m, warned = discovered(("a", 8), ("b", 8), policy=policy_of(np=8, min_np=8, max_np=8))
    assert ([host.slots for host in m.hosts.values()], warned) == ([8, 8], [])


def test_hosts_without_slots_count_too_and_the_first_line_of_a_host_wins() -> None:
    found, warning = within_limits([t.HostSlots(f"h{i}", 0) for i in range(MAX_SLOTS + 1)], None)
    assert (len(found), warning) == (MAX_SLOTS, "")
    found, _ = within_limits([t.HostSlots("a", 2), t.HostSlots("a", 3), t.HostSlots("b", -1)], None)
    assert found == {"a": 2, "b": 0}
