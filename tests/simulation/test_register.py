"""The register in random schedules (kit/simulation/register_network.py), with more drivers, acceptors and changes than
the exhaustive search has.

Replay a failure with ``run_schedule(seed, STEPS, Counter())``: the error names the seed.
"""

from __future__ import annotations

from collections import Counter

from tests.kit.simulation.register_network import run_schedule

STEPS = 400
MUST_BE_REACHED = {
    *("takeover", "takeover during a change", "leader refused", "redirected", "five acceptors"),
    *("memory lost", "too many lost", "healed"),
}


def test_nothing_that_was_chosen_is_lost_in_random_schedules(schedules: range) -> None:
    reached: Counter[str] = Counter()
    for seed in schedules:
        run_schedule(seed, STEPS, reached)
    print(dict(reached))
    assert {name for name, times in reached.items() if times} == MUST_BE_REACHED
