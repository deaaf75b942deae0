"""The invariants I1 to I9 of the core alone, over random schedules of likely and unlikely events.

Replay a failure with ``run_schedule(seed, length, Counter())``: hypothesis prints both numbers.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st

from elasticstate.core import types as t
from elasticstate.core.figures import Times
from elasticstate.core.state import Membership, Over
from elasticstate.core.step import new_membership, next_deadline, step
from tests.kit.policy import in_pairs
from tests.kit.simulation.books import Books
from tests.kit.simulation.invariants import ENDS, Checker
from tests.kit.simulation.recovery import stale_facts_have_no_effect, world_or_end_is_reached
from tests.kit.simulation.schedules import EventMaker, explore_all, random_policy

MUST_BE_REACHED = (
    *("world", "start", "stop", "hold", "release", "interrupt", "escalation", "failure", "drain", "leave", "gate"),
    *("verdict", "postponed leave", "cooldown gave way", "forming", "below min-np", "job succeeded", "job failed"),
    *("stopped", "stopped in the gate", "killed at a stop"),
    *(f"end: {name}" for name in ENDS if name != "times in a row before"),
    *("note host_cooldown", "note agent_lost", "note waiting", "note warning", "note training_resumed"),
    *("note stall", "note stall_ended", "note straggler", "note straggler_ended", "straggler drained"),
    *("note no_tick", "note no_tick_ended"),
    *("note link_cut", "note link_restored", "a part", "a part of several", "probes of a failure"),
    *(
        "note worker_unresponsive",
        "note host_removed",
        "note root_cause",
        "retained commit awaited",
        "retained commit given up",
    ),
    *("notice", "notice gave way", "note host_draining", "commits_lost", "ticks_lost"),
    *(f"time: {part}" for part in Times.__struct_fields__ if part != "no_driver"),
    *("returned", "refused", "joined while stopped", "lease waited for", "incomplete group"),
    *("sick", "checked again", "note divergence", "replaced worker", "rejected commit"),
)
RARE = ("lease over", "end: times in a row before")  # once in some thousand schedules
MANY = 3000  # schedules, among which are the rare situations, too
reached: Counter[str] = Counter()


def run_schedule(seed: int, length: int, reached: Counter[str]) -> list[object]:
    """Run one schedule and return its transcript. The result depends only on the two numbers."""
    rng = random.Random(seed)
    maker, checker, books = EventMaker(rng), Checker(), Books()
    policy = random_policy(rng)
    policy = in_pairs(policy) if seed % 4 == 1 else policy
    policy = replace(policy, divergence="restore") if seed % 6 == 2 else policy
    health_check = "check" if seed % 3 == 0 else None
    m, now = new_membership(replace(policy, horovod=seed % 5 == 0, health_check=health_check)), 0.0
    transcript: list[object] = []
    for _ in range(length):
        now = _next_time(rng, m, now)
        event = maker.draw(m)
        transition = step(m, event, now)
        checker.see(m, event, now, transition)
        books.see(now, transition)
        for effect in transition.effects:
            if isinstance(effect, t.World):
                maker.published(effect)
        m = transition.next
        transcript.append((now, event, transition.effects, transition.reason, next_deadline(m)))
        if rng.random() < 0.015:
            stale_facts_have_no_effect(rng, m, now)
        checker.reached["below min-np"] += m.phase_name == "WAITING" and m.generation > 0
        checker.reached["retained commit awaited"] += "which retains the newest commit" in transition.reason
        drains = (worker.draining for worker in m.workers.values())
        checker.reached["straggler drained"] += any(reason.startswith("straggler") for reason in drains)
        checker.reached["lease waited for"] += (
            "until the workers on unreachable hosts have stopped" in transition.reason
        )
        checker.reached["forming"] += m.phase_name.startswith("FORMING")
        if isinstance(m.phase, Over):
            break
    reached["events"] += len(transcript)
    if seed % 32 == 0:
        world_or_end_is_reached(m, now, one_is_deaf=seed % 64 == 0)
    reached.update(checker.reached + books.reached)
    return transcript


def _next_time(rng: random.Random, m: Membership, now: float) -> float:
    """Return the time of the next event: mostly now, often a little later, sometimes the deadline; never beyond it."""
    deadline = next_deadline(m)
    kind = rng.random()
    later = now + (0.0 if kind < 0.4 else rng.random() * 0.6 if kind < 0.9 else rng.random() * 4.0)
    if deadline is None:
        return later
    return deadline if kind > 0.96 else min(later, deadline)


def explore(seed: int, length: int) -> None:
    reached["schedules"] += 1
    counted = Counter[str]()
    transcript = run_schedule(seed, length, reached)
    if seed % 32 == 1:
        assert repr(run_schedule(seed, length, counted)) == repr(transcript), (
            "I8: the same events give the same transcript"
        )


def test_invariants_hold_in_random_schedules_that_come_by_everything(schedules: range) -> None:
    explore_all(
        explore,
        schedules,
        reached,
        (*MUST_BE_REACHED, *(RARE if len(schedules) >= MANY else ())),
        seed=st.integers(0, 2**64 - 1),
        length=st.integers(45, 130),
    )
    assert reached["events"] >= 40 * reached["schedules"]
