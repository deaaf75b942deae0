"""States whose values differ by rank are refused before a sync sends or writes anything."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.errors import StateError, StateMisfitError
from elasticstate.state.base import ObjectState, committer_of
from elasticstate.state.torch import TorchState

REMEDY = "Construct the state with the same names and kinds of values on every rank."


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def enter(states: list[Any], world: Any, member: Any) -> list[Any]:
    members = [member(world, rank) for rank in range(len(states))]
    for state, session in zip(states, members, strict=True):
        committer_of(state).use_session(session)
    return members


def errors_of(*functions: Callable[[], object]) -> list[str | None]:
    """Run all functions at once. Return the text of the StateError of each, "failed" for another error, or None.

    A function that fails closes its groups, as a worker does when it ends.
    """
    found: list[str | None] = [None] * len(functions)

    def guarded(index: int) -> None:
        try:
            functions[index]()
        except Exception as error:
            found[index] = str(error) if isinstance(error, StateError) else "failed"

    threads = [threading.Thread(target=guarded, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([{"n": 1}, {"n": 2, "m": 3}], "rank 1 has 'm', which rank 0 lacks"),
        ([{"n": 1, "m": 3}, {"n": 2}], "rank 1 lacks 'm', which rank 0 has"),
        (
            [{"n": 1, "a": 0, "b": 0}, {"n": 2, "c": 0}, {"n": 3, "c": 0}],
            "ranks 1, 2 lack 'a', 'b', which rank 0 has; ranks 1, 2 have 'c', which rank 0 lacks",
        ),
        ([{"n": 1}, {"n": 2}, {"n": 3, "m": 0}], "rank 2 has 'm', which rank 0 lacks"),
    ],
    ids=["more", "fewer", "both", "one of two"],
)
def test_in_the_first_world_all_ranks_raise_the_same_error(
    values: list[dict[str, int]], text: str, world: Any, member: Any
) -> None:
    states = [ObjectState(**one) for one in values]
    ranks = tuple(range(1, len(states)))
    members = enter(states, world(len(states), lacking=ranks), member)
    errors = errors_of(*[state.sync for state in states])
    assert errors == [f"Ranks have states of different values: {text}. {REMEDY}"] * len(states)
    assert [state.n for state in states] == [one["n"] for one in values]
    assert [state.commits for state in states] == [(None, None)] * len(states)
    assert [m.commits + m.sent for m in members] == [[]] * len(states), "nothing was sealed, sent or received"


def test_the_order_of_the_names_does_not_matter(world: Any, member: Any) -> None:
    states = [ObjectState(a=1, b=2), ObjectState(b=3, a=4)]
    enter(states, world(2, lacking=(1,)), member)
    assert errors_of(*[state.sync for state in states]) == [None, None]
    assert (states[1].a, states[1].b) == (1, 2)


@pytest.mark.parametrize("root_has_object", [True, False])
def test_an_object_with_a_state_dict_on_one_rank_and_a_value_on_the_other(
    root_has_object: bool, world: Any, member: Any
) -> None:
    given = [sgd(), None] if root_has_object else [None, sgd()]
    states = [TorchState(optimizer=value) for value in given]
    enter(states, world(2, lacking=(1,)), member)
    kinds = [f"{'an object with' if value else 'a value without'} state_dict()" for value in given]
    text = f"'optimizer' is {kinds[1]} on rank 1, and {kinds[0]} on rank 0"
    errors = errors_of(*[state.sync for state in states])
    assert errors == [f"Ranks have states of different values: {text}. {REMEDY}"] * 2
    assert [state.optimizer for state in states] == given


def test_values_may_be_reassigned_during_the_job(world: Any, member: Any) -> None:
    """The root has trained: a tensor in place of None, and None in place of an optimizer that it needs no more."""
    root, newcomer = TorchState(best=None, optimizer=sgd()), TorchState(best=None, optimizer=sgd())
    committer_of(root).use_session(member(world(1)))
    root.best, root.optimizer = torch.ones(3), None
    root.commit()
    enter([root, newcomer], world(2, generation=2, lacking=(1,)), member)
    assert errors_of(root.sync, newcomer.sync) == [None, None]
    assert newcomer.best.tolist() == [1.0] * 3
    assert newcomer.optimizer is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"n": 5}, "rank 2 lacks 'm', which rank 0 has"),
        ({"n": 5, "m": 6, "x": 7}, "rank 2 has 'x', which rank 0 lacks"),
    ],
    ids=["fewer", "more"],
)
def test_in_a_running_job_only_the_newcomer_raises(values: dict[str, int], text: str, world: Any, member: Any) -> None:
    """Ranks 0 and 1 hold the job's commit. The root fails when the newcomer leaves the generation."""
    holders, newcomer = [ObjectState(n=1, m=2) for _ in range(2)], ObjectState(**values)
    for state in holders:
        committer_of(state).use_session(member(world(2)))
        state.commit()
    states = [*holders, newcomer]
    members = enter(states, world(3, generation=2, lacking=(2,)), member)
    errors = errors_of(*[state.sync for state in states])
    assert errors == ["failed", None, f"Ranks have states of different values: {text}. {REMEDY}"]
    assert [state.commits[0] for state in states] == [CommitId(2, 0), CommitId(2, 0), None]
    assert newcomer.n == 5
    assert members[2].commits + members[2].sent == []
    for state in holders:
        state.restore()
    assert [(state.n, state.m) for state in holders] == [(1, 2)] * 2


def test_of_two_newcomers_only_the_one_that_differs_raises_its_own_error(world: Any, member: Any) -> None:
    """The root cannot complete the sync: it fails when the newcomer leaves the generation."""
    root, good, bad = ObjectState(n=1), ObjectState(n=2), ObjectState(n=3, x=4)
    committer_of(root).use_session(member(world(1)))
    root.commit()
    states = [root, good, bad]
    members = enter(states, world(3, generation=2, lacking=(1, 2)), member)
    errors = errors_of(*[state.sync for state in states])
    assert errors[2] == f"Ranks have states of different values: rank 2 has 'x', which rank 0 lacks. {REMEDY}"
    assert errors[0] == "failed"
    assert errors[1] in (None, "failed"), "the order in which Gloo sends decides"
    assert root.commits[0] == CommitId(2, 0)
    assert (bad.n, members[2].commits) == (3, [])


def test_equal_names_cost_no_collective_more(world: Any, member: Any) -> None:
    states = [TorchState(model=torch.nn.Linear(4, 4), optimizer=sgd(), step=0) for _ in range(2)]
    members = enter(states, world(2, lacking=(1,)), member)
    assert errors_of(*[state.sync for state in states]) == [None, None]
    assert [len(m.collectives) for m in members] == [3, 3]


@pytest.mark.parametrize("kind", [ObjectState, TorchState])
def test_a_commit_with_a_name_that_the_state_lacks_is_not_restored(
    kind: Any, file_storage: Any, member: Any, world: Any
) -> None:
    """A worker starts again in its slot, and constructs its state with fewer names than before."""
    before = kind(n=1, scheduler=torch.ones(2), m=3)
    committer_of(before).use_storage(file_storage())
    committer_of(before).use_session(member(world(1)))
    before.commit()
    again = kind(n=9)
    committer_of(again).use_storage(file_storage())
    text = rf"The commit also has m, scheduler, which this {kind.__name__} lacks\. "
    for load in (again.restore, committer_of(again).resume):
        with pytest.raises(StateMisfitError, match=text):
            load()
    assert again.n == 9


def test_a_subclass_may_capture_more_than_its_names() -> None:
    class Own(ObjectState):
        def capture(self) -> dict[str, Any]:
            return {**super().capture(), "more": 5}

    state = Own(n=1)
    state.commit()
    state.n = 2
    state.restore()
    assert state.n == 1
