"""Values that a commit pickles, and of which the script has references of its own: a restore writes into them."""

from __future__ import annotations

import copy
import random
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from elasticstate import ObjectState, State, TorchState
from elasticstate.state import divergence
from elasticstate.state.in_place import InPlace, Places
from tests.kit.state import read_commit


class Meter:
    def __init__(self) -> None:
        self.total, self.history = 0.0, [1.0]

    def update(self, value: float) -> None:
        self.total += value
        self.history.append(value)


@dataclass
class Progress:
    epoch: int = 0
    best: dict[str, float] = field(default_factory=dict)


class Names(list[str]):
    """A list with attributes."""


def with_tag(names: Names) -> Names:
    names.tag = "a"  # type: ignore[attr-defined]
    return names


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (lambda: [1, [2]], lambda v: (v.append(3), v[1].append(4))),
    "dict": (lambda: {"a": {"b": 1}}, lambda v: (v.update({len(v): 1}), v["a"].update(b=len(v)))),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end(next(iter(v)))),
    "default": (lambda: defaultdict(list, a=[1]), lambda v: v["b"].append(2)),
    "counter": (lambda: Counter("aab"), lambda v: v.update("ab")),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "set": (lambda: {1, 2}, lambda v: v.add(len(v) + 1)),
    "bytearray": (lambda: bytearray(b"ab"), lambda v: v.extend(b"c")),
    "object": (Meter, lambda v: v.update(2.0)),
    "dataclass": (Progress, lambda v: (v.best.update({str(v.epoch): 1.0}), setattr(v, "epoch", v.epoch + 1))),
    "namespace": (lambda: SimpleNamespace(a=[1]), lambda v: (v.a.append(2), setattr(v, f"b{len(v.a)}", 1))),
    "list_class": (lambda: with_tag(Names("ab")), lambda v: (v.append("c"), setattr(v, "tag", "b"))),
    "python": (lambda: random.Random(1), lambda v: v.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda v: v.random()),
    "numpy_legacy": (lambda: np.random.RandomState(1), lambda v: v.rand()),
    "torch": (lambda: torch.Generator().manual_seed(1), lambda v: torch.rand(1, generator=v)),
}


def content(value: Any) -> Any:
    """Return what can be compared of a value."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return str(value.get_state())
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return copy.deepcopy((value, getattr(value, "__dict__", None))) if not isinstance(value, Meter) else vars(value)


@pytest.mark.parametrize("kind", [TorchState, ObjectState])
@pytest.mark.parametrize("name", CHANGES)
def test_a_reference_of_the_script_has_the_restored_content(kind: type[State], name: str) -> None:
    make, change = CHANGES[name]
    value = make()
    change(value)
    state = kind(value=value)
    state.commit()
    committed = copy.deepcopy(content(value)) if name != "torch" else content(value)
    change(value)
    assert content(value) != committed
    state.restore()
    assert state.value is value
    assert content(value) == committed


def test_a_commit_is_restored_more_than_once() -> None:
    value: dict[str, Any] = {"losses": [1.0], "meter": Meter()}
    state = ObjectState(value=value)
    state.commit()
    for _ in range(3):
        value["losses"].append(2.0)
        value["meter"].update(3.0)
        state.restore()
        assert value["losses"] == [1.0]
        assert vars(value["meter"]) == vars(Meter())


def test_arguments_of_the_command_line_stay_those_of_the_process() -> None:
    args = Namespace(local_rank=1)
    state = ObjectState(args=args)
    state.commit()
    args.local_rank = 0
    state.restore()
    assert (state.args.local_rank, args.local_rank) == (1, 0)


def test_what_the_values_share_is_shared_again() -> None:
    shared = [1]
    state = ObjectState(a=shared, b={"x": shared}, c=[2])
    state.commit()
    state.b["x"] = state.c  # other sharing than in the commit
    state.a, state.c = state.c, [7, 8]
    state.restore()
    assert (state.a, state.b, state.c) == ([1], {"x": [1]}, [2])
    assert state.b["x"] is state.a
    assert state.c is not state.a


def test_a_value_that_contains_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    state = ObjectState(loop=loop)
    state.commit()
    loop[0] = 2
    state.restore()
    assert state.loop is loop
    assert loop[0] == 1
    assert loop[1] is loop


VALUES = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(lambda a, b: SimpleNamespace(a=a, b=b), inner, inner),
    ),
    max_leaves=12,
)


@given(VALUES, VALUES)
def test_any_value_takes_the_content_of_any_other(live: Any, saved: Any) -> None:
    expected = copy.deepcopy(saved)
    in_place = InPlace([])
    in_place.assign(saved, Places({"value": live}).get("value"))
    result = in_place.restore(live, saved)
    assert result == expected
    if type(live) is type(saved) and isinstance(live, list | dict | SimpleNamespace):
        assert result is live


# -------------------------------------------------------------------- objects that a value takes from the script's own


def stages() -> list[dict[str, int]]:
    return [{"stage": number} for number in range(4)]


def as_value(stage: dict[str, int]) -> dict[str, Any]:
    return {"value": stage}


def in_object(stage: dict[str, int]) -> dict[str, Any]:
    return {"value": SimpleNamespace(stage=stage, others=[1])}


def in_dict(stage: dict[str, int]) -> dict[str, Any]:
    return {"value": {"now": stage}}


def put(state: State, stage: dict[str, int]) -> None:
    """Let the value have this stage now."""
    match state.value:
        case SimpleNamespace():
            state.value.stage = stage
        case {"now": _}:
            state.value["now"] = stage
        case _:
            state.value = stage


def present(state: State) -> Any:
    match state.value:
        case SimpleNamespace():
            return state.value.stage
        case {"now": stage}:
            return stage
    return state.value


@pytest.mark.parametrize("kind", [TorchState, ObjectState])
@pytest.mark.parametrize("make", [as_value, in_object, in_dict])
@pytest.mark.parametrize(("committed", "later"), [(0, 1), (1, 2), (2, 0), (1, 1)])
@pytest.mark.parametrize("is_new", [False, True], ids=["survivor", "newcomer"])
def test_a_list_from_which_a_value_takes_its_objects_is_not_written(
    kind: type[State], make: Callable[[dict[str, int]], dict[str, Any]], committed: int, later: int, is_new: bool
) -> None:
    """A curriculum has a list of stages, and the state the present one."""
    all_stages = stages()
    state = kind(**make(all_stages[0]))
    state.commit()
    put(state, all_stages[committed])
    state.commit()
    if is_new:
        commit = read_commit(state._committer.snapshot, state.commits[0])
        all_stages = stages()
        state = kind(**make(all_stages[0]))
        state.apply(commit)
    else:
        put(state, all_stages[later])
        state.restore()
    assert all_stages == stages()
    assert present(state) == stages()[committed]
    put(state, all_stages[3])  # the script goes on, and the next failure comes
    state.commit()
    put(state, all_stages[0])
    state.restore()
    assert all_stages == stages()
    assert present(state) == stages()[3]


def test_a_part_that_two_values_shared_has_moved_in_the_other_one_too() -> None:
    pool = stages()
    shared = {"now": pool[0]}
    state = ObjectState(a=shared, b={"x": shared})
    state.commit()
    state.a, shared["now"] = {"now": pool[1]}, pool[2]
    state.commit()
    state.restore()
    assert pool == stages()
    assert (state.a, state.b) == ({"now": {"stage": 1}}, {"x": {"now": {"stage": 2}}})


def test_ranks_with_other_objects_of_the_same_values_are_equal() -> None:
    states = [ObjectState(value={"betas": (0.9, [1])}, other=[2]) for _ in range(2)]
    for state in states:
        state.commit()
    states[1].other = [*states[1].other]
    for state in states:
        state.commit()
    one, other = (state._committer.snapshot for state in states)
    assert one.summary() != other.summary(), "one commit tells that a value is another object"
    assert divergence._fingerprints(one) == divergence._fingerprints(other)


def test_a_newcomer_has_its_own_objects_at_all_places_of_the_commit() -> None:
    def make() -> ObjectState:
        return ObjectState(value={"betas": (0.9, [1])}, pair=([2], SimpleNamespace(x=[3])))

    state, newcomer = make(), make()
    state.value["betas"][1].append(4)
    state.pair[1].x.append(5)
    state.commit()
    value, pair = newcomer.value, newcomer.pair
    newcomer.apply(read_commit(state._committer.snapshot, state.commits[0]))
    assert newcomer.value is value
    assert newcomer.pair is pair
    assert (value, pair[0], pair[1].x) == ({"betas": (0.9, [1, 4])}, [2], [3, 5])
    assert not [name for name in newcomer.capture() if name.endswith(".moved")]


class Program:
    """A script with objects of its own, some of which are values of its state."""

    def __init__(self) -> None:
        self.pool: list[list[Any]] = [[number] for number in range(6)]
        self.state = ObjectState(a=self.pool[0], b=[self.pool[1], self.pool[2]], c=SimpleNamespace(x=self.pool[3]))
        self.at_first = self.places()

    def places(self) -> dict[str, Any]:
        """Return the objects of the state by their places. Two are in another object of the state."""
        state = self.state
        return {"a": state.a, "b": state.b, "b0": state.b[0], "b1": state.b[1], "c": state.c, "x": state.c.x}

    def put(self, place: str, value: Any) -> None:
        if place in ("b0", "b1"):
            self.state.b[int(place[1])] = value
        elif place == "x":
            self.state.c.x = value
        else:
            self.state.a = value


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(["a", "b0", "b1", "x"]), st.integers(0, 5)),
        st.tuples(st.just("append"), st.integers(0, 5)),
        st.tuples(st.just("commit")),
        st.tuples(st.just("restore")),
    ),
    max_size=14,
)


@given(STEPS)
def test_a_restore_writes_only_into_objects_that_are_at_their_first_places(steps: list[tuple[Any, ...]]) -> None:
    """The oracle: contents as committed; first objects where they were; no other object of the script has changed."""
    program = Program()
    program.state.commit()
    committed = copy.deepcopy(program.places())
    stayed = dict(program.at_first)
    for step in [*steps, ("restore",)]:
        match step:
            case "put", place, number:
                program.put(place, program.pool[number])
            case "append", number:
                program.pool[number].append(len(program.pool[number]))
            case ("commit",):
                program.state.commit()
                now = program.places()
                committed = copy.deepcopy(now)
                stayed = {name: now[name] for name in now if now[name] is program.at_first[name]}
            case ("restore",):
                before = copy.deepcopy(program.pool)
                program.state.restore()
                now = program.places()
                assert now == committed
                seen = [id(each) for each in stayed.values()]
                for name, value in stayed.items():
                    assert now[name] is value, name
                for value, content in zip(program.pool, before, strict=True):
                    assert value == content or id(value) in seen


# ------------------------------------------------------------------------ objects that refer to modules and optimizers


class Noam:
    """Learning rates around an optimizer, as in the Annotated Transformer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / self.steps
        self.optimizer.step()


class Average:
    """A moving average of the parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.parameters = model, list(model.parameters())
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.of = {p: p.detach().clone() for p in self.parameters}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name] = (self.shadow[name] + p.detach()) / 2
            self.of[p] = (self.of[p] + p.detach()) / 2


class Trainer:
    """All that a training has, in one object."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.schedule = Noam(self.optimizer)
        self.average = Average(self.model)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(8.0).reshape(2, 4).add(number).sin()).square().mean().backward()
        self.schedule.step()
        self.average.update()

    def tensors(self) -> list[torch.Tensor]:
        return [*self.model.state_dict().values(), *self.average.shadow.values(), *self.average.of.values()]


@pytest.mark.parametrize(
    "values",
    [
        lambda t: {"model": t.model, "optimizer": t.optimizer, "schedule": t.schedule, "average": t.average},
        lambda t: {"model": t.model, "optimizer": t.schedule, "average": t.average},
        lambda t: {"average": t.average, "schedule": t.schedule, "model": t.model},
        lambda t: {"trainer": t},
        lambda t: {"a_trainer": t, "model": t.model},
        lambda t: {"all": [t.model, t.optimizer, t.schedule, t.average, 0.5]},
    ],
    ids=["each", "wrapped_optimizer", "optimizer_inside", "trainer", "model_apart", "list"],
)
@pytest.mark.parametrize("is_new", [False, True], ids=["survivor", "newcomer"])
def test_objects_keep_the_modules_and_optimizers_of_the_script(
    values: Callable[[Trainer], dict[str, Any]], is_new: bool
) -> None:
    """A newcomer has made no step when it receives the commit."""
    torch.manual_seed(0)
    trainer, expected = Trainer(), Trainer()
    expected.model.load_state_dict(trainer.model.state_dict())
    expected.average = Average(expected.model)
    state = TorchState(**values(trainer))
    for number in range(5):
        expected.step(number)
    for number in range(3):
        trainer.step(number)
    state.commit()
    commit = read_commit(state._committer.snapshot, state.commits[0])
    if is_new:
        trainer = Trainer()
        state = TorchState(**values(trainer))
    else:
        trainer.step(7)
    state.apply(commit)
    for number in (3, 4):
        trainer.step(number)
    assert trainer.schedule.steps == 5
    assert trainer.average.model is trainer.model
    assert trainer.schedule.optimizer is trainer.optimizer
    for found, right in zip(trainer.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_a_module_with_a_buffer_that_cannot_be_written_is_replaced() -> None:
    holder = SimpleNamespace(module=nn.Linear(2, 2))
    holder.module.register_buffer("rows", torch.ones(1, 2).expand(3, 2))
    state = TorchState(holder=holder)
    state.commit()
    module = holder.module
    module.rows = torch.zeros(1, 2).expand(3, 2)
    state.restore()
    assert state.holder is holder
    assert torch.equal(holder.module.rows, torch.ones(3, 2))
    assert holder.module is not module


def test_the_module_that_an_object_has_used_is_used_again() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    turn = SimpleNamespace(present=first)
    state = TorchState(first=first, second=second, turn=turn)
    state.commit()
    turn.present = second
    state.restore()
    assert turn.present is first


def test_a_tensor_in_a_plain_value_is_not_written() -> None:
    """It may be a view of a parameter here, and a copy in the commit."""
    model = nn.Linear(2, 2)
    state = TorchState(best={"weight": torch.zeros(2, 2)}, model=model)
    state.commit()
    state.best = {"weight": model.weight.detach()}
    weight = model.weight.detach().clone()
    state.restore()
    assert torch.equal(model.weight, weight)
    assert torch.equal(state.best["weight"], torch.zeros(2, 2))


class Sealed:
    """An object with a pickling of its own."""

    def __init__(self) -> None:
        self.count, self.unpicklable = 0, lambda: None

    def __getstate__(self) -> dict[str, int]:
        return {"count": self.count}


def test_an_object_with_a_pickling_of_its_own_is_replaced() -> None:
    value = Sealed()
    state = TorchState(value=value)
    state.commit()
    value.count = 1
    state.restore()
    assert state.value is not value
    assert (state.value.count, value.count) == (0, 1)
