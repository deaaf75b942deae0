from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from elasticstate.errors import StateError
from elasticstate.state.base import committer_of
from elasticstate.state.torch import TorchState
from tests.kit.state import OneClock, read_commit

Optimizers = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=3),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)).to(dtype)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def picture(value: Any) -> Any:
    """Return a deep copy in which ``==`` compares tensors bit by bit."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return ("tensor", value.dtype, tuple(value.shape), flat.tolist())
    if isinstance(value, np.ndarray):
        return ("array", value.dtype, value.tolist())
    if isinstance(value, dict):
        return {key: picture(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [picture(item) for item in value]
    return copy.deepcopy(value)


def all_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return picture([model.state_dict(), optimizer.state_dict()])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_each_restore_gives_the_commit_bit_by_bit(name: str, steps_before: int) -> None:
    model = model_of()
    optimizer = OPTIMIZERS[name](model.parameters())
    for seed in range(steps_before):
        step(model, optimizer, seed)
    state = TorchState(model=model, optimizer=optimizer)
    state.commit()
    committed = all_of(model, optimizer)
    after: list[Any] = []
    for _ in range(3):  # the writes of these steps must not reach the commit
        for seed in range(10, 13):
            step(model, optimizer, seed)
        after.append(all_of(model, optimizer))
        assert after[-1] != committed
        state.restore()
        assert all_of(model, optimizer) == committed
    assert after[0] == after[1] == after[2]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_newcomer_gets_all_and_goes_on_bitwise_equal(name: str, steps_before: int) -> None:
    """The newcomer makes no step of its own: with weight decay, even a zero-gradient step would change its weights."""
    old, new = model_of(0), model_of(1)
    old_optimizer, new_optimizer = OPTIMIZERS[name](old.parameters()), OPTIMIZERS[name](new.parameters())
    for group in old_optimizer.param_groups:  # as after a schedule
        group["lr"] = group["lr"] * 0.5
        group["initial_lr"] = 1.0
    for seed in range(steps_before):
        step(old, old_optimizer, seed)
    source = TorchState(model=old, optimizer=old_optimizer)
    target = TorchState(model=new, optimizer=new_optimizer)
    source.commit()
    target.apply(read_commit(committer_of(source).snapshot, source.commits[0]))
    assert all_of(new, new_optimizer) == all_of(old, old_optimizer)
    for seed in range(5):
        step(old, old_optimizer, seed)
        step(new, new_optimizer, seed)
    assert all_of(new, new_optimizer) == all_of(old, old_optimizer)


def test_tensors_are_restored_in_place() -> None:
    model = model_of()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step(model, optimizer, 0)
    tensors = [*model.parameters(), *model.buffers(), *(t for s in optimizer.state.values() for t in s.values())]
    assert len(tensors) == 6 + 3 + 6 * 3
    addresses = [tensor.data_ptr() for tensor in tensors]
    state = TorchState(model=model, optimizer=optimizer)
    state.commit()
    step(model, optimizer, 1)
    state.restore()
    after = [*model.parameters(), *model.buffers(), *(t for s in optimizer.state.values() for t in s.values())]
    assert all(a is b for a, b in zip(tensors, after, strict=True))
    assert [tensor.data_ptr() for tensor in after] == addresses


def test_optimizer_state_of_another_dtype_than_the_parameters_keeps_it() -> None:
    """``Optimizer.load_state_dict`` would cast the state to the parameter's dtype."""
    model = model_of(dtype=torch.bfloat16)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter]["master"] = torch.randn(parameter.shape)
    before = picture(optimizer.state_dict())
    state = TorchState(optimizer=optimizer)
    state.commit()
    for entry in optimizer.state.values():
        entry["master"].zero_()
    state.restore()
    assert picture(optimizer.state_dict()) == before


def test_what_has_come_into_a_parameter_group_after_the_commit_goes() -> None:
    optimizer = OPTIMIZERS["sgd"](model_of().parameters())
    state = TorchState(optimizer=optimizer)
    state.commit()
    lr_scheduler.StepLR(optimizer, 1)
    assert "initial_lr" in optimizer.param_groups[0]
    state.restore()
    assert "initial_lr" not in optimizer.param_groups[0]


def test_an_optimizer_that_overrides_its_state_dict_is_asked() -> None:
    class Counting(torch.optim.SGD):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            state_dict = dict(state_dict)
            self.count = state_dict.pop("count")
            super().load_state_dict(state_dict)

    model = model_of()
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer, 0)
    optimizer.count = 5
    state = TorchState(model=model, optimizer=optimizer)
    state.commit()
    committed = all_of(model, optimizer)
    for _ in range(2):
        step(model, optimizer, 1)
        optimizer.count += 1
        state.restore()
        assert all_of(model, optimizer) == committed


def test_group_and_parameter_mismatches_are_named() -> None:
    model = model_of()
    state = TorchState(optimizer=OPTIMIZERS["sgd"](model.parameters()))
    state.commit()
    state.optimizer = OPTIMIZERS["sgd"]([*model.parameters()][:2])
    with pytest.raises(
        StateError,
        match=r"state\.optimizer has parameter groups of \[2\] parameters, and the commit has groups of \[6\]",
    ):
        state.restore()
    state = TorchState(model=model)
    state.commit()
    state.model = torch.nn.Linear(4, 5)
    with pytest.raises(StateError, match=r"state\.model and the commit have different parameters: 0\.bias, 0\.weight"):
        state.restore()
    state.model = model_of()
    state.model[0] = torch.nn.Linear(3, 5)
    before = picture(state.model.state_dict())
    with pytest.raises(StateError, match=r"state\.model: 0\.weight is \(5, 3\), in the commit \(5, 4\)"):
        state.restore()
    assert picture(state.model.state_dict()) == before, "all or nothing"
    state.model = None
    with pytest.raises(StateError, match=r"state\.model is a NoneType, which has no load_state_dict"):
        state.restore()


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=30),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_restored_scheduler_drives_the_real_optimizer(name: str) -> None:
    model = model_of()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    scheduler = SCHEDULERS[name](optimizer)

    def rates(n: int) -> list[float]:
        found = []
        for _ in range(n):
            step(model, optimizer, 0)
            scheduler.step(*[1.0] if name == "plateau" else [])
            found.append(optimizer.param_groups[0]["lr"])
        return found

    rates(2)
    state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler)
    state.commit()
    expected = rates(6)
    assert len(set(expected)) > 1
    for _ in range(2):
        state.restore()
        assert state.scheduler is scheduler
        assert scheduler.optimizer is optimizer
        assert rates(6) == expected


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_ddp_wrapper_is_taken_off() -> None:
    model = model_of()
    state = TorchState(model=DistributedDataParallel(model))
    state.commit()
    committed = picture(model.state_dict())
    with torch.no_grad():
        model[0].weight.zero_()
    state.restore()
    assert picture(model.state_dict()) == committed
    state.model = model  # another world may wrap the model in another way
    with torch.no_grad():
        model[0].weight.zero_()
    state.restore()
    assert picture(model.state_dict()) == committed


def test_no_gradient_survives_a_restore() -> None:
    model, bare = model_of(), torch.nn.Parameter(torch.ones(2))
    state = TorchState(model=model, optimizer=OPTIMIZERS["sgd"]([*model.parameters(), bare]))
    state.commit()
    model(torch.ones(3, 4)).sum().backward()
    bare.grad = torch.ones(2)
    state.restore()
    assert [p.grad for p in [*model.parameters(), bare]] == [None] * 7


def test_a_grad_scaler_that_failed_between_unscale_and_update_can_be_used_again() -> None:
    model = model_of()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = TorchState(model=model, optimizer=optimizer, scaler=scaler)

    def half_step() -> None:
        scaler.scale(model(torch.ones(3, 4)).sum()).backward()
        scaler.unscale_(optimizer)

    half_step()
    scaler.step(optimizer)
    scaler.update(16.0)
    state.commit()
    half_step()
    scaler.update(4.0)
    half_step()
    state.restore()
    assert scaler.get_scale() == 16.0
    half_step()


def test_tensors_arrays_and_objects_and_any_state_dict() -> None:
    class Keeper:
        """Keeps the tensors that it receives, like an optimizer."""

        def __init__(self) -> None:
            self.content: Any = OrderedDict(
                a={0: torch.zeros(2), "0": torch.zeros(3)},
                b=[torch.zeros(1), (np.zeros(2), "text", None)],
                **{"a.0": torch.ones(1)},
            )

        def state_dict(self) -> Any:
            return self.content

        def load_state_dict(self, content: Any) -> None:
            self.content = content

    tensor, array, keeper = torch.zeros(2), np.zeros(2), Keeper()
    state = TorchState(tensor=tensor, array=array, keeper=keeper, epoch=0, log=[1], nothing=None)
    state.commit()
    committed = picture(keeper.content)
    kept = keeper.content["a"][0]
    for _ in range(2):
        tensor.fill_(1)
        array.fill(1)
        keeper.content["a"][0].fill_(5)
        keeper.content["a"]["0"].fill_(6)
        keeper.content["b"][1][0].fill(7)
        keeper.content["new"] = 1
        state.epoch, state.nothing = 7, "something"
        state.log.append(2)
        state.restore()
        assert (tensor.tolist(), array.tolist()) == ([0, 0], [0, 0])
        assert state.tensor is tensor
        assert state.array is array
        assert picture(keeper.content) == committed
        assert keeper.content["a"][0] is kept
        assert type(keeper.content) is OrderedDict
        assert type(keeper.content["b"][1]) is tuple
        assert (state.epoch, state.log, state.nothing) == (0, [1], None)


def test_an_object_may_keep_results_of_autograd_and_copy_what_it_loads() -> None:
    """Averages of parameters do both: they keep clones of parameters, and load deep copies."""

    class Average:
        def __init__(self, parameter: torch.Tensor) -> None:
            self.kept = {"clones": [parameter.clone()], "parameter": parameter}

        def state_dict(self) -> Any:
            return self.kept

        def load_state_dict(self, content: Any) -> None:
            self.kept = copy.deepcopy(content)

    average = Average(torch.ones(2, requires_grad=True))
    state = TorchState(average=average)
    state.commit()
    for _ in range(2):
        average.kept["clones"] = [clone.detach() * 3 + average.kept["parameter"] for clone in average.kept["clones"]]
        assert not average.kept["clones"][0].is_leaf
        state.restore()
        assert picture(average.kept) == picture({"clones": [torch.ones(2)], "parameter": torch.ones(2)})
        assert average.kept["parameter"].requires_grad


def test_a_value_that_is_a_result_of_autograd_loses_the_graph_of_the_lost_attempt() -> None:
    weight = torch.ones(2, requires_grad=True)
    state = TorchState(hidden=torch.zeros(2))
    state.hidden = weight * 2
    state.commit()
    for _ in range(2):
        state.hidden = torch.tanh(state.hidden + weight)
        state.restore()
        assert state.hidden.tolist() == [2, 2]
        assert (state.hidden.is_leaf, state.hidden.requires_grad) == (True, False), "as a new worker has it"


def test_random_state_goes_with_the_commit() -> None:
    def draw() -> Any:
        dropout = torch.nn.functional.dropout(torch.ones(20))
        return picture([random.random(), np.random.rand(), dropout])

    state = TorchState(epoch=0)
    state.commit()
    first = draw()
    state.restore()
    assert draw() == first


def test_names_tell_where_a_tensor_is() -> None:
    model = model_of()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step(model, optimizer, 0)
    captured = TorchState(model=model, optimizer=optimizer).capture()
    assert captured["model.parameters.0.weight"] is model[0].weight
    assert captured["optimizer.state.0.exp_avg"] is optimizer.state[model[0].weight]["exp_avg"]


def test_a_restore_removes_the_parameter_groups_that_the_commit_does_not_have() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    state = TorchState(model=model, optimizer=optimizer)
    step(model, optimizer, 0)
    state.commit()
    before = picture(optimizer.state_dict())
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    step(model, optimizer, 1)
    optimizer.param_groups[0]["new"] = 1
    state.restore()
    assert picture(optimizer.state_dict()) == before
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


def test_a_commit_with_a_parameter_group_of_no_module_of_the_state_is_refused_with_the_remedy() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
    state = TorchState(model=model[:2], optimizer=optimizer)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    state.commit()
    del optimizer.param_groups[1]
    with pytest.raises(
        StateError, match=r"state.optimizer has parameter groups of \[2\] .* \[2, 2\].*before the first"
    ):
        state.restore()


def overlapping(rows: int = 4) -> torch.Tensor:
    """Return a tensor that cannot be written in place: all rows share the same memory."""
    return torch.ones(1, 3).expand(rows, 3)


def in_inference_mode() -> torch.Tensor:
    """Return a tensor with gaps that torch allows no write to outside of inference mode."""
    with torch.inference_mode():
        return torch.arange(12.0).reshape(3, 4).t()


@pytest.mark.parametrize("make", [overlapping, in_inference_mode, lambda: torch.arange(5.0).as_strided((3, 3), (1, 1))])
def test_what_cannot_be_written_in_place_comes_back(make: Callable[[], torch.Tensor]) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(make(), requires_grad=False)
            self.register_buffer("buffer", make())

    state = TorchState(model=Module(), value=make(), nested={"a": [make()]}, optimizer=torch.optim.SGD([torch.ones(1)]))
    state.optimizer.param_groups[0]["odd"] = make()
    state.commit()
    expected, weight = picture(make()), state.model.weight
    newcomer = TorchState(
        model=Module(), value=make(), nested={"a": [make()]}, optimizer=torch.optim.SGD([torch.ones(1)])
    )
    newcomer.optimizer.param_groups[0]["odd"] = make()
    newcomer.apply(read_commit(committer_of(state).snapshot, state.commits[0]))
    state.value = torch.zeros(state.value.shape)
    for _ in range(2):
        state.restore()
        for one in (state, newcomer):
            found = [one.model.weight, one.model.buffer, one.value, one.nested["a"][0]]
            found.append(one.optimizer.param_groups[0]["odd"])
            assert [picture(tensor) for tensor in found] == [expected] * 5
    assert state.model.weight is weight
    newcomer.commit()


def test_what_is_one_tensor_in_the_commit_is_one_in_a_newcomer() -> None:
    def made() -> Any:
        model = torch.nn.Linear(2, 2)
        optimizer = OneClock(model.parameters())
        return TorchState(model=model, optimizer=optimizer, first=None, second=None, weight=None, array=None, same=None)

    state = made()
    state.optimizer.step()
    state.first = state.second = torch.ones(3)
    state.weight = state.model.weight.data
    state.array = state.same = np.ones(3)
    state.commit()
    newcomer, other = made(), made()
    values = committer_of(state).snapshot.load_into({})
    other.apply(values)
    newcomer.apply(values)
    assert newcomer.first is newcomer.second
    assert newcomer.first is not other.first
    assert newcomer.array is newcomer.same
    assert type(newcomer.weight) is torch.Tensor
    for each in (state, newcomer):
        each.optimizer.step()
        each.first.add_(1)
    assert torch.equal(newcomer.weight, newcomer.model.weight)
    assert torch.equal(newcomer.weight, state.weight)
    assert torch.equal(newcomer.second, state.second)


def test_empty_tensors_are_not_tied() -> None:
    state = TorchState(first=torch.ones(0), second=torch.ones(0))
    state.commit()
    newcomer = TorchState(first=None, second=None)
    newcomer.apply(committer_of(state).snapshot.load_into({}))
    assert newcomer.first is not newcomer.second
