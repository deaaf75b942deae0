"""The commit line (I19) in a model of whole sharded jobs. Replay a failure with ``play(seed, actions)``."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from tests.kit.simulation.schedules import explore_all, some_of
from tests.kit.simulation.sharded import play

MUST_BE_REACHED = (
    *("line", "newest line", "line from a kept copy", "line from a slot that left", "line awaited", "line lost"),
    *("replicated", "replicas 1", "replicas 2", "replicas kept the line", "copy dropped", "commit to come"),
    *("damaged copy reported", "damaged buffer reported", "replicas kept the line from damage", "copy refused"),
    "refusing hosts come last",
    *("attached not forwarded", "replica in another rack"),
    *("job succeeded", "reattached", "fault host", "fault cut the world"),
)
reached: Counter[str] = Counter()


def explore(seed: int, actions: int) -> None:
    reached.update(play(seed, actions))
    reached["schedules"] += 1


def test_each_world_of_a_sharded_job_starts_from_a_line_that_can_be_read(schedules: range) -> None:
    explore_all(
        explore,
        some_of(schedules, 4, least=300),
        reached,
        MUST_BE_REACHED,
        seed=st.integers(0, 2**64 - 1),
        actions=st.integers(30, 220),
    )
