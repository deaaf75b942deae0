"""A plan is reused only if nothing has changed. A restore writes in place only where all is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.values import load_value
from tests.kit.state import read_commit


class Live:
    """Values that are committed twice."""

    def __init__(self) -> None:
        storage = torch.arange(24.0)
        self.values: dict[str, Any] = {
            "x": torch.arange(6.0).reshape(2, 3),
            "part": storage[:12],
            "tied": storage[:12],
            "z": torch.tensor([1 + 2j, 3 - 4j]),
            "a": np.arange(6.0).reshape(2, 3),
            "square": torch.arange(9.0).reshape(3, 3),
            "n": 1,
        }
        self.storage = storage


def as_bytes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().resolve_conj().resolve_neg().numpy()
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def assign(name: str, make: Callable[[Any], Any]) -> Callable[[Live], None]:
    return lambda live: live.values.update({name: make(live.values[name])})


def into_data(name: str, make: Callable[[Any], Any]) -> Callable[[Live], None]:
    return lambda live: setattr(live.values[name], "data", make(live.values[name].data))


CHANGES: dict[str, Callable[[Live], Any]] = {
    "content": lambda live: live.values["x"].add_(1),
    "another tensor": assign("x", lambda x: x + 1),
    "another shape": assign("x", lambda x: x.reshape(3, 2)),
    "another shape in place": into_data("x", lambda x: x.view(3, 2)),
    "another dtype of the same size in place": into_data("x", lambda x: x.view(torch.int32)),
    "another dtype in place": into_data("x", lambda x: x.double()),
    "transposed in place": lambda live: live.values["square"].t_(),
    "set to other memory": lambda live: live.values["x"].set_(torch.ones(2, 3)),
    "resized": lambda live: live.values["x"].resize_(1, 3),
    "tied no more": assign("tied", lambda x: x + 1),
    "tied now": lambda live: live.values.update(x=live.values["part"]),
    "another part of the same memory": lambda live: live.values.update(part=live.storage[12:]),
    "conjugated": assign("z", torch.conj),
    "conjugated in place": into_data("z", torch.conj),
    "negated": assign("x", torch._neg_view),
    "negated in place": into_data("x", torch._neg_view),
    "a name less": lambda live: live.values.pop("x"),
    "a name more": lambda live: live.values.update(y=torch.ones(3)),
    "another name": lambda live: live.values.update(y=live.values.pop("x")),
    "names exchanged": lambda live: live.values.update(x=live.values["square"], square=live.values["x"]),
    "a tensor becomes an object": lambda live: live.values.update(x=5),
    "an object becomes a tensor": lambda live: live.values.update(n=torch.ones(2)),
    "an array of another dtype": assign("a", lambda a: a.view(np.int64)),
    "an array of another shape in place": lambda live: live.values["a"].resize((3, 2)),
    "an array turned round": assign("a", lambda a: a[::-1]),
    "an array of objects": assign("a", lambda a: a.astype(object).tolist()),
    "emptied": assign("x", lambda x: x[:0]),
}


@pytest.mark.filterwarnings("ignore:.*ndarray:DeprecationWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_between_commits_the_next_one_is_right(name: str) -> None:
    live = Live()
    snapshot = Snapshot()
    for tick in (1, 2):
        snapshot.write(live.values, b"", CommitId(1, tick))
    before = {key: as_bytes(value) for key, value in live.values.items()}
    CHANGES[name](live)
    expected = {key: as_bytes(value) for key, value in live.values.items()}
    assert before != expected, "something has changed"
    for tick in (3, 4):
        snapshot.write(live.values, b"", CommitId(1, tick))
        assert {key: as_bytes(value) for key, value in read_commit(snapshot, CommitId(1, tick)).items()} == expected


def test_a_plan_is_used_again_where_nothing_has_changed_and_its_header_where_the_layout_is_the_same() -> None:
    live = Live()
    snapshot = Snapshot()
    snapshot.write(live.values, b"", CommitId(1, 1))
    plan = snapshot._plan
    live.values["x"].add_(1)
    live.values["n"] = 2
    snapshot.write(live.values, b"", CommitId(1, 2))
    assert snapshot._plan is plan
    live.values["x"] = live.values["x"].clone()
    snapshot.write(live.values, b"", CommitId(1, 3))
    assert snapshot._plan is not plan
    assert snapshot._plan is not None
    assert plan is not None
    assert snapshot._plan.header is plan.header


def test_random_state_that_has_grown_gets_more_room() -> None:
    snapshot = Snapshot()
    for tick, size in enumerate((10, 10_000, 10), start=1):
        snapshot.write({"x": torch.ones(3)}, b"r" * size, CommitId(1, tick))
        assert snapshot.read_private(CommitId(1, tick)) == b"r" * size
        assert read_commit(snapshot, CommitId(1, tick))["x"].tolist() == [1.0] * 3


def commit_of(**values: Any) -> Snapshot:
    snapshot = Snapshot()
    snapshot.write(values, b"", CommitId(1, 1))
    return snapshot


def test_a_restore_writes_straight_into_what_is_like_it_and_not_twice() -> None:
    snapshot = commit_of(x=torch.ones(3), a=np.ones(2), t=torch.ones(2, 2), n=1)
    live: dict[str, Any] = {"x": torch.zeros(3), "a": np.zeros(2), "t": torch.zeros(2, 2).t(), "n": 5}
    live["t"] = torch.zeros(4, 2)[::2]  # has gaps
    values = snapshot.load_into(live)
    assert live["x"].tolist() == [1.0] * 3
    assert live["a"].tolist() == [1.0] * 2
    assert live["t"].tolist() == [[0.0] * 2] * 2, "left to apply"
    live["x"].fill_(7)
    assert load_value(live["x"], values, "x") is live["x"]
    assert load_value(live["x"].view(3), values, "x").tolist() == [7.0] * 3, "the same memory"
    assert load_value(live["t"], values, "t") is live["t"]
    assert live["t"].tolist() == [[1.0] * 2] * 2
    other = torch.zeros(3)
    assert load_value(other, values, "x") is other
    assert other.tolist() == [1.0] * 3
    assert load_value(None, values, "x").tolist() == [1.0] * 3


def test_where_one_does_not_fit_nothing_is_written_before_apply_has_looked() -> None:
    snapshot = commit_of(x=torch.ones(3), y=torch.ones(3))
    for bad in (torch.zeros(4), torch.zeros(3, dtype=torch.int32), np.zeros(4, dtype=np.float32)):
        live = {"x": torch.zeros(3), "y": bad}
        assert snapshot.load_into(live)["y"].tolist() == [1.0] * 3
        assert live["x"].tolist() == [0.0] * 3


def test_live_tensors_that_share_memory_now_are_left_to_apply() -> None:
    snapshot = commit_of(x=torch.ones(3), y=torch.full((3,), 2.0))
    storage = torch.zeros(4)
    for live in ({"x": storage[:3], "y": storage[:3]}, {"x": storage[:3], "y": storage[1:]}):
        snapshot.load_into(live)
        assert storage.tolist() == [0.0] * 4


def test_tied_in_the_commit_and_not_now_both_are_written() -> None:
    weight = torch.ones(3)
    snapshot = commit_of(x=weight, y=weight)
    live = {"x": torch.zeros(3), "y": torch.zeros(3)}
    values = snapshot.load_into(live)
    for name, tensor in live.items():
        load_value(tensor, values, name)
        assert tensor.tolist() == [1.0] * 3


def test_an_array_that_must_not_be_written_is_not() -> None:
    snapshot = commit_of(a=np.ones(2))
    array = np.zeros(2)
    array.setflags(write=False)
    values = snapshot.load_into({"a": array})
    assert array.tolist() == [0.0] * 2
    assert load_value(array, values, "a") is not array


def test_tensors_of_the_buffers_themselves_are_left_alone() -> None:
    snapshot = commit_of(x=torch.ones(3))
    kept = read_commit(snapshot, CommitId(1, 1))["x"]
    snapshot.load_into({"x": kept})
    assert kept.tolist() == [1.0] * 3
