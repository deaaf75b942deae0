"""Loops with an Accelerator whose steps have several batches, as in a smaller world: the result is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from elasticstate import UsageError
from elasticstate.huggingface import Accelerator, TrainingState

SAMPLES, GLOBAL = 60, 24
ONE, SEVERAL = (24, 1, 1), [(4, 1, 6), (8, 1, 3), (4, 2, 3), (1, 3, 8)]  # batch size, accumulation, workers


class Objects(NamedTuple):
    """The objects that ``prepare`` returns, and the user's own model."""

    accelerator: Accelerator
    net: torch.nn.Module
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])


def prepared(parts: tuple[int, int, int], make: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> Objects:
    batch, accumulation, workers = parts
    state = TrainingState(workers=workers)
    state.sync()
    torch.manual_seed(0)
    rows = torch.randn(SAMPLES, 8)
    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
    optimizer = make(net.parameters(), lr=0.05)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step / workers))
    accelerator = Accelerator(state, cpu=True, gradient_accumulation_steps=accumulation, **options)
    loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=batch, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    return Objects(accelerator, net, model, optimizer, loader, scheduler)


def zero_first(o: Objects, batch: Any) -> None:
    o.optimizer.zero_grad()
    o.accelerator.backward(o.loss(batch))
    o.optimizer.step()
    o.scheduler.step()


def zero_first_to_zeros(o: Objects, batch: Any) -> None:
    o.optimizer.zero_grad(set_to_none=False)
    o.accelerator.backward(o.loss(batch))
    o.optimizer.step()
    o.scheduler.step()


def zero_the_model(o: Objects, batch: Any) -> None:
    o.model.zero_grad()
    o.accelerator.backward(o.loss(batch))
    o.optimizer.step()
    o.scheduler.step()


def zero_by_hand(o: Objects, batch: Any) -> None:
    for parameter in o.net.parameters():
        parameter.grad = None
    o.accelerator.backward(o.loss(batch))
    o.optimizer.step()
    o.scheduler.step()


def zero_between(o: Objects, batch: Any) -> None:
    loss = o.loss(batch)
    o.optimizer.zero_grad()
    o.accelerator.backward(loss)
    o.optimizer.step()
    o.scheduler.step()


def zero_last(o: Objects, batch: Any) -> None:
    o.accelerator.backward(o.loss(batch))
    o.optimizer.step()
    o.scheduler.step()
    o.optimizer.zero_grad()


def accumulate(o: Objects, batch: Any) -> None:
    with o.accelerator.accumulate(o.model):
        zero_last(o, batch)


def only_complete(o: Objects, batch: Any) -> None:
    o.accelerator.backward(o.loss(batch))
    if o.accelerator.sync_gradients:
        o.accelerator.clip_grad_norm_(o.model.parameters(), 0.5)
        o.optimizer.step()
        o.scheduler.step()
    o.optimizer.zero_grad()


def clip(o: Objects, batch: Any) -> None:
    o.optimizer.zero_grad()
    o.accelerator.backward(o.loss(batch))
    o.accelerator.clip_grad_norm_(o.model.parameters(), 0.5)
    o.optimizer.step()
    o.scheduler.step()


def clip_with_torch(o: Objects, batch: Any) -> None:
    o.accelerator.backward(o.loss(batch))
    torch.nn.utils.clip_grad_norm_(o.net.parameters(), 0.5)
    o.accelerator.clip_grad_value_(o.net.parameters(), 0.1)
    o.optimizer.step()
    o.scheduler.step()
    o.net.zero_grad()


def skip_spikes(o: Objects, batch: Any) -> None:
    o.accelerator.backward(o.loss(batch))
    if o.accelerator.clip_grad_norm_(o.model.parameters(), 100.0) > 2.5:
        o.optimizer.zero_grad()
        return
    zero_after_step(o)


def zero_after_step(o: Objects) -> None:
    o.optimizer.step()
    o.scheduler.step()
    o.optimizer.zero_grad()


def two_losses(o: Objects, batch: Any) -> None:
    o.optimizer.zero_grad()
    o.accelerator.backward(o.loss(batch))
    o.accelerator.backward(o.model(batch[0]).square().mean())
    o.optimizer.step()
    o.scheduler.step()


def never_zero(o: Objects, batch: Any) -> None:
    o.accelerator.backward(o.loss(batch))
    o.optimizer.step()
    o.scheduler.step()


def evaluate_inside(o: Objects, batch: Any) -> None:
    zero_first(o, batch)
    o.model.eval()
    with torch.no_grad():
        o.loss(batch)
    o.model.train()


def torch_optimizer(o: Objects, batch: Any) -> None:
    """The optimizer that Accelerate wraps makes a step in each batch: without gradients it changes nothing."""
    o.optimizer.optimizer.zero_grad()
    o.accelerator.backward(o.loss(batch))
    o.optimizer.optimizer.step()
    o.scheduler.step()


LOOPS = (
    zero_first,
    zero_first_to_zeros,
    zero_the_model,
    zero_by_hand,
    zero_between,
    zero_last,
    accumulate,
    only_complete,
    clip,
    clip_with_torch,
    skip_spikes,
    two_losses,
    never_zero,
    evaluate_inside,
    torch_optimizer,
)


def trained(parts: tuple[int, int, int], loop: Callable[[Objects, Any], None], **options: Any) -> list[float]:
    """Return parameters and learning rate after two epochs."""
    o = prepared(parts, **options)
    for _ in o.accelerator.epochs(2):
        for batch in o.loader:
            loop(o, batch)
            o.accelerator.elastic.commit()
    return [*torch.cat([p.detach().flatten() for p in o.net.parameters()]).tolist(), *o.scheduler.get_last_lr()]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_steps_of_several_batches_have_the_result_of_one_batch(loop: Callable[[Objects, Any], None]) -> None:
    whole = trained(ONE, loop)
    for parts in SEVERAL:
        assert trained(parts, loop) == pytest.approx(whole, rel=1e-4, abs=1e-5), parts


def test_a_step_after_the_epoch_uses_all_its_samples() -> None:
    def run(parts: tuple[int, int, int]) -> list[float]:
        o = prepared(parts, torch.optim.SGD)
        for _ in o.accelerator.epochs(2):
            for batch in o.loader:
                o.accelerator.backward(o.loss(batch))
            o.optimizer.step()
            o.optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in o.net.parameters()]).tolist()

    whole = run(ONE)
    for parts in SEVERAL:
        assert run(parts) == pytest.approx(whole, rel=1e-4)


def test_a_loop_that_ends_inside_a_step_leaves_nothing() -> None:
    o = prepared((4, 1, 6))
    for _ in o.accelerator.epochs(1):
        for batch in o.loader:
            o.accelerator.backward(o.loss(batch) * 1e6)
            break
        o.optimizer.step()
        for batch in o.loader:
            zero_first(o, batch)
    broken = torch.cat([p.detach().flatten() for p in o.net.parameters()]).tolist()
    o = prepared((4, 1, 6))
    for _ in o.accelerator.epochs(1):
        for batch in o.loader:
            zero_first(o, batch)
    assert broken == pytest.approx(torch.cat([p.detach().flatten() for p in o.net.parameters()]).tolist())


# --------------------------------------------------------------------------------------------------------------- errors


def own_backward(o: Objects, batch: Any) -> None:
    o.optimizer.zero_grad()
    o.loss(batch).backward()
    o.optimizer.step()


def partly_own_backward(o: Objects, batch: Any) -> None:
    o.accelerator.backward(o.loss(batch))
    o.loss(batch).backward()
    o.optimizer.step()
    o.optimizer.zero_grad()


def two_steps(o: Objects, batch: Any) -> None:
    for _ in range(2):
        o.optimizer.zero_grad()
        o.accelerator.backward(o.loss(batch))
        o.optimizer.step()


def zero_inside(o: Objects, batch: Any) -> None:
    o.accelerator.backward(o.loss(batch))
    o.net.zero_grad()
    o.accelerator.backward(o.loss(batch))
    o.optimizer.step()


def closure(o: Objects, batch: Any) -> None:
    def compute() -> torch.Tensor:
        o.optimizer.zero_grad()
        loss = o.loss(batch)
        o.accelerator.backward(loss)
        return loss

    o.optimizer.step(compute)


def incomplete(o: Objects, batch: Any) -> None:
    if not o.accelerator.sync_gradients:
        o.accelerator.backward(o.loss(batch))


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (own_backward, r"Call accelerator\.backward\(loss\) in place of loss\.backward\(\)"),
        (partly_own_backward, r"Call accelerator\.backward\(loss\) in place of loss\.backward\(\)"),
        (two_steps, "Two backward passes for one batch"),
        (zero_inside, "Two backward passes for one batch"),
        (closure, r"step\(closure\) needs all samples of a step at once"),
        (incomplete, r"had no accelerator\.backward\(\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_needs_the_whole_step_at_once_is_an_error(loop: Callable[[Objects, Any], None], message: str) -> None:
    whole = prepared((20, 1, 1))  # 60 samples: all steps are equally large
    for batch in whole.loader:
        loop(whole, batch)
    for parts in SEVERAL[:2]:
        with pytest.raises(UsageError, match=message):
            trained(parts, loop)


def test_accumulation_that_counts_batches_is_an_error_already_in_the_first_world() -> None:
    def count(batches: Iterator[Any], o: Objects) -> None:
        for number, batch in enumerate(batches, 1):
            o.accelerator.backward(o.loss(batch) / 2)
            if number % 2 == 0:
                o.optimizer.step()
                o.optimizer.zero_grad()

    for parts in (ONE, (8, 1, 3)):
        o = prepared(parts)
        with pytest.raises(UsageError, match="Give Accelerator gradient_accumulation_steps="):
            count(o.loader, o)


def test_a_scheduler_without_the_optimizer_counts_whole_steps() -> None:
    def run(parts: tuple[int, int, int], guarded: bool) -> float:
        o = prepared(parts, step_scheduler_with_optimizer=False)
        for batch in o.loader:
            o.accelerator.backward(o.loss(batch))
            o.optimizer.step()
            if not guarded or o.accelerator.sync_gradients:
                o.scheduler.step()
        return int(o.scheduler.scheduler.last_epoch)

    assert run(ONE, False) == run((4, 1, 6), False) == run((4, 2, 3), True) == 3
    with pytest.raises(UsageError, match="a larger world has fewer of these batches"):
        run((4, 2, 3), False)
