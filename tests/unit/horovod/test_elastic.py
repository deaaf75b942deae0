from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticstate
import elasticstate.horovod as hvd
from elasticstate import UsageError
from elasticstate.horovod.elastic import sampler as sampler_module


class Rank:
    """Sampler of one rank, and the world that it reads."""

    def __init__(self, patch: pytest.MonkeyPatch, n: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.take(patch)
        self.sampler = hvd.elastic.ElasticSampler(range(n), seed=3)

    def take(self, patch: pytest.MonkeyPatch) -> Rank:
        patch.setattr(sampler_module, "_rank", lambda: self.rank)
        patch.setattr(sampler_module, "_size", lambda: self.size)
        return self


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(0, 60),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6)), max_size=4),
)
def test_each_sample_is_seen_and_ranks_get_equally_many(n: int, worlds: list[tuple[int, int, int]]) -> None:
    """Each world is (size, batch size, number of steps). The last world runs to the end of the epoch."""
    seen: list[int] = []
    saved = hvd.elastic.ElasticSampler(range(n), seed=3).state_dict()
    with pytest.MonkeyPatch.context() as patch:
        for size, batch_size, steps in [*worlds, (3, 4, n)]:
            ranks = [Rank(patch, n, rank, size) for rank in range(size)]
            for one in ranks:
                one.take(patch).sampler.load_state_dict(saved)
            indices = [list(one.take(patch).sampler) for one in ranks]
            assert {len(own) for own in indices} == {len(one.take(patch).sampler) for one in ranks}
            assert len({len(own) for own in indices}) == 1
            consumed = [i for own in indices for i in own[: steps * batch_size]]
            assert len(consumed) - len(set(consumed)) < size, "no more than what cannot be shared out"
            seen += consumed
            for step in range(min(steps, -(-len(indices[0]) // batch_size))):
                for one in ranks:
                    one.take(patch).sampler.record_batch(step, batch_size)
            assert len({str(one.sampler.state_dict()) for one in ranks}) == 1
            saved = ranks[0].sampler.state_dict()
    assert set(seen) == set(range(n))


def test_indices_are_recorded_in_their_order() -> None:
    sampler = hvd.elastic.ElasticSampler(range(10), seed=1)
    order = list(sampler)
    sampler.record_indices(order[:3])
    assert list(sampler) == order, "until a reset"
    with pytest.raises(UsageError, match="in the order of iteration"):
        sampler.record_indices(order[4:6])
    sampler.reset()
    assert list(sampler) == order[3:]
    sampler.record_indices(order[3:])
    sampler.reset()
    assert list(sampler) == []
    assert len(sampler) == 0
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(10))
    assert sampler.epoch == 1


def test_the_length_is_fixed_until_a_reset(alone: None, next_world: Callable[[], None]) -> None:
    """Scripts compute learning rates and progress from the length, like Horovod's ImageNet example."""
    data = range(40)
    sampler = hvd.elastic.ElasticSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)  # type: ignore[arg-type]  # a range is a dataset
    for epoch in range(2):
        fractions, percent, seen = [], [], []
        for i, indices in enumerate(loader):
            sampler.record_batch(i, len(indices))
            fractions.append((i + 1) / len(loader))
            percent.append(100 * i / len(loader))
            seen += indices.tolist()
        assert fractions == [i / 10 for i in range(1, 11)]
        assert percent == [10 * i for i in range(10)]
        assert sorted(seen) == list(data), f"pass {epoch} without set_epoch is complete"
    saved = sampler.state_dict()
    sampler.set_epoch(1)
    assert len(sampler) == 40
    sampler.record_batch(0, 10)
    assert len(sampler) == 40
    next_world()
    assert len(list(sampler)) == len(sampler) == 30, "the rest is shared out over the new world"
    sampler.load_state_dict(saved)
    assert len(list(sampler)) == len(sampler) == 0, "an epoch that was consumed before the commit is not trained again"


def test_the_attributes_of_horovods_sampler(alone: None) -> None:
    sampler = hvd.elastic.ElasticSampler(range(10), seed=3)
    order = list(sampler)
    assert (sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size) == (1, 0, 10, 10)
    assert sampler.indices == sampler.remaining_indices == order
    assert sampler.get_indices(1, 4) == order[4:8]
    assert sampler.get_indices(2, 4) == order[8:]
    sampler.record_batch(0, 4)
    assert sampler.processed_num == 4
    assert sampler.processed_indices == set(order[:4])
    assert sampler.remaining_indices == order, "until a reset"
    sampler.reset()
    assert sampler.remaining_indices == sampler.indices == order[4:]
    sampler.load_state_dict({"epoch": 0, "processed_num": 7})
    assert sampler.remaining_indices == order[7:]
    assert sampler.state_dict()["consumed"] == 7


def test_values_of_a_state_may_have_names_that_horovod_does_not_use(alone: None) -> None:
    names = {"check": 1, "commits": 2, "commit_bytes": 3, "progress": 4, "exclude_from_check": 5, "batch": 6}
    for kind in (hvd.elastic.ObjectState, hvd.elastic.TorchState):
        state = kind(**names)
        assert {name: getattr(state, name) for name in names} == names
        state.save()
        state.commits, state.check, state.progress = 20, 10, 40
        state.restore()
        assert {name: getattr(state, name) for name in names} == names
        state.sync()
    assert hvd.elastic.ObjectState(x=1).commits == (None, None)
    for taken in ("commit", "restore", "sync", "check_host_updates"):
        with pytest.raises(UsageError, match="cannot be the name"):
            hvd.elastic.ObjectState(**{taken: 1})
    with pytest.raises(UsageError, match="cannot be the name"):
        elasticstate.ObjectState(commits=1)


def test_horovods_modules() -> None:
    from elasticstate.horovod import functions, mpi_ops
    from elasticstate.horovod.elastic import sampler, state

    assert mpi_ops.allreduce is hvd.allreduce
    assert functions.broadcast_object is hvd.broadcast_object
    assert sampler.ElasticSampler is hvd.elastic.ElasticSampler
    assert state.TorchState is hvd.elastic.TorchState


def test_a_sampler_made_before_the_world_is_not_reset_by_joining_it(fresh: None) -> None:
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(10))
    iterator = iter(sampler)
    next(iterator)
    sampler.record_batch(0, 4)
    assert len(sampler) == len(list(sampler)) == 10


def test_the_order_is_the_one_of_elasticstate() -> None:
    assert list(hvd.elastic.ElasticSampler(range(50), seed=7)) == list(elasticstate.ElasticSampler(range(50), seed=7))
    assert list(hvd.elastic.ElasticSampler(range(5), shuffle=False)) == list(range(5))


def test_a_training_alone_in_horovods_style(fresh: None) -> None:
    hvd.init()
    torch.manual_seed(0)
    inputs = torch.randn(40, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = hvd.elastic.ElasticSampler(dataset)
    model = nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.5),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState, epochs: int) -> float:
        loss = torch.zeros(())
        for state.epoch in range(state.epoch, epochs):  # noqa: B020 - Horovod's way of writing it
            sampler.set_epoch(state.epoch)
            for batch, (x, y) in enumerate(DataLoader(dataset, 8, sampler=sampler)):
                state.optimizer.zero_grad()
                loss = nn.functional.mse_loss(state.model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                state.optimizer.step()
                sampler.record_batch(batch, 8)
                state.commit()
        return float(hvd.allreduce(loss.detach()))

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    assert train(state, epochs=20) < 1e-3
    assert state.model is model
    assert state.optimizer is optimizer
    assert train.__name__ == "train"


def test_states_take_horovods_arguments() -> None:
    assert hvd.elastic.TorchState(epoch=3).epoch == 3
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=4)
    assert state.batch == 4
    state.batch = 5
    state.commit()
    state.batch = 6
    state.restore()
    assert state.batch == 5
    assert isinstance(state, hvd.elastic.State)
    assert issubclass(hvd.elastic.State, elasticstate.State)


def test_a_commit_of_a_distributed_optimizer(alone: None) -> None:
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.5))
    state = hvd.elastic.TorchState(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    state.commit()
    step()
    assert len(optimizer.state) == 2
    state.restore()
    assert not optimizer.state
    step()
    optimizer.param_groups[0]["lr"] = 0.25
    state.commit()
    moment = optimizer.state[model.weight]["exp_avg"]
    before = moment.clone()
    optimizer.param_groups[0]["lr"] = 1.0
    step()
    step()
    state.restore()
    assert optimizer.state[model.weight]["exp_avg"] is moment
    assert torch.equal(moment, before)
    assert optimizer.param_groups[0]["lr"] == 0.25
    step()
