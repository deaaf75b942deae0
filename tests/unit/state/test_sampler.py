from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader

from elasticstate.errors import UsageError
from elasticstate.state.sampler import ElasticSampler
from elasticstate.state.torch import TorchState


def sampler_at(n: int, rank: int, size: int, **options: object) -> ElasticSampler:
    return ElasticSampler(range(n), rank=lambda: rank, size=lambda: size, **options)


def test_outside_a_world_it_is_rank_0_of_1() -> None:
    sampler = ElasticSampler(range(10), shuffle=False)
    assert list(sampler) == list(range(10))
    assert len(sampler) == 10


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    orders = {}
    for seed in (0, 5):
        for epoch in (0, 1):
            sampler = sampler_at(100, 0, 1, seed=seed)
            sampler.set_epoch(epoch)
            orders[seed, epoch] = tuple(sampler)
            assert orders[seed, epoch] == tuple(sampler)
            assert sorted(sampler) == list(range(100))
    assert len(set(orders.values())) == 4


def test_indices_are_plain_integers() -> None:
    assert {type(i) for i in sampler_at(5000, 0, 1)} == {int}


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(0, 200),
    seed=st.integers(0, 5),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(0, 12)), max_size=5),
)
def test_each_sample_is_seen_once_over_all_worlds_and_ranks(
    n: int, seed: int, worlds: list[tuple[int, int, int]]
) -> None:
    """Each world is (size, batch size, number of steps). The last world runs to the end of the epoch."""
    seen: list[int] = []
    saved = sampler_at(n, 0, 1, seed=seed).state_dict()
    for size, batch_size, steps in [*worlds, (3, 4, n)]:
        ranks = [sampler_at(n, rank, size) for rank in range(size)]
        for sampler in ranks:
            sampler.load_state_dict(saved)
        assert sum(map(len, ranks)) == n - saved["consumed"]
        iterators = [iter(sampler) for sampler in ranks]
        for _ in range(steps):
            batch = [i for it in iterators for i in [next(it, None) for _ in range(batch_size)] if i is not None]
            seen += batch
            for sampler in ranks:
                sampler.record_batch(batch_size * size)
        assert len({tuple(sampler.state_dict().items()) for sampler in ranks}) == 1
        saved = ranks[0].state_dict()
    assert sorted(seen) == list(range(n))


def test_rank_and_size_are_asked_anew_at_each_iter() -> None:
    world = {"rank": 3, "size": 4}
    sampler = ElasticSampler(range(12), shuffle=False, rank=lambda: world["rank"], size=lambda: world["size"])
    assert list(sampler) == [3, 7, 11]
    sampler.record_batch(4)
    world.update(rank=1, size=2)
    assert list(sampler) == [5, 7, 9, 11]
    assert len(sampler) == 4


def test_drop_last_gives_all_ranks_equally_many() -> None:
    parts = [list(sampler_at(11, rank, 4, drop_last=True)) for rank in range(4)]
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert len({i for part in parts for i in part}) == 8
    assert [len(sampler_at(11, rank, 4)) for rank in range(4)] == [3, 3, 3, 2]


def test_set_epoch_begins_a_new_epoch_but_goes_on_in_the_present_one() -> None:
    sampler = sampler_at(10, 0, 1)
    sampler.record_batch(4)
    sampler.set_epoch(0)
    assert len(sampler) == 6
    sampler.set_epoch(1)
    assert len(sampler) == 10


def test_no_more_is_consumed_than_there_is() -> None:
    sampler = sampler_at(10, 0, 1)
    sampler.record_batch(64)
    assert (sampler.consumed, list(sampler)) == (10, [])
    with pytest.raises(UsageError, match="at least 0"):
        sampler.record_batch(-1)


def test_it_goes_with_a_data_loader_and_a_state() -> None:
    data = torch.arange(20)
    state = TorchState(sampler=ElasticSampler(data, seed=3), epoch=0)
    loader = DataLoader(data, batch_size=4, sampler=state.sampler)
    batches = iter(loader)
    first = [next(batches), next(batches)]
    state.sampler.record_batch(8)
    state.commit()
    third = next(batches)
    state.sampler.record_batch(4)
    state.restore()
    rest = list(loader)
    assert torch.equal(rest[0], third)
    assert torch.cat([*first, *rest]).sort().values.tolist() == list(range(20))


@pytest.mark.parametrize("later", [12, 6])
@pytest.mark.parametrize("consumed", [0, 4, 10])
def test_a_process_with_a_data_set_of_another_length_is_refused(consumed: int, later: int) -> None:
    sampler = sampler_at(10, 0, 1)
    sampler.record_batch(consumed)
    with pytest.raises(UsageError, match=f"has {later} samples, but epoch 0 began with 10"):
        sampler_at(later, 0, 1).load_state_dict(sampler.state_dict())


def test_a_data_set_may_change_between_two_epochs_and_not_within_one() -> None:
    dataset = list(range(10))
    sampler = ElasticSampler(dataset, shuffle=False)
    sampler.record_batch(8)
    dataset.append(10)
    for use in (lambda: len(sampler), lambda: list(sampler), lambda: sampler.record_batch(1)):
        with pytest.raises(UsageError, match="has 11 samples, but epoch 0 began with 10"):
            use()
    sampler.set_epoch(1)
    assert list(sampler) == list(range(11))
