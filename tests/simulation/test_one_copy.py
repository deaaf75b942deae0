"""Jobs with --one-copy-per-host in a model of whole jobs (I3, I10, I11). Replay a failure with ``play(seed, n)``."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from tests.kit.simulation.one_copy import play
from tests.kit.simulation.schedules import explore_all, some_of

MUST_BE_REACHED = (
    *("follower", "read from the keeper", "no keeper survived", "keeper beside a draining root"),
    *("nothing lost", "retained commit awaited", "I15", "job succeeded", "reattached"),
    *("fault kill", "fault several", "fault all", "fault host", "fault notice", "fault cut the world"),
)
reached: Counter[str] = Counter()


def explore(seed: int, actions: int) -> None:
    reached.update(play(seed, actions))
    reached["schedules"] += 1


def test_no_commit_of_all_keepers_is_lost(schedules: range) -> None:
    explore_all(
        explore,
        some_of(schedules, 4, least=400),
        reached,
        MUST_BE_REACHED,
        seed=st.integers(0, 2**64 - 1),
        actions=st.integers(30, 220),
    )
