"""Assignment of ranks, compared with a naive oracle, and with the rules of I2."""

from __future__ import annotations

import random

from elasticstate.core.ids import WorkerId
from elasticstate.core.state import NEWCOMER
from elasticstate.core.worlds import assign
from tests.kit.simulation.oracle import naive_placements


def test_ranks_agree_with_a_naive_second_implementation() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        slot_ids = [(host, slot) for host in "abcd" for slot in range(4)]
        chosen = sorted(rng.sample(slot_ids, rng.randint(1, 12)))
        workers = [WorkerId(host, slot, rng.randint(1, 3)) for host, slot in chosen]
        ages = {worker: age for age, worker in enumerate(rng.sample(workers, rng.randint(0, len(workers))))}
        placed = assign([(worker, ages.get(worker, NEWCOMER)) for worker in workers])
        assert placed == naive_placements(workers, ages, list("abcd")), f"seed {seed}"
        assert [placement.rank for placement in placed] == list(range(len(workers)))


def test_the_host_of_the_oldest_worker_comes_first_and_local_rank_is_the_slot() -> None:
    old, young, newcomer = WorkerId("b", 3, 1), WorkerId("a", 0, 1), WorkerId("b", 0, 2)
    first, second, third = assign([(young, 5), (newcomer, NEWCOMER), (old, 2)])
    assert (first.worker, second.worker, third.worker) == (old, newcomer, young)
    assert (first.local_rank, first.local_leader, first.local_size) == (3, True, 2)
    assert (second.local_rank, second.local_leader, second.cross_rank) == (0, False, 0)
    assert (third.local_rank, third.local_leader, third.cross_rank, third.cross_size) == (0, True, 1, 2)


def test_newcomers_only_are_placed_in_the_order_given() -> None:
    workers = [WorkerId("z", 1, 1), WorkerId("z", 0, 1), WorkerId("a", 0, 1)]
    placed = assign([(worker, NEWCOMER) for worker in workers])
    assert [str(placement.worker) for placement in placed] == ["z:0#1", "z:1#1", "a:0#1"]


def test_nobody_gives_an_empty_world() -> None:
    assert assign([]) == ()
