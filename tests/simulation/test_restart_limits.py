"""Cooldown never blocks a job that could run: whenever enough slots for min-np are good, a world forms.

The jobs here have machines that fail in every way, and some that do not fail. The length of cooldowns and backoffs must
not decide if the job goes on. The exception: each worker of the first round ends by its own exit code.

Replay a failure with ``play(seed)``: hypothesis prints the number.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st

from elasticstate.core import types as t
from elasticstate.core.state import Waiting
from tests.kit.policy import policy_of
from tests.kit.simulation.fleet import Fleet, Machine, Slots
from tests.kit.simulation.schedules import explore_all

FAULTS_SHARE = 0.2  # the part of the time-out in which good machines fail, too
BOUND_SHARE = 0.7  # the part of the time-out, after the good machines work: half of it, several attempts, and a boot
reached: Counter[str] = Counter()


def play(seed: int) -> Fleet:
    """Play one job that loses its world, or never had one. Bad machines stay bad, good ones fail only for a while."""
    rng = random.Random(seed)
    limit_s = rng.choice((60.0, 300.0, 600.0, 3600.0))
    machines = [_machine(rng, f"h{i}", limit_s) for i in range(rng.randint(2, 6))]
    good = sum(machine.slots - len(machine.bad_slots or {}) for machine in machines if machine.after == "connect")
    if not good:
        return play(seed + (1 << 64))
    policy = policy_of(
        np=good,
        min_np=rng.randint(max(1, good - 2), good),  # often the job needs all of them
        start_timeout_s=limit_s,
        elastic_timeout_s=limit_s,
        cooldown_range_s=(rng.choice((1.0, 10.0, 100.0)), rng.choice((100.0, 600.0, 5000.0))),
        max_no_progress=1000,
    )
    was_training = rng.random() < 0.6
    fleet = Fleet(policy, [replace(machine, up_at=0.0) for machine in machines] if was_training else machines)
    good_from = max(machine.up_at for machine in machines)
    if was_training:
        fleet.run(BOUND_SHARE * limit_s, lambda: bool(fleet.worlds))
        if _first_round_failed(fleet):
            return fleet
        assert fleet.worlds, f"never began, though {good} slots could run: {fleet.why()}"
        reached["was training"] += 1
        good_from = _break_all(rng, fleet, machines, limit_s)
    fleet.run(good_from)
    before = len(fleet.worlds)
    enough = not isinstance(fleet.m.phase, Waiting)
    fleet.run(good_from + BOUND_SHARE * limit_s, lambda: enough or len(fleet.worlds) > before)
    if _first_round_failed(fleet):
        return fleet
    assert enough or len(fleet.worlds) > before, f"stuck, though {good} slots could run: {fleet.why()}"
    reached["world"] += not enough
    reached["gave way"] += fleet.given_way > 0
    return fleet


def _first_round_failed(fleet: Fleet) -> bool:
    """Return True if the job has ended because only bad slots were in its first round. Count these jobs."""
    cause = fleet.ended.root_cause if fleet.ended is not None else None
    if cause is None or not cause.reason.startswith("every worker failed before the first world"):
        return False
    bad = sum(way == "die" for machine in fleet.machines.values() for way in (machine.bad_slots or {}).values())
    assert bad >= fleet.policy.np, f"the first round had good slots: {fleet.why()}"
    assert not fleet.m.ledger.ever_ready
    reached["first round failed"] += 1
    return True


def _machine(rng: random.Random, name: str, limit_s: float) -> Machine:
    slots = rng.randint(1, 4)
    ways: tuple[Slots, ...] = ("boot", "boot", "die", "hang")
    bad = {index: way for index in range(slots) if (way := rng.choice(ways)) != "boot"} if rng.random() < 0.5 else {}
    after = rng.choice(("connect", "connect", "connect", "refuse", "hang"))
    reached.update(f"slot {way}" for way in bad.values())
    reached[f"agent {after}"] += 1
    return Machine(
        name,
        slots=slots,
        up_at=rng.random() * FAULTS_SHARE * limit_s,
        after=after,
        answers_in_s=rng.random() * limit_s / 100,
        boot_s=rng.random() * limit_s / 30,
        bad_slots=bad,
    )


def _break_all(rng: random.Random, fleet: Fleet, machines: list[Machine], limit_s: float) -> float:
    """Lose agents and kill workers repeatedly, also on good machines. Return the time at which the faults end."""
    until = fleet.now + FAULTS_SHARE * limit_s
    fleet.machines = {machine.name: replace(machine, up_at=fleet.now + machine.up_at) for machine in machines}
    while fleet.now < until and fleet.ended is None:
        living = list(fleet.m.workers)
        hosts = [host.name for host in fleet.m.hosts.values() if host.agent in ("asked", "joined")]
        if living and rng.random() < 0.7:
            lost = rng.sample(living, rng.randint(1, len(living)))
            fleet.deliver(t.Several(tuple(t.WorkerExited(worker, 1, None, 9) for worker in lost)))
        elif hosts:
            fleet.deliver(t.AgentLost(rng.choice(hosts), "is unreachable: connection closed"))
        fleet.run(min(until, fleet.now + rng.random() * limit_s / 20))
    return until


def explore(seed: int) -> None:
    play(seed)
    reached["schedules"] += 1


def test_whenever_enough_slots_are_good_a_world_forms_whatever_has_failed_before(schedules: range) -> None:
    wanted = ("was training", "world", "gave way", "slot die", "slot hang", "agent refuse", "agent hang")
    explore_all(explore, schedules, reached, wanted, seed=st.integers(0, 2**64 - 1))
    assert {name: reached[name] for name in wanted if reached[name] < len(schedules) / 10} == {}
