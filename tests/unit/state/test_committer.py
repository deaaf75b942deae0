"""One flow of a restore: the snapshot verifies and loads, ``apply`` does the rest; and the life of a committer."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.errors import CollectiveError, StateError
from elasticstate.state.base import ObjectState, State, committer_of
from elasticstate.state.torch import TorchState


class History(State):
    """A state of a user that captures only a part of its memory, and clears all of it before it applies a commit."""

    def __init__(self) -> None:
        super().__init__(n=0)
        self._table = torch.zeros(4)
        self._seen: list[list[float]] = []

    def capture(self) -> dict[str, Any]:
        return {"n": self.n, "table": self._table[: self.n]}

    def apply(self, values: Any) -> None:
        self._seen.append(self._table.tolist())
        self.n = values["n"]
        self._table.zero_()
        self._table[: self.n] = values["table"]


def test_a_restore_leaves_the_tensors_of_a_users_state_to_its_apply() -> None:
    state = History()
    state.n = 2
    state._table[:2] = torch.tensor([1.0, 2.0])
    state.commit()
    state._table.fill_(9.0)
    state.restore()
    assert state._seen == [[9.0] * 4], "nothing was written before apply"
    assert state._table.tolist() == [1.0, 2.0, 0.0, 0.0]


def test_a_sync_leaves_the_tensors_of_a_users_state_to_its_apply(member: Any, world: Any, together: Any) -> None:
    root, newcomer = History(), History()
    root.n = newcomer.n = 2
    root._table[:2] = torch.tensor([1.0, 2.0])
    newcomer._table.fill_(9.0)
    both = world(2, lacking=(1,))
    for rank, state in enumerate((root, newcomer)):
        committer_of(state).use_session(member(both, rank))
    together(root.sync, newcomer.sync)
    assert newcomer._seen == [[9.0] * 4]
    assert newcomer._table.tolist() == [1.0, 2.0, 0.0, 0.0]


def test_a_restore_loads_a_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that verifies the bytes copies them, so ``apply`` of an ObjectState has no tensor left to copy."""
    state = ObjectState(x=torch.ones(3))
    state.commit()
    state.x.zero_()
    monkeypatch.setattr("elasticstate.state.values.write_into", lambda *_: pytest.fail("copied again"))
    state.restore()
    assert state.x.tolist() == [1.0] * 3


# -------------------------------------------------------------------------------------------- changes since the commit


def a_trained_state() -> TorchState:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    odd = torch.tensor([float("nan"), -0.0])
    return TorchState(model=model, optimizer=optimizer, table=torch.ones(3, 4).t(), odd=odd, array=np.ones(3), note=[1])


CHANGES: dict[str, Any] = {
    "state.model.parameters.0.weight": lambda state: state.model[0].weight.data.add_(1),
    "state.model.buffers.1.running_mean": lambda state: state.model[1].running_mean.add_(1),
    "state.optimizer": lambda state: state.optimizer.param_groups[0].update(lr=0.5),
    "state.optimizer.state.0.exp_avg": lambda state: next(iter(state.optimizer.state.values()))["exp_avg"].data.add_(1),
    "state.table": lambda state: state.table.numpy().__iadd__(1),
    "state.odd": lambda state: state.odd.abs_(),
    "state.array": lambda state: state.array.__iadd__(1),
    "state.note": lambda state: state.note.append(2),
    "the random state": lambda state: torch.rand(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_since_the_commit_is_found_and_undone_by_a_restore(name: str) -> None:
    state = a_trained_state()
    state.commit()
    assert committer_of(state).changed_since_commit() == ""
    CHANGES[name](state)
    assert committer_of(state).changed_since_commit().startswith(name)
    state.restore()
    assert committer_of(state).changed_since_commit() == ""


def test_a_value_of_another_shape_or_type_is_a_change() -> None:
    state = ObjectState(x=torch.zeros(4), y=torch.zeros(2), z=None)
    state.commit()
    for name, value in {"x": torch.zeros(2, 2), "y": np.zeros(2, dtype=np.float32), "z": torch.zeros(1)}.items():
        before = getattr(state, name)
        setattr(state, name, value)
        assert committer_of(state).changed_since_commit() == f"state.{name}"
        setattr(state, name, before)
    assert committer_of(state).changed_since_commit() == ""


# ------------------------------------------------------------------------------------------------- failed collectives


def test_after_a_failed_collective_nothing_is_committed_and_no_tick_ends(member: Any, world: Any) -> None:
    state, session = ObjectState(n=0), member(world(2))
    committer_of(state).use_session(session)
    state.commit()
    session.has_failed_collective = True
    for _ in range(2):
        for end in (state.commit, state.save, state.check_host_updates, lambda: state.commit(every=7)):
            with pytest.raises(CollectiveError, match="has failed"):
                end()
    assert state.commits == (CommitId(1, 1), None)
    assert session.ticks == 1


# ------------------------------------------------------------------------------------ all ranks restore the same commit


def damage(state: State) -> None:
    buffer = committer_of(state).snapshot._newer
    buffer.memory[buffer.length - 1] ^= 1


@pytest.mark.parametrize("commits", [1, 2])
def test_a_rank_whose_newest_commit_is_damaged_restores_no_other_one_alone(
    commits: int, member: Any, world: Any
) -> None:
    state, session = ObjectState(n=0), member(world(2))
    committer_of(state).use_session(session)
    session.has_peers = True
    for _ in range(commits):
        state.n += 1
        state.commit()
    damage(state)
    with pytest.raises(CollectiveError, match="so the other ranks restore another one"):
        state.restore()
    assert state.commits[0] == (CommitId(1, 1) if commits == 2 else None)
    session.has_peers = False  # as after the end of the generation
    if commits == 2:
        state.restore()
        assert state.n == 1
    else:
        with pytest.raises(StateError):
            state.restore()


def test_a_rank_that_has_discarded_a_commit_restores_no_older_one_alone(member: Any, world: Any) -> None:
    state, session = ObjectState(n=0), member(world(2))
    committer_of(state).use_session(session)
    session.has_peers = True
    state.commit()
    state.n = 1
    committer_of(state).snapshot.begin = lambda *_: None  # type: ignore[method-assign]  # a copy that is discarded later
    state.commit()
    with pytest.raises(CollectiveError, match=r"commit \(1, 2\) was discarded on this rank"):
        state.restore()
    assert state.n == 1


def test_a_restore_after_ticks_without_commits_goes_back_to_the_last_commit(member: Any, world: Any) -> None:
    state, session = ObjectState(n=0), member(world(2))
    committer_of(state).use_session(session)
    session.has_peers = True
    state.commit()
    state.n = 1
    state.check_host_updates()
    state.restore()
    assert state.n == 0
    state.commit()
    assert state.commits[0] == CommitId(1, 3)


def test_resume_calls_the_restore_of_a_subclass(file_storage: Any) -> None:
    class Restored(ObjectState):
        def restore(self) -> None:
            super().restore()
            self.n += 100

    for _ in range(2):
        state = Restored(n=1)
        committer_of(state).use_storage(file_storage())
        resumed = committer_of(state).resume()
        if not resumed:
            committer_of(state).seal(CommitId(1, 1))
    assert resumed
    assert state.n == 101


def test_a_state_that_nobody_uses_releases_its_commits_at_once() -> None:
    """Without a garbage collection: a script that makes states in a loop must not accumulate their commits."""
    state = ObjectState(x=torch.ones(3))
    state.commit()
    state.restore()
    snapshot = weakref.ref(committer_of(state).snapshot)
    del state
    assert snapshot() is None
