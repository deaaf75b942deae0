"""check() compares the commits of all ranks, and names the values that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.errors import StateDivergedError, StateError
from elasticstate.state.base import ObjectState, committer_of
from elasticstate.state.divergence import MAX_NAMES
from elasticstate.state.torch import TorchState

Check = Callable[[list[Any]], list[BaseException | None]]


@pytest.fixture
def check_all(together: Any) -> Check:
    """Call check() on all ranks at once. Return the exception of each rank, or None."""

    def check_all(states: list[Any]) -> list[BaseException | None]:
        raised: list[BaseException | None] = [None] * len(states)

        def guarded(rank: int) -> None:
            try:
                states[rank].check()
            except Exception as error:
                raised[rank] = error

        together(*[lambda rank=rank: guarded(rank) for rank in range(len(states))])
        return raised

    return check_all


def model_states(n: int) -> list[TorchState]:
    states = []
    for _ in range(n):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        states.append(TorchState(model=model, optimizer=optimizer, epoch=1, tags={"b", "a"}))
    return states


def bound(states: list[Any], world: Any, member: Any, **changes: Any) -> list[Any]:
    members = [member(world(len(states), **changes), rank) for rank in range(len(states))]
    for one in members[1:]:
        one.world = members[0].world
    for state, session in zip(states, members, strict=True):
        committer_of(state).use_session(session)
    return members


def test_equal_states_pass_with_one_small_collective(world: Any, member: Any, check_all: Check) -> None:
    states = model_states(3)
    members = bound(states, world, member)
    for state in states:
        state.commit()
    assert check_all(states) == [None] * 3
    assert [m.collectives for m in members] == [[5 * 8]] * 3
    assert [m.groups for m in members] == [[(0, 1, 2)]] * 3


def test_a_tensor_that_differs_is_named_with_the_ranks_on_every_rank(world: Any, member: Any, check_all: Check) -> None:
    states = model_states(4)
    bound(states, world, member)
    with torch.no_grad():
        states[2].model[1].bias[0] += 1e-6
        states[3].model[1].bias[0] += 1e-6
        states[1].optimizer.state[states[1].model[0].weight]["momentum_buffer"].neg_()
    for state in states:
        state.commit()
    raised = check_all(states)
    assert all(type(error) is StateDivergedError for error in raised)
    assert {str(error) for error in raised} == {
        "Ranks committed different values as (1, 1). "
        "model.parameters.1.bias: ranks 0, 1 | ranks 2, 3; optimizer.state.0.momentum_buffer: ranks 0, 2, 3 | rank 1. "
        "Make them equal on all ranks, or exclude values that differ by design: state.exclude_from_check(name)."
    }


def test_objects_that_differ_are_named(world: Any, member: Any, check_all: Check) -> None:
    states = model_states(2)
    bound(states, world, member)
    states[1].epoch = 2
    states[1].optimizer.param_groups[0]["lr"] = 0.2
    states[1].tags.add("c")
    for state in states:
        state.commit()
    (message,) = {str(error) for error in check_all(states)}
    names = message.partition(". ")[2].partition(". ")[0].split("; ")
    assert names == [f"{name}: rank 0 | rank 1" for name in ("epoch", "optimizer.param_groups.0.lr", "tags")]


def test_tensors_that_are_only_on_some_ranks_are_named(world: Any, member: Any, check_all: Check) -> None:
    states = model_states(2)
    bound(states, world, member)
    states[1].model.register_buffer("extra", torch.ones(2))
    states[0].optimizer.state.clear()
    for state in states:
        state.commit()
    (message,) = {str(error) for error in check_all(states)}
    for name in ("model.buffers.extra", *(f"optimizer.state.{i}.momentum_buffer" for i in range(4))):
        assert f"{name}: rank 0 | rank 1" in message


def test_of_many_names_some_are_told(world: Any, member: Any, check_all: Check) -> None:
    states = [TorchState(**{f"t{i:03}": torch.full((3,), rank) for i in range(MAX_NAMES + 7)}) for rank in range(2)]
    bound(states, world, member)
    for state in states:
        state.commit()
    (message,) = {str(error) for error in check_all(states)}
    assert "t000: " in message
    assert "; 7 more. " in message
    assert message.count(": rank 0 | rank 1") == MAX_NAMES


def test_equal_objects_that_are_pickled_otherwise_are_equal(world: Any, member: Any, check_all: Check) -> None:
    """Pickles differ if equal strings are different objects, and by the order of sets. The states are equal."""
    shared = "".join(["a", "b"])
    states = [
        ObjectState(names=[shared, shared], some={"x", "y", "z", "w"}, f=lambda: 1, buffer=torch.ones(3)),
        ObjectState(
            names=["".join(["a", "b"]), "".join(["a", "b"])],
            some={"w", "z", "y", "x"},
            f=lambda: 1,
            buffer=torch.ones(3),
        ),
    ]
    members = bound(states, world, member)
    for state in states:
        state.commit()
    one, other = (committer_of(state).snapshot.summary() for state in states)
    assert (one[1], one[2] != other[2]) == (other[1], True), "the pickles differ"
    assert check_all(states) == [None, None]
    assert len(members[0].collectives) > 1


def test_the_random_state_is_each_ranks_own(world: Any, member: Any, check_all: Check) -> None:
    states = model_states(2)
    bound(states, world, member)
    for state in states:
        torch.rand(1)
        state.commit()
    assert check_all(states) == [None, None]


def test_buffers_of_other_sizes_hold_the_same(world: Any, member: Any, check_all: Check) -> None:
    states = model_states(2)
    bound(states, world, member)
    committer_of(states[1]).snapshot.reserve(1 << 20)
    for state in states:
        state.commit()
    assert check_all(states) == [None, None]


def test_the_committed_state_is_checked_not_the_live_one(world: Any, member: Any, check_all: Check) -> None:
    states = model_states(2)
    bound(states, world, member)
    for state in states:
        state.commit()
    states[1].epoch = 7
    assert check_all(states) == [None, None]
    assert [state.commits[0] for state in states] == [CommitId(1, 1)] * 2


def test_other_commits_and_none_are_told(world: Any, member: Any, check_all: Check) -> None:
    states = model_states(3)
    bound(states, world, member)
    (message,) = {str(error) for error in check_all(states)}
    assert message == "No rank holds a commit to check. Call commit() before check()."
    states[0].commit()
    states[2].commit()
    states[2].commit()
    raised = check_all(states)
    assert {str(error) for error in raised} == {
        "Ranks hold different commits: (1, 1) on rank 0, none on rank 1, (1, 2) on rank 2. "
        "Call check() after the same tick on each."
    }


def test_outside_a_world_the_own_commit_is_verified(world: Any, member: Any) -> None:
    for in_a_world in (False, True):
        state = ObjectState(n=1, x=torch.ones(10))
        if in_a_world:
            committer_of(state).use_session(member(world(1)))
        with pytest.raises(StateError, match="no commit to check"):
            state.check()
        for _ in range(2):
            state.commit()
            state.check()
        committer_of(state).snapshot._newer.memory[committer_of(state).snapshot._newer.frame.tensors] ^= 1
        with pytest.raises(StateError, match=r"Commit \(\d, 2\) is damaged: .* Restore commit \(\d, 1\)"):
            state.check()
        state.check()


@pytest.mark.parametrize("verify_sync", [False, True])
def test_with_verify_sync_a_sync_ends_with_a_check(
    verify_sync: bool, world: Any, member: Any, check_all: Check, together: Any
) -> None:
    states = model_states(3)
    for state in states[:2]:
        committer_of(state).use_session(member(world(1)))
        state.commit()
    members = bound(states, world, member, generation=2, lacking=(2,))
    for session in members:
        session.verify_sync = verify_sync
    together(*[state.sync for state in states])
    assert [m.groups for m in members] == [
        [(0, 2), (0, 1, 2)] if verify_sync else [(0, 2)],
        [(0, 1, 2)] if verify_sync else [],
        [(0, 2), (0, 1, 2)] if verify_sync else [(0, 2)],
    ]


@pytest.mark.parametrize("value", ["model", "epoch"])
def test_verify_sync_finds_a_survivor_whose_live_values_are_not_those_of_its_commit(
    value: str, world: Any, member: Any, together: Any
) -> None:
    states = model_states(3)
    for state in states[:2]:
        committer_of(state).use_session(member(world(1)))
        state.commit()
    if value == "model":
        states[1].model[0].weight.data[0, 0] += 1
    else:
        states[1].epoch += 1
    for session in bound(states, world, member, generation=2, lacking=(2,)):
        session.verify_sync = True
    with pytest.raises(StateDivergedError, match=rf"after 0 ticks of this world. {value}.*: ranks 0, 2 \| rank 1"):
        together(*[state.sync for state in states])


def test_a_check_in_the_training_compares_commits(world: Any, member: Any, check_all: Check) -> None:
    states = model_states(2)
    bound(states, world, member)
    for state in states:
        state.commit()
    states[1].epoch += 1
    assert check_all(states) == [None] * 2


def test_a_diverged_survivor_is_found_by_verify_sync(world: Any, member: Any, together: Any) -> None:
    states = model_states(3)
    states[1].epoch = 9
    for state in states[:2]:
        committer_of(state).use_session(member(world(1)))
        state.commit()
    for session in bound(states, world, member, generation=2, lacking=(2,)):
        session.verify_sync = True
    with pytest.raises(StateDivergedError, match=r"epoch: ranks 0, 2 \| rank 1"):
        together(*[state.sync for state in states])


class Normed(torch.nn.Module):
    """Buffers that may differ by rank in training, and buffers that must be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = torch.nn.BatchNorm1d(3)
        self.instance = torch.nn.InstanceNorm1d(3, track_running_stats=True)
        self.sync = torch.nn.SyncBatchNorm(3)
        self.register_buffer("average", torch.zeros(3))


def committed_norms(n: int, world: Any, member: Any, *differ: str) -> tuple[list[TorchState], list[Any]]:
    """Return committed states whose named buffers differ by rank."""
    states = [TorchState(model=Normed(), epoch=0) for _ in range(n)]
    members = bound(states, world, member)
    for rank, state in enumerate(states):
        for name in differ:
            state.model.get_buffer(name).fill_(rank)
        state.commit()
    return states, members


RUNNING = [
    f"{layer}.{buffer}"
    for layer in ("batch", "instance")
    for buffer in ("num_batches_tracked", "running_mean", "running_var")
]


def test_running_statistics_are_each_ranks_own_and_named_once(
    world: Any, member: Any, check_all: Check, caplog: pytest.LogCaptureFixture
) -> None:
    states, members = committed_norms(3, world, member, *RUNNING)
    for _ in range(2):
        assert check_all(states) == [None] * 3
    assert [m.collectives for m in members] == [[5 * 8] * 2] * 3
    names = ", ".join(f"model.buffers.{name}" for name in sorted(RUNNING))
    assert [record.getMessage() for record in caplog.records] == [
        f"check() skips values that differ by rank by design: {names}"
    ]


@pytest.mark.parametrize("name", ["average", "sync.running_mean", "sync.num_batches_tracked"])
def test_other_buffers_that_differ_are_named(name: str, world: Any, member: Any, check_all: Check) -> None:
    states, _ = committed_norms(2, world, member, *RUNNING, name)
    (message,) = {str(error) for error in check_all(states)}
    assert f"as (1, 1). model.buffers.{name}: rank 0 | rank 1. " in message


def test_what_the_user_excludes_is_not_compared(world: Any, member: Any, check_all: Check) -> None:
    states = model_states(2)
    bound(states, world, member)
    states[1].tags.add("c")
    states[1].epoch = 2
    states[1].optimizer.param_groups[0]["lr"] = 0.2
    with torch.no_grad():
        states[1].model[1].bias.add_(1)
        states[1].model[1].weight.add_(1)
    for state in states:
        state.commit()
        state.exclude_from_check("model.parameters.1", "tags", "optimizer.param_groups", "epo")
    (message,) = {str(error) for error in check_all(states)}
    assert message.startswith("Ranks committed different values as (1, 1). epoch: rank 0 | rank 1. ")
    for state in states:
        state.exclude_from_check("epoch")
    assert check_all(states) == [None, None]


def test_progress_is_passed_on(world: Any, member: Any) -> None:
    state = ObjectState(n=1)
    state.progress()
    session = member(world(1))
    committer_of(state).use_session(session)
    state.progress()
    assert session.signs == 1
