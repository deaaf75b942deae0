"""Stragglers in the core: the rule against random own times, and what the transcript does not show."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median_high

import pytest
from hypothesis import given, settings, strategies as st

from elasticstate.core import types as t
from elasticstate.core.health import WINDOW, factors, slow_members, straggler_lines, window_of
from elasticstate.core.state import Membership, Running
from elasticstate.core.step import step
from tests.kit.core import RUNNING, drive, kinds

Own = Callable[[int, int], float]  # own time in microseconds of a rank in a tick
THRESHOLD = 0.2
TICK_US = 100_000


def paces(ranks: int, ticks: Sequence[int], own: Own) -> list[tuple[tuple[int, int], ...]]:
    """Return the points of all ranks at these ticks."""
    last = ticks[-1] + 1
    sums = [list(accumulate((own(rank, tick) for tick in range(last)), initial=0.0)) for rank in range(ranks)]
    return [tuple((tick, round(sums[rank][tick + 1])) for tick in ticks) for rank in range(ranks)]


def slow_ranks(ranks: int, last: int, own: Own) -> list[int]:
    """Return the stragglers at the end of this tick."""
    window = window_of(paces(ranks, range(last - WINDOW, last + 1), own))
    assert window is not None
    return [rank for rank, _ in slow_members(window, THRESHOLD)]


@given(own=st.lists(st.integers(1, 10**9), min_size=2, max_size=40))
def test_factors_agree_with_a_naive_second_implementation(own: list[int]) -> None:
    naive = [mine / median_high(own[:rank] + own[rank + 1 :]) for rank, mine in enumerate(own)]
    assert factors(own) == naive


@settings(max_examples=100)
@given(ranks=st.integers(2, 64), seed=st.integers(0, 2**32), data=st.data())
def test_a_rank_that_is_slower_by_thirty_percent_is_found_within_ten_ticks_and_no_other_is(
    ranks: int, seed: int, data: st.DataObject
) -> None:
    slow, rng = data.draw(st.integers(0, ranks - 1)), random.Random(seed)

    def own(rank: int, tick: int) -> float:
        return TICK_US * (1.3 if rank == slow and tick >= 50 else 1.0) * rng.uniform(0.97, 1.03)

    ends = [slow_ranks(ranks, last, own) for last in range(49, 50 + WINDOW)]
    assert ends[0] == []
    assert ends[-1] == [slow]
    assert all(found in ([], [slow]) for found in ends)


@settings(max_examples=50)
@given(ranks=st.integers(2, 16), seed=st.integers(0, 2**32), jitter=st.floats(0.0, 0.1))
def test_equal_ranks_are_never_found(ranks: int, seed: int, jitter: float) -> None:
    rng = random.Random(seed)
    for last in range(WINDOW, 100, WINDOW // 2):
        assert slow_ranks(ranks, last, lambda *_: TICK_US * rng.uniform(1 - jitter, 1 + jitter)) == []


UNEVEN: dict[str, Own] = {
    "in turn": lambda rank, tick: TICK_US * (2.0 if tick % 4 == rank else 1.0),
    "in turn, for two ticks": lambda rank, tick: TICK_US * (2.0 if tick // 2 % 4 == rank else 1.0),
    "one long tick": lambda rank, tick: TICK_US * (100.0 if (rank, tick) == (1, 55) else 1.0),
    "commits": lambda rank, tick: TICK_US * (5.0 if tick % 10 == 0 else 1.0),
    "all slower": lambda rank, tick: TICK_US * (1.5 if tick > 52 else 1.0),
    "one is fast": lambda rank, tick: TICK_US * (0.3 if rank == 0 else 1.0),
}


@pytest.mark.parametrize("kind", UNEVEN)
def test_other_differences_name_no_rank(kind: str) -> None:
    assert [slow_ranks(4, last, UNEVEN[kind]) for last in range(50, 75)] == [[]] * 25


def test_ranks_with_other_strides_are_compared_at_their_common_ticks() -> None:
    def own(rank: int, tick: int) -> float:
        return 10_000 * (1.4 if rank == 1 else 1.0)

    often, seldom = paces(2, range(8, 100, 4), own)[0], paces(2, range(8, 100, 8), own)[1]
    window = window_of([often, seldom])
    assert window is not None
    assert window.ticks == 8 * WINDOW
    assert slow_members(window, THRESHOLD) == [(1, pytest.approx(1.4))]
    assert window_of([often, seldom[-WINDOW:]]) is None, "too few common ticks"


# ------------------------------------------------------------------------------------------------------ in the core


def reported(m: Membership, now: float, begin: int, end: int, *own_ms: int) -> tuple[Membership, list[t.Effect]]:
    """Let all three members report equal ticks from ``begin`` to ``end``, with these own times."""
    paces = [tuple((n, n * ms * 1000) for n in range(begin, end)) for ms in own_ms]
    beats = [
        t.FromWorker(t.WorkerId("a", rank, 1), t.Stamp(t.Place.TRAIN, 1, end, None, pace=pace))
        for rank, pace in enumerate(paces)
    ]
    m, effects, _ = step(m, t.Several(tuple(beats)), now)
    return m, list(effects)


def test_a_straggler_is_named_once_in_a_world_and_the_status_shows_it() -> None:
    m, _ = drive(RUNNING)
    m, effects = reported(m, 3.0, 5, 20, 100, 100, 130)
    assert kinds(effects) == ["straggler"]
    m, effects = reported(m, 4.0, 20, 27, 100, 100, 130)
    assert effects == []
    assert isinstance(m.phase, Running)
    (line,) = straggler_lines(m.phase, 5.0)
    assert line == "a:2#1 (rank 2): 1.30 times the own time of the others, for 2.0 s"
    _, effects = drive("6.0 exit a:2#1 signal=9", m)
    assert kinds(effects)[-1] == "straggler_ended"


def test_points_of_another_generation_do_not_count() -> None:
    m, _ = drive(RUNNING)
    beat = t.FromWorker(t.WorkerId("a", 0, 1), t.Stamp(t.Place.TRAIN, 2, 9, None, pace=((5, 1),)))
    after, effects, _ = step(m, beat, 3.0)
    assert not effects
    assert after.workers[beat.worker].pace == ()


def test_one_straggler_drains_at_a_time_and_only_while_enough_workers_stay() -> None:
    m, _ = drive(RUNNING, straggler_action="drain", min_np=1)
    m, effects = reported(m, 3.0, 5, 20, 100, 130, 200)
    assert kinds(effects)[:2] == ["straggler", "Hold"]
    assert [w.id.slot for w in m.workers.values() if w.draining] == [2], "the slower one"
    m, _ = reported(m, 3.1, 20, 40, 100, 200, 200)
    assert [w.id.slot for w in m.workers.values() if w.draining] == [2]

    m, _ = drive(RUNNING, straggler_action="drain", min_np=3)
    m, effects = reported(m, 3.0, 5, 20, 100, 100, 130)
    assert kinds(effects) == ["straggler"]
    assert not any(w.draining for w in m.workers.values())
