"""The Accelerator in a world of one: what it computes, how the loop continues, and what it refuses."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from elasticstate import TorchState, UsageError
from elasticstate.huggingface import Accelerator, TrainingState

SAMPLES, BATCH = 46, 4


def data(size: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(size, 8, generator=generator)
    return DataLoader(TensorDataset(rows, (rows.sum(1) > 0).long()), **{"batch_size": BATCH, **options})


class Loop:
    """The objects of a script, and its loop."""

    def __init__(self, accelerator: accelerate.Accelerator, model: torch.nn.Module, loader: DataLoader[Any]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
        self.accelerator = accelerator
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def epoch(self) -> Any:
        """Yield the loss and the learning rate after each batch."""
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            yield loss.item(), self.scheduler.get_last_lr()[0]


def by_step(batches: Any) -> list[tuple[float, float]]:
    """Return the mean loss and the learning rate of each step, which has two batches."""
    values = list(batches)
    return [((a + b) / 2, lr) for (a, _), (b, lr) in zip(values[::2], values[1::2], strict=True)]


def network(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(dropout), torch.nn.Linear(16, 3))


def first_world(**values: Any) -> TrainingState:
    state = TrainingState(**values)
    state.sync()
    return state


def accelerator(state: TrainingState, **options: Any) -> Accelerator:
    return Accelerator(state, cpu=True, **{"gradient_accumulation_steps": 2, **options})


def test_it_computes_what_accelerate_computes() -> None:
    """With 48 samples all batches are equally large: then both divide the loss by the same number."""
    plain = Loop(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), network(), data(48))
    expected = [value for _ in range(3) for value in by_step(plain.epoch())]
    state = first_world()
    loop = Loop(accelerator(state), network(), data(48))
    assert len(loop.loader) == len(plain.loader) == 12
    found = [value for _ in loop.accelerator.epochs(3) for value in by_step(loop.epoch())]
    assert len(found) == 18
    assert found == [pytest.approx(pair, rel=1e-5) for pair in expected]


def test_the_loop_continues_after_a_failure_as_if_nothing_had_happened() -> None:
    """Each world has new objects. Commits are made at optimizer steps only, also if each batch calls commit."""
    expected: list[float] = []
    state = first_world()
    loop = Loop(accelerator(state), network(0.3), data(shuffle=True))
    for _ in loop.accelerator.epochs(3):
        expected += [loss for loss, _ in loop.epoch()]
    state = first_world(losses=[])
    crashes = [9, 14, 27, 0]
    for crash in crashes:
        loop = Loop(accelerator(state), network(0.3), data(shuffle=True))
        for _ in loop.accelerator.epochs(3):
            for loss, _ in loop.epoch():
                state.losses.append(loss)
                if len(state.losses) == crash:
                    break
                state.commit(every=2)
            else:
                continue
            break
        if crash:
            state.restore()
            state.sync()
    assert state.losses == expected
    assert len(expected) == 36


def test_later_loaders_stay_accelerates() -> None:
    state = first_world()
    mine = accelerator(state)
    training, evaluation = mine.prepare(data(shuffle=True), data())
    assert state.attached("loader").dataset is training.dataset
    assert isinstance(evaluation, accelerate.data_loader.DataLoaderShard)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(())


def test_what_cannot_be_elastic_is_refused() -> None:
    state = first_world()
    with pytest.raises(UsageError, match="is a TorchState, and must be the state"):
        Accelerator(TorchState(step=0), cpu=True)
    plugins = {"fsdp_plugin": FullyShardedDataParallelPlugin(), "parallelism_config": ParallelismConfig()}
    for name, plugin in plugins.items():
        with pytest.raises(UsageError, match=f"{name}= is not supported"):
            accelerator(state, **{name: plugin})
    for name in ("split_batches", "dispatch_batches"):
        state = first_world()
        with pytest.raises(UsageError, match=f"{name}=True is not supported"):
            accelerator(state, dataloader_config=accelerate.DataLoaderConfiguration(**{name: True}))
    mine = accelerator(first_world())
    with pytest.raises(UsageError, match="register_for_checkpointing\\(\\) is not supported"):
        mine.register_for_checkpointing(network())
    with pytest.raises(UsageError, match="Stream has no length or no indices"):
        mine.prepare(DataLoader(Stream(), batch_size=2))
    with pytest.raises(UsageError, match="has a WeightedRandomSampler and a BatchSampler"):
        mine.prepare(data(sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)))
    with pytest.raises(UsageError, match="begins without model"):
        next(mine.epochs(1))
    mine.prepare(network())
    with pytest.raises(UsageError, match="There is a second model in this world"):
        mine.prepare(network())


def test_a_scheduler_that_would_begin_again_in_each_world_is_an_error() -> None:
    def begin(**values: Any) -> None:
        state = first_world(**values)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if "mine" in values:
            state.mine = scheduler
        one = accelerator(state)
        one.prepare(model, optimizer, data())
        next(iter(one.epochs(1)))

    with pytest.raises(UsageError, match=r"scheduler of the optimizer was not passed to accelerator.prepare\(\)"):
        begin()
    begin(mine=None)


def test_a_second_epoch_without_epochs_is_an_error() -> None:
    state = first_world()
    loop = Loop(accelerator(state), network(), data())
    list(loop.epoch())
    with pytest.raises(UsageError, match="Epoch 0 is over"):
        next(loop.epoch())


def test_wrong_values_of_the_state_are_refused() -> None:
    with pytest.raises(UsageError, match="workers=-1: must be at least 1"):
        TrainingState(workers=-1)
    with pytest.raises(UsageError, match="loader= cannot be given"):
        TrainingState(loader=1)
