"""Followers (--one-copy-per-host): they keep no commits, read those of their keeper, and their values are compared."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.errors import CollectiveError, StateDivergedError, StateLostError, UsageError
from elasticstate.state.base import ObjectState, State, committer_of
from elasticstate.state.peer import PeerStorage
from elasticstate.state.torch import TorchState

KEEPER, FOLLOWER = 0, 1


class Host:
    """The agent of a host whose keeper is in slot 5."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def peer(self, slot: int) -> PeerStorage:
        assert slot == 5
        fds = [os.open(path, os.O_RDWR) for path in (self.storage.control, *self.storage.files)]
        return PeerStorage(5, self.storage.owner, self.storage.key, fds[0], fds[1:])


class Values(State):
    """A state of a user's own class, whose values no restore can load before ``apply``."""

    def __init__(self, weights: torch.Tensor, keeps_view: bool = False) -> None:
        super().__init__()
        self._weights, self._keeps_view = weights, keeps_view

    def capture(self) -> dict[str, Any]:
        return {"weights": self._weights, "epoch": 3}

    def apply(self, values: Any) -> None:
        if self._keeps_view:
            self._weights = values["weights"]
        else:
            self._weights.copy_(values["weights"])


@pytest.fixture
def pair(file_storage: Callable[..., Any], world: Any, member: Any) -> Callable[[Any, Any], list[Any]]:
    """Return a function that puts the states of a keeper and of its follower into one world."""

    def pair(keeper: Any, follower: Any) -> list[Any]:
        storage = file_storage()
        shared = world(2, lacking=(1,), near=(1,), one_copy=True)
        sessions = [member(shared, KEEPER), member(shared, FOLLOWER, follows=5)]
        for state, session in zip((keeper, follower), sessions, strict=True):
            committer_of(state).use_session(session)
        committer_of(keeper).use_storage(storage)
        committer_of(follower).use_peers(Host(storage).peer)
        return sessions

    return pair


def model_state(seed: int) -> TorchState:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    return TorchState(model=model, table=np.arange(3.0) * seed, scale=torch.tensor(1.0 * seed), epoch=seed)


def test_a_follower_loads_the_commit_of_its_keeper_and_holds_none(pair: Any, together: Any) -> None:
    keeper, follower = model_state(1), model_state(2)
    sessions = pair(keeper, follower)
    together(follower.sync, keeper.sync)
    assert torch.equal(follower.model.weight, keeper.model.weight)
    assert (follower.epoch, follower.scale.item(), follower.table.tolist()) == (1, 1.0, [0.0, 1.0, 2.0])
    assert keeper.commits == (CommitId(1, 0), None)
    assert follower.commits == (None, None)
    together(keeper.commit, follower.commit)
    assert keeper.commits == (CommitId(1, 1), CommitId(1, 0))
    assert follower.commits == (None, None)
    assert not sessions[FOLLOWER].commits or set(sessions[FOLLOWER].commits) == {(None, None)}
    assert sessions[FOLLOWER].groups == [(0, 1)], "the values were compared, and nothing was sent"


def test_only_the_first_commit_of_a_world_compares(pair: Any, together: Any) -> None:
    states = ObjectState(step=0), ObjectState(step=0)
    sessions = pair(*states)
    together(*[state.sync for state in states])
    for _ in range(3):
        together(*[state.commit for state in states])
    assert [session.groups for session in sessions] == [[(0, 1)], [(0, 1)]]


@pytest.mark.parametrize(
    ("mine", "theirs", "name"),
    [
        ({"a": torch.ones(3), "b": 1}, {"a": torch.ones(3), "b": 2}, "b"),
        ({"a": torch.ones(3), "b": 1}, {"a": torch.zeros(3), "b": 1}, "a"),
        ({"a": np.ones(3)}, {"a": np.zeros(3)}, "a"),
        ({"a": torch.ones(3)}, {"a": torch.ones(3, dtype=torch.int32)}, "a"),
    ],
    ids=["object", "tensor", "array", "dtype"],
)
def test_values_that_differ_are_an_error_at_the_first_commit(
    mine: dict[str, Any], theirs: dict[str, Any], name: str, pair: Any, together: Any
) -> None:
    keeper, follower = ObjectState(**mine), ObjectState(**mine)
    pair(keeper, follower)
    together(keeper.sync, follower.sync)
    for key, value in theirs.items():
        setattr(follower, key, value)
    raised: list[Exception] = []

    def commit(state: ObjectState) -> None:
        with pytest.raises(StateDivergedError) as error:
            state.commit()
        raised.append(error.value)

    together(lambda: commit(keeper), lambda: commit(follower))
    assert len({str(error) for error in raised}) == 1
    assert f"{name}: rank 0 | rank 1." in str(raised[0])
    assert "--one-copy-per-host" in str(raised[0])


def test_values_that_are_excluded_may_differ(pair: Any, together: Any) -> None:
    states = ObjectState(mine=0), ObjectState(mine=0)
    pair(*states)
    together(*[state.sync for state in states])
    for rank, state in enumerate(states):
        state.mine = rank
        state.exclude_from_check("mine")
    together(*[state.commit for state in states])


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3),
        torch.zeros(0),
        torch.ones(2, 3).t(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.bool),
        np.array(2.0),
        np.zeros(0),
        np.ones((2, 3)).T,
        np.array(["a", "bc"]),
    ],
    ids=str,
)
def test_values_of_each_kind_can_be_compared(value: Any, pair: Any, together: Any) -> None:
    states = ObjectState(value=value), ObjectState(value=value)
    pair(*states)
    together(*[state.sync for state in states])
    together(*[state.commit for state in states])
    together(*[state.check for state in states])


def test_a_users_own_class_is_loaded_by_its_apply(pair: Any, together: Any) -> None:
    weights = torch.zeros(100)
    keeper, follower = Values(torch.ones(100)), Values(weights)
    pair(keeper, follower)
    together(keeper.sync, follower.sync)
    assert weights.sum() == 100


def test_an_apply_that_keeps_memory_of_the_keeper_is_an_error(pair: Any, together: Any) -> None:
    keeper, follower = Values(torch.ones(100)), Values(torch.zeros(100), keeps_view=True)
    pair(keeper, follower)
    with pytest.raises(Exception, match=r"Values.apply\(\) kept 'weights', which is memory of the commit"):
        together(keeper.sync, follower.sync)


def test_a_damaged_commit_is_not_loaded(pair: Any, together: Any, tmp_path: Any) -> None:
    keeper, follower = model_state(1), model_state(2)
    pair(keeper, follower)
    keeper.sync()
    buffer = committer_of(keeper).snapshot._newer
    buffer.memory[buffer.frame.tensors] ^= 1
    with pytest.raises(CollectiveError, match=r"commit \(1, 0\) of the worker in slot 5 cannot be read"):
        follower.sync()


def test_a_follower_is_no_root_when_all_commits_are_lost(pair: Any, together: Any, world: Any, member: Any) -> None:
    keeper, follower = ObjectState(step=0), ObjectState(step=0)
    pair(keeper, follower)
    together(keeper.sync, follower.sync)
    committer_of(follower).use_session(member(world(1, generation=2, one_copy=True)))
    with pytest.raises(StateLostError, match="no worker holds a commit any more"):
        follower.sync()


def test_what_cannot_work_is_refused(pair: Any) -> None:
    keeper, follower = ObjectState(step=0), ObjectState(step=0)
    pair(keeper, follower)
    with pytest.raises(UsageError, match="the worker in slot 5 keeps the commits of this host"):
        follower.restore()
    with pytest.raises(UsageError, match="A state cannot be in a Join with --one-copy-per-host"):
        keeper.join_hook()
    torch_state = model_state(1)
    pair(torch_state, model_state(1))
    with pytest.raises(UsageError, match=r"attach\(\) was called in a job with --one-copy-per-host"):
        torch_state.attach(other=torch.nn.Linear(2, 2), init=lambda: None)
