"""Jobs with ``--divergence restore`` in a model of whole jobs (I22). Replay a failure with ``play(seed, n)``."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st

from tests.kit.simulation.mutants import mutated
from tests.kit.simulation.restoring import play
from tests.kit.simulation.schedules import explore_all, some_of

MUST_BE_REACHED = (
    *("flip", "note divergence", "went back", "rejected commit", "replaced worker", "discarded", "verdict on commits"),
    *("no commit without a driver", "no verdict at an interrupt", "reattached", "job succeeded", "nothing lost"),
    *("fault kill", "fault several", "fault all", "fault host", "fault notice", "fault cut the world"),
)
RARE = ("made up",)
MANY = 3000  # schedules, among which are the rare situations, too
reached: Counter[str] = Counter()


def explore(seed: int, actions: int) -> None:
    reached.update(play(seed, actions))
    reached["schedules"] += 1


def test_no_job_trains_on_from_values_in_which_ranks_differed(schedules: range) -> None:
    explore_all(
        explore,
        some_of(schedules, 8, least=100),
        reached,
        (*MUST_BE_REACHED, *(RARE if len(schedules) >= MANY else ())),
        seed=st.integers(0, 2**64 - 1),
        actions=st.integers(30, 220),
    )


MUTANTS = {
    "the differing commit is judged": ("divergence._judge", "tick >= found.differs[1]", "False"),
    "a commit is equal that one lacks": ("divergence._judge", "if are_all and", "if"),
    "commits that differ are used": ("divergence.reject_unequal", "len(set(digests.values())) == 1", "digests"),
    "commits of the dead do not count": ("divergence.reject_unequal", "compared <= digests.keys() and", ""),
    "members go on from the newest commit": ("worlds.make_world", "start=best", "start=None"),
    "rejected commits come back": ("commits.without_rejected", "not is_rejected(d, each)", "each"),
}

SEEDS = {  # of those that few schedules find
    "the differing commit is judged": 550,
    "commits that differ are used": 3300,
    "commits of the dead do not count": 90,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_core_is_found(name: str) -> None:
    first = SEEDS.get(name, 0)
    with mutated(*MUTANTS[name]):
        assert any(_finds(seed) for seed in range(first, first + 500))


def _finds(seed: int) -> bool:
    try:
        play(seed, 120)
    except AssertionError:
        return True
    return False
