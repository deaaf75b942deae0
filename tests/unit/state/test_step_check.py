"""Optimizers that step in a training function, and are not in the state with all that they write."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elasticstate import ObjectState, State, TorchState, UsageError
from elasticstate.state import step_check
from elasticstate.state.base import committer_of
from elasticstate.state.step_check import StepCheck
from tests.kit.state import Member, World

FORGOTTEN = "but is in no value of the state: a worker that is restarted would continue with a new optimizer"
MISSING = "that is in no value of the state: a worker that is restarted would continue with other weights"


@pytest.fixture(autouse=True)
def _warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_check, "_has_warned", False)


class Agent:
    def __init__(self) -> None:
        self.net = net()
        self.optimizer = adam(self.net)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 2)


def adam(*modules: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=0.1, **options)


def step(model: Callable[[torch.Tensor], torch.Tensor], *optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.rand(3, 4)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def train(state: State, function: Callable[[], object], ticks: int = 2) -> None:
    """Call ``function`` before each tick of a training function."""
    committer_of(state).use_session(Member(World(2)))
    with StepCheck(state, lambda: None):
        for _ in range(ticks):
            function()
            state.commit()


def fails_at_the_first_step(state: State, function: Callable[[], object], text: str) -> None:
    committer_of(state).use_session(Member(World(2)))
    with (
        pytest.raises(UsageError, match="(?s)" + text.replace("(", r"\(").replace(")", r"\)")),
        StepCheck(state, lambda: None),
    ):
        function()


def fails_at_the_first_commit(state: State, function: Callable[[], object], text: str) -> None:
    committer_of(state).use_session(Member(World(2)))
    done: list[bool] = []

    def step_and_commit() -> None:
        function()
        done.append(True)
        state.commit()

    with pytest.raises(UsageError, match=text), StepCheck(state, lambda: None):
        step_and_commit()
    assert done


# ---------------------------------------------------------------------------------------------------- found at once

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "own": lambda p: Own(p, {}),
}


class Own(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p -= 0.1 * p.grad


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_is_not_in_the_state(kind: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    state = TorchState(model=model, step=0)
    text = f"{type(optimizer).__name__} steps on state.model.weight, {FORGOTTEN}"
    fails_at_the_first_step(state, lambda: step(model, optimizer), text)


@pytest.mark.parametrize("ends", ["step", "commit", "function"])
def test_an_error_that_the_script_catches_is_raised_again(ends: str) -> None:
    model = net()
    optimizer = adam(model)
    state = TorchState(model=model)
    committer_of(state).use_session(Member(World(2)))
    later = {"step": lambda: step(model, optimizer), "commit": state.commit, "function": lambda: None}

    def skips_a_bad_batch() -> None:
        with contextlib.suppress(UsageError):
            step(model, optimizer)
        later[ends]()

    with pytest.raises(UsageError, match=FORGOTTEN), StepCheck(state, lambda: None):
        skips_a_bad_batch()


def test_an_optimizer_with_a_closure() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.rand(3, 4)).square().mean()
        loss.backward()
        return loss

    fails_at_the_first_step(TorchState(model=model), lambda: optimizer.step(closure), FORGOTTEN)
    train(TorchState(model=model, optimizer=optimizer), lambda: optimizer.step(closure))


def test_one_of_two_optimizers() -> None:
    first, second = net(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    mine, forgotten = adam(first), adam(second)
    state = TorchState(first=first, second=second, optimizer=mine, step=0)
    fails_at_the_first_step(state, lambda: (step(first, mine), step(second, forgotten)), FORGOTTEN)


def test_a_scheduler_and_a_scaler_are_no_optimizer() -> None:
    model = net()
    optimizer = adam(model)
    state = TorchState(
        model=model,
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        plateau=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        scaler=torch.amp.GradScaler("cpu"),
        data=torch.utils.data.RandomSampler([1, 2]),
        step=0,
    )
    fails_at_the_first_step(state, lambda: step(model, optimizer), FORGOTTEN)


def test_a_model_that_is_not_in_the_state() -> None:
    model = net()
    optimizer = adam(model)
    text = f"state.optimizer (AdamW) steps on a parameter of shape (2, 4) {MISSING}"
    fails_at_the_first_step(TorchState(optimizer=optimizer, step=0), lambda: step(model, optimizer), text)


def test_an_optimizer_of_another_model_that_gets_no_gradients() -> None:
    model = net()
    other = adam(nn.Linear(4, 2))

    def train_the_model_only() -> None:
        model(torch.ones(1, 4)).sum().backward()
        other.step()

    text = r"state\.optimizer \(AdamW\) steps on a parameter of shape \(2, 4\) that is in no value of the state"
    fails_at_the_first_commit(TorchState(model=model, optimizer=other), train_the_model_only, text)
    frozen = net()
    for parameter in frozen.parameters():
        parameter.requires_grad = False
    train(TorchState(model=frozen, optimizer=adam(frozen)), adam(frozen).step)


def test_a_parameter_besides_the_model() -> None:
    model, scale = net(), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    state = TorchState(model=model, optimizer=optimizer)

    def train_both() -> None:
        step(lambda x: model(x) * scale.sum(), optimizer)

    fails_at_the_first_step(state, train_both, rf"a parameter of shape (3,) {MISSING}")
    train(TorchState(model=model, optimizer=optimizer, scale=scale), train_both)


def test_a_parameter_of_no_value_that_gets_a_gradient_later() -> None:
    model, scale = net(), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    state = TorchState(model=model, optimizer=optimizer)
    train(state, lambda: step(model, optimizer))
    fails_at_the_first_step(state, lambda: step(lambda x: model(x) * scale.sum(), optimizer), MISSING)


def test_an_optimizer_that_gets_another_group_or_takes_the_place_of_another_one() -> None:
    model, other = net(), nn.Linear(2, 3)
    optimizer = adam(model)
    state = TorchState(model=model, optimizer=optimizer)

    def train_in_turn() -> None:
        step(model, optimizer)
        state.optimizer = adam(model)
        step(model, state.optimizer)
        optimizer.add_param_group({"params": list(other.parameters())})
        step(lambda x: other(model(x)), optimizer)

    fails_at_the_first_step(state, train_in_turn, rf"{FORGOTTEN}.*state.optimizer is another object")
    assert state.optimizer.state


# ------------------------------------------------------------------------------------------ found at the first commit


def test_another_optimizer_than_that_of_the_state() -> None:
    model = net()
    optimizer = adam(model)
    state = TorchState(model=model, optimizer=adam(model), step=0)
    fails_at_the_first_commit(state, lambda: step(model, optimizer), "state.optimizer is another object")


def test_a_copy_of_the_model() -> None:
    model = net()
    optimizer = adam(model)
    state = TorchState(model=copy.deepcopy(model), optimizer=optimizer)
    fails_at_the_first_commit(state, lambda: step(model, optimizer), "a parameter of shape")


def test_a_state_dict_from_before_the_first_step() -> None:
    model = net()
    optimizer = adam(model)
    state = TorchState(model=model, optimizer=optimizer.state_dict())
    fails_at_the_first_commit(state, lambda: step(model, optimizer), FORGOTTEN)


def test_plain_values_that_are_empty_stay_empty() -> None:
    model = net()
    optimizer = adam(model)
    state = TorchState(model=model, best=None, losses=[], notes={"a": None})
    fails_at_the_first_commit(state, lambda: step(model, optimizer), FORGOTTEN)


class Trainer:
    """An object with a state of its own."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, keeps_optimizer: bool) -> None:
        self.model, self.optimizer, self.keeps_optimizer = model, optimizer, keeps_optimizer

    def state_dict(self) -> dict[str, Any]:
        own = {"optimizer": self.optimizer.state_dict()} if self.keeps_optimizer else {}
        return {"model": self.model.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


def test_a_trainer_that_leaves_its_optimizer_out_of_its_state_dict() -> None:
    model = net()
    optimizer = adam(model)
    state = TorchState(trainer=Trainer(model, optimizer, keeps_optimizer=False))
    fails_at_the_first_commit(state, lambda: step(model, optimizer), "AdamW steps on a parameter of the state, but is")


class Sam(torch.optim.Optimizer):
    """An optimizer around another one, whose state it forgets. Many copies of such a class exist."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, **options)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def test_an_optimizer_within_another_one() -> None:
    model = net()
    optimizer = Sam(model.parameters(), momentum=0.9)
    state = TorchState(model=model, optimizer=optimizer)
    fails_at_the_first_commit(state, lambda: step(model, optimizer), "SGD steps on state.model.weight")
    train(TorchState(model=model, optimizer=optimizer, base=optimizer.base), lambda: step(model, optimizer))
    stateless = Sam(model.parameters())
    train(TorchState(model=model, optimizer=stateless), lambda: step(model, stateless))


# ------------------------------------------------------------------------------------------------- correct programs


def in_the_state(model: nn.Module, optimizer: Any) -> TorchState:
    return TorchState(model=model, optimizer=optimizer, step=0)


def in_a_wrapper(model: nn.Module, optimizer: Any) -> TorchState:
    return TorchState(trainer=Trainer(model, optimizer, keeps_optimizer=True))


def in_a_list(model: nn.Module, optimizer: Any) -> TorchState:
    return TorchState(model=model, optimizers=[optimizer])


def in_plain_values(model: nn.Module, optimizer: Any) -> ObjectState:
    return ObjectState(model=model, optimizer=optimizer)


def with_a_wrapped_model(model: nn.Module, optimizer: Any) -> TorchState:
    return TorchState(model=torch.compile(model), optimizer=optimizer)


class OwnState(State):
    def capture(self) -> dict[str, Any]:
        return {}

    def apply(self, values: Any) -> None:
        pass


class OwnTorchState(TorchState):
    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "more": 1}


def with_a_capture_of_its_own(model: nn.Module, optimizer: Any) -> TorchState:
    return OwnTorchState(model=model)


def without_values(model: nn.Module, optimizer: Any) -> State:
    return OwnState()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile imports torch.jit
@pytest.mark.parametrize(
    "make",
    [
        *(in_the_state, in_a_wrapper, in_a_list, in_plain_values, with_a_wrapped_model),
        *(with_a_capture_of_its_own, without_values),
    ],
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_in_the_state(
    kind: str, make: Callable[[nn.Module, Any], State], caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(make(model, optimizer), lambda: step(model, optimizer))
    assert not caplog.records


def test_a_model_and_an_optimizer_that_are_copied_before_each_commit(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = adam(model)
    plain: Any = TorchState(weights=None, moments=None, step=0)
    copies: Any = TorchState(model=copy.deepcopy(model), optimizer=adam(net()))
    halves: Any = TorchState(weights={}, optimizer=optimizer)

    def into_plain_values() -> None:
        step(model, optimizer)
        plain.weights, plain.moments = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def into_objects() -> None:
        step(model, optimizer)
        copies.model.load_state_dict(model.state_dict())
        copies.optimizer.load_state_dict(optimizer.state_dict())

    def into_half_precision() -> None:
        step(model, optimizer)
        halves.weights = {name: value.half() for name, value in model.state_dict().items()}

    train(plain, into_plain_values)
    train(copies, into_objects)
    train(halves, into_half_precision)
    assert not caplog.records


def test_an_optimizer_in_bytes() -> None:
    model = net()
    optimizer = adam(model)
    state: Any = TorchState(model=model, blob=b"")

    def function() -> None:
        step(model, optimizer)
        state.blob = repr(optimizer.state_dict()).encode()

    train(state, function)


weights_of_module = net()
optimizer_of_module = adam(weights_of_module)


class Everything:
    """An object whose state is in global variables."""

    def state_dict(self) -> dict[str, Any]:
        return {"model": weights_of_module.state_dict(), "optimizer": optimizer_of_module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weights_of_module.load_state_dict(state["model"])


def test_an_object_whose_state_dict_reads_global_variables() -> None:
    train(TorchState(all=Everything()), lambda: step(weights_of_module, optimizer_of_module))


def test_frozen_parameters_besides_the_model() -> None:
    model, frozen = net(), torch.ones(3)
    unused = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), frozen, unused], lr=0.1)
    train(TorchState(model=model, optimizer=optimizer), lambda: step(model, optimizer))
    train(TorchState(model=model, optimizer=optimizer), optimizer.step)


def test_a_model_that_the_state_does_not_have_is_the_scripts_own(caplog: pytest.LogCaptureFixture) -> None:
    model, probe = net(), net()
    optimizer, own = adam(model), torch.optim.SGD(probe.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "elasticstate"):
        train(TorchState(model=model, optimizer=optimizer), lambda: (step(model, optimizer), step(probe, own)), 4)
    (record,) = caplog.records
    assert "SGD trains parameters that are in no value of the state" in record.getMessage()


def test_steps_outside_the_training_function() -> None:
    model = net()
    optimizer = adam(model)
    state = TorchState(model=model)
    with StepCheck(state, lambda: None):
        pass
    step(model, optimizer)
    state.commit()


@pytest.fixture
def many() -> tuple[TorchState, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(500)))
    optimizer = adam(model, foreach=False)
    return TorchState(model=model, optimizer=optimizer, step=0), optimizer


def test_only_the_first_step_searches_the_state(
    many: tuple[TorchState, torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, optimizer = many
    searches = []
    of_state = state._step_sources
    monkeypatch.setattr(TorchState, "_step_sources", lambda _: searches.append(1) or of_state())
    with StepCheck(state, lambda: None):
        check: Any = committer_of(state).before_commit
        hook = functools.partial(check.__self__._before_a_step, optimizer, (), {})
        hook()
        after_the_first = len(searches)
        for _ in range(3):
            hook()
    assert after_the_first > 0
    assert len(searches) == after_the_first


# ------------------------------------------------------------------------- values that a restore replaces by copies


class Sealed(Agent):
    """An object with a pickling of its own, which a restore cannot write into."""

    def __getstate__(self) -> dict[str, object]:
        return vars(self)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TorchState, lambda agent: {"agent": agent}),
        (TorchState, lambda agent: {"agent": [agent, 0.5]}),
        (ObjectState, lambda agent: {"agent": agent, "step": 0}),
    ],
    ids=["object", "list", "object_state"],
)
def test_a_script_that_trains_what_a_restore_has_replaced(kind: type[State], values: Callable[..., Any]) -> None:
    agent = Sealed()
    state = kind(**values(agent))
    train(state, lambda: step(agent.net, agent.optimizer))
    state.restore()
    fails_at_the_first_step(
        state, lambda: step(agent.net, agent.optimizer), "steps on what state.agent was before this worker received"
    )


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TorchState, lambda agent: {"agent": agent}),
        (TorchState, lambda agent: {"agent": [agent.net, agent.optimizer, 0.5]}),
        (TorchState, lambda agent: {"optimizer": agent.optimizer, "agent": agent}),
        (ObjectState, lambda agent: {"agent": agent.net, "optimizer": agent.optimizer}),
    ],
    ids=["object", "list", "optimizer_apart", "object_state"],
)
def test_a_script_trains_what_a_restore_has_written(kind: type[State], values: Callable[..., Any]) -> None:
    agent = Agent()
    state = kind(**values(agent))
    train(state, lambda: step(agent.net, agent.optimizer))
    weight = agent.net.weight.detach().clone()
    step(agent.net, agent.optimizer)
    state.restore()
    assert torch.equal(agent.net.weight, weight)
    with StepCheck(state, lambda: None):
        step(agent.net, agent.optimizer)
    assert not torch.equal(agent.net.weight, weight)


def test_a_script_that_trains_what_the_state_has_now() -> None:
    state = TorchState(agent=Agent(), step=0)
    train(state, lambda: step(state.agent.net, state.agent.optimizer))
    state.restore()
    with StepCheck(state, lambda: None):
        step(state.agent.net, state.agent.optimizer)


class Unbound:
    """A proxy without what it stands for, as Werkzeug's outside of a request."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError("working outside of request context")


class AgentWithProxy(Agent):
    def __init__(self) -> None:
        self.request = Unbound()
        super().__init__()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "request"}


def test_an_object_with_a_proxy_that_answers_nothing_is_searched() -> None:
    state = TorchState(agent=AgentWithProxy(), step=0)
    train(state, lambda: step(state.agent.net, state.agent.optimizer))
