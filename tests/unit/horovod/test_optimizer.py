from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elasticstate.horovod as hvd
from elasticstate import UsageError
from elasticstate.horovod import optimizer as module
from elasticstate.horovod.optimizer import Bucket, drop_all, plan


class Failure(RuntimeError):
    """Error raised by a collective."""


def make(**options: Any) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvd.DistributedOptimizer(optimizer, **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 3)).square().sum().backward()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """The buckets that were launched, in order."""
    found: list[Bucket] = []
    launch = Bucket.launch

    def noted(self: Bucket, *arguments: Any) -> None:
        found.append(self)
        launch(self, *arguments)

    monkeypatch.setattr(Bucket, "launch", noted)
    return found


# ----------------------------------------------------------------------------------------------------------- buckets


def test_buckets_are_filled_from_the_last_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BYTES", 8)
    monkeypatch.setattr(module, "BYTES", 16)
    sizes = [1, 2, 3, 1, 1, 1]  # in elements of 4 bytes
    parameters = [torch.empty(n) for n in sizes]
    assert [[len(p) for p in bucket] for bucket in plan(parameters)] == [[1, 1], [1, 3], [2, 1]]
    mixed = [*parameters, torch.empty(9, dtype=torch.float64)]
    assert [[len(p) for p in bucket] for bucket in plan(mixed)] == [[9], [1, 1], [1, 3], [2, 1]]
    assert plan([]) == []


def test_buckets_go_in_their_order_whatever_order_gradients_come_in(
    alone: None, launched: list[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_BYTES", 1)
    monkeypatch.setattr(module, "BYTES", 1)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    for i, expected in ((3, 1), (0, 1), (1, 1), (2, 4)):
        parameters[i].sum().backward()
        assert len(launched) == expected
    assert [bucket.parameters[0] is p for bucket, p in zip(launched, reversed(parameters), strict=True)] == [True] * 4
    optimizer.step()
    assert len(launched) == 4
    assert all(p.item() == -1 for p in parameters)


# --------------------------------------------------------------------------------- differences from the plain optimizer


def test_it_is_an_optimizer_of_the_same_class_with_the_same_state(alone: None) -> None:
    model = nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state is plain.state
    assert type(optimizer).state_dict is torch.optim.Optimizer.state_dict
    assert type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    assert "lr: 0.1" in repr(optimizer)
    backward(model)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.3
    for one, other in ((optimizer, plain), (plain, optimizer)):
        one.load_state_dict(saved)
        assert one.state is other.state
        assert one.param_groups is other.param_groups
        assert other.param_groups[0]["lr"] == 0.3
        assert set(other.state) == set(model.parameters())


@pytest.mark.parametrize("of_plain", [True, False])
def test_a_scheduler_takes_either(alone: None, of_plain: bool, launched: list[Bucket]) -> None:
    """The scheduler does not warn that the optimizer has made no step, and steps are reduced."""
    model = nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    early = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5) if of_plain else None
    optimizer = hvd.DistributedOptimizer(plain)
    scheduler = early or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        assert len(launched) == step + 1
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_hooks_of_the_optimizer_see_reduced_gradients(alone: None) -> None:
    model, optimizer = make()
    reduced: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: reduced.append(not optimizer._reducer.pending))
    backward(model)
    assert optimizer._reducer.pending
    optimizer.step()
    assert reduced == [True]


def test_a_grad_scaler_takes_it(alone: None) -> None:
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model[0].weight.detach().clone()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model[0].weight)


def test_it_cannot_be_copied_or_wrapped_twice(alone: None) -> None:
    _, optimizer = make()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="state_dict"):
            copied(optimizer)
    with pytest.raises(UsageError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(UsageError, match=r"must be a torch\.optim\.Optimizer"):
        hvd.DistributedOptimizer(nn.Linear(1, 1))  # type: ignore[type-var]  # the wrong type


def test_a_later_one_takes_the_place_of_an_earlier_one(alone: None, launched: list[Bucket]) -> None:
    model, first = make()
    later = hvd.DistributedOptimizer(first._plain)
    backward(model)
    assert len(launched) == 1
    assert not first._reducer.pending
    later.step()
    assert len(launched) == 1


# ----------------------------------------------------------------------------------------------------------- arguments


def test_names_are_checked() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="repeated names: bias"):
        hvd.DistributedOptimizer(optimizer, [("bias", model.bias), ("bias", model.weight)])
    with pytest.raises(ValueError, match="1 parameters of the optimizer have no name"):
        hvd.DistributedOptimizer(optimizer, [("bias", model.bias)])
    with pytest.raises(ValueError, match="pairs"):
        hvd.DistributedOptimizer(optimizer, model.parameters())  # type: ignore[arg-type]  # the wrong type


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"op": hvd.Adasum}, "Adasum"),
        ({"op": hvd.Max}, "Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"process_set": 1}, "must be a ProcessSet"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make(**options)


def test_each_parameter_has_a_name_of_its_own(alone: None) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [{"params": layer.parameters()} for layer in model]
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
    assert sorted(optimizer._parameter_names.values()) == [
        f"allreduce.noname.{group}.{i}" for group in range(2) for i in range(2)
    ]
    optimizer = hvd.DistributedOptimizer(optimizer._plain, model.named_parameters())
    assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("groups", [0, -1, "x", [1], [[1]]])
def test_groups_are_checked(groups: Any) -> None:
    with pytest.raises(ValueError, match="groups"):
        make(groups=groups)


def test_groups_of_parameters_have_each_once() -> None:
    model = nn.Linear(3, 2)
    wrap = functools.partial(hvd.DistributedOptimizer, torch.optim.SGD(model.parameters(), lr=0.1))
    wrap(groups=[[model.weight], [model.bias]])
    wrap(groups=2)
    with pytest.raises(ValueError, match="twice"):
        wrap(groups=[[model.weight], [model.bias, model.weight]])


# -------------------------------------------------------------------------------------------------------------- misuse


def test_a_step_after_synchronize_warns_outside_the_context(alone: None) -> None:
    model, optimizer = make()
    for _ in range(2):
        backward(model)
        optimizer.synchronize()
        with pytest.warns(UserWarning, match=r"without optimizer\.skip_synchronize\(\) context"):
            optimizer.step()
        optimizer.zero_grad()
        backward(model)
        optimizer.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            optimizer.zero_grad()


def test_misuse_is_what_horovod_raises(alone: None) -> None:
    model, optimizer = make()
    with pytest.raises(ValueError, match="at least 1"):
        make(backward_passes_per_step=0)
    with pytest.raises(ValueError, match="op=Average"):
        make(op=hvd.Sum, gradient_predivide_factor=2.0)
    backward(model)
    with pytest.raises(AssertionError, match="after step"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
        backward(model)


def test_zero_grad_between_backward_and_step(alone: None) -> None:
    model, optimizer = make()
    optimizer.zero_grad()
    backward(model)
    with pytest.raises(UsageError, match="after step"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert model[0].weight.grad is None


def test_more_passes_than_were_said(alone: None) -> None:
    model, optimizer = make(named_parameters=None)
    backward(model)
    with pytest.raises(UsageError, match="backward_passes_per_step=1"):
        backward(model)
    optimizer.zero_grad()  # drops everything that is pending
    optimizer.set_backward_passes_per_step(2)
    backward(model)
    with pytest.raises(UsageError, match="after step"):
        optimizer.set_backward_passes_per_step(1)
    with pytest.raises(UsageError, match="after step"):
        optimizer.zero_grad()
    backward(model)
    optimizer.step()
    with pytest.raises(UsageError, match="at least 1"):
        optimizer.set_backward_passes_per_step(0)


# ------------------------------------------------------------------------------------------------------------ failures


def test_what_was_pending_in_another_world_is_dropped(
    alone: None, next_world: Callable[[], None], launched: list[Bucket]
) -> None:
    model, optimizer = make()
    backward(model)
    next_world()
    optimizer.zero_grad()
    backward(model)
    assert len(launched) == 2
    optimizer.step()
    model[1].weight.sum().backward()
    next_world()
    for p in model.parameters():
        p.grad = None
    backward(model)
    optimizer.step()
    assert len(launched) == 3


@pytest.mark.parametrize("where", ["backward", "step"])
def test_a_collective_that_fails_raises_its_own_error_and_leaves_nothing_pending(
    alone: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model, optimizer = make()
    all_reduce = dist.all_reduce

    class Work:
        def wait(self) -> None:
            raise Failure("Connection closed by peer")

    def fails(*_: Any, **__: Any) -> Work:
        work = Work()
        if where == "backward":
            work.wait()
        return work

    monkeypatch.setattr(dist, "all_reduce", fails)
    with pytest.raises(Failure, match="closed by peer"):  # noqa: PT012 - either call raises
        backward(model)
        optimizer.step()
    assert not optimizer._reducer.pending
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_an_error_of_the_script_inside_backward(alone: None, next_world: Callable[[], None]) -> None:
    """The error comes after half of the gradients. Then the world is left."""
    model, optimizer = make()
    middle = model[0](torch.ones(1, 3))
    middle.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model[1](middle).sum().backward()
    assert optimizer._reducer.pending
    drop_all()
    assert not optimizer._reducer.pending
    assert all(bucket._work is None for bucket in optimizer._reducer._buckets)
    next_world()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_a_model_that_is_cast_after_the_optimizer_was_made(alone: None) -> None:
    model, optimizer = make()
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    model.double()
    optimizer.state.clear()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert model[0].weight.grad.dtype == torch.float64
