"""One flow of a restore: the snapshot verifies and loads, ``apply`` does the rest; and the life of a committer."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from elasticstate.core.types import CommitId
from elasticstate.state import ObjectState, State
from elasticstate.state.base import committer_of


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
