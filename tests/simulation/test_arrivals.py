"""Late hosts: hosts may arrive up to 30 minutes apart, because they pull their images at different speeds.

The job waits for them as long as --start-timeout allows, and nothing else shortens this wait. A host can be late in
three ways: discovery names it later, it refuses connections at first, or it lets connections wait.
"""

from __future__ import annotations

import random
from typing import Literal

import pytest
from hypothesis import Phase, given, settings, strategies as st

from elasticstate.core.slots import JITTER, MAX_BACKOFF_S
from tests.kit.policy import policy_of
from tests.kit.simulation.fleet import Fleet, Machine

Way = Literal["named", "refuse", "hang"]
WAYS: tuple[Way, ...] = ("named", "refuse", "hang")
SLOTS = 2
BOOT_S = 60.0  # the longest boot after the agent is connected, with a pull of the last layers
CONNECT_S = 10.0  # the longest time until a connection is refused or accepted
SOON_S = MAX_BACKOFF_S * (1 + JITTER) + 2 * CONNECT_S + BOOT_S  # after a host is up, if the job needs the host


def _late(rng: random.Random, spread_s: float, hosts: int, way: Way) -> list[Machine]:
    ups = [0.0, spread_s, *(rng.random() * spread_s for _ in range(hosts - 2))]
    rng.shuffle(ups)
    machines = []
    for index, up in enumerate(ups):
        times = {"named_at": up} if way == "named" else {"up_at": up}
        boot_s, answers_in_s = BOOT_S * rng.random(), CONNECT_S * rng.random()
        before: Literal["refuse", "hang"] = "hang" if way == "hang" else "refuse"
        machines.append(Machine(f"h{index}", SLOTS, before=before, boot_s=boot_s, answers_in_s=answers_in_s, **times))
    return machines


def _up(machine: Machine) -> float:
    return max(machine.up_at, machine.named_at)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
@given(seed=st.integers(0, 2**64 - 1), spread_s=st.floats(0.0, 1800.0), hosts=st.integers(2, 8))
def test_without_min_np_the_job_starts_when_the_last_host_is_there(
    way: Way, seed: int, spread_s: float, hosts: int
) -> None:
    machines = _late(random.Random(seed), spread_s, hosts, way)
    np = hosts * SLOTS
    fleet = Fleet(policy_of(np=np, min_np=np, max_np=np, start_timeout_s=spread_s + SOON_S), machines)
    fleet.run(1e9, lambda: bool(fleet.worlds))
    assert fleet.worlds, fleet.why()
    at, size = fleet.worlds[0]
    assert size == np
    assert spread_s <= at <= spread_s + SOON_S


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
@given(seed=st.integers(0, 2**64 - 1), spread_s=st.floats(0.0, 1800.0), hosts=st.integers(2, 8))
def test_with_min_np_the_job_starts_with_those_who_are_there_and_takes_the_others_in_later(
    way: Way, seed: int, spread_s: float, hosts: int
) -> None:
    rng = random.Random(seed)
    machines = _late(rng, spread_s, hosts, way)
    np, enough = hosts * SLOTS, rng.randint(1, hosts - 1)
    policy = policy_of(np=np, min_np=enough * SLOTS, max_np=np, start_timeout_s=spread_s + SOON_S)
    fleet = Fleet(policy, machines)
    fleet.run(1e9, lambda: bool(fleet.worlds))
    assert fleet.worlds, fleet.why()
    at, size = fleet.worlds[0]
    ups = sorted(map(_up, machines))
    assert size >= policy.min_np
    assert ups[enough - 1] <= at
    if size < np:  # the join window has passed without all hosts
        assert at >= min(_up(machine) + machine.boot_s for machine in machines) + policy.join_window_s
    assert at <= ups[enough - 1] + SOON_S + policy.join_window_s
    fleet.run(spread_s + 2 * policy.cooldown_range_s[1], lambda: fleet.worlds[-1][1] == np)
    assert fleet.worlds[-1][1] == np, fleet.why()
    assert fleet.ended is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("start_timeout_s", [300.0, 1700.0])
def test_a_host_that_comes_after_the_start_time_out_is_named_in_its_error(way: Way, start_timeout_s: float) -> None:
    machines = _late(random.Random(1), 1800.0, 3, way)
    fleet = Fleet(policy_of(np=6, min_np=6, max_np=6, start_timeout_s=start_timeout_s), machines)
    fleet.run(1e9)
    assert fleet.ended is not None
    assert fleet.ended.root_cause is not None
    assert fleet.now == start_timeout_s, "and by nothing else"
    reason = fleet.ended.root_cause.reason
    assert reason.startswith(f"--start-timeout of {start_timeout_s:g} s expired: ")
    last = max(machines, key=_up).name
    if way == "named":
        assert last not in reason, "discovery has not named the host yet"
    else:
        report = {"refuse": "connection refused", "hang": "agent started ("}
        (text,) = [part for part in reason.split("; ") if f"host {last}: " in part]
        assert report[way] in text
