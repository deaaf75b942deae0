from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.errors import StateError
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.values import write_into
from tests.kit.state import read_commit

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.uint16,
    torch.complex64,
    torch.complex128,
]


class Wrapper(torch.Tensor):
    """Tensor subclass like DTensor: torch asks it for its inner tensors."""

    def __tensor_flatten__(self) -> None: ...


def some_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor with random bit patterns (0 and 1 for bool)."""
    n = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (n,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 5)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(dtype, *shape)
    snapshot = Snapshot()
    snapshot.write({"pad": torch.ones(3), "x": tensor}, b"", CommitId(1, 1))
    back = read_commit(snapshot, CommitId(1, 1))["x"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert some_bytes(back) == some_bytes(tensor)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.arange(24.0).reshape(4, 6)[::2, ::3],
        np.array(2.5),
        np.zeros((0, 3)),
        np.arange(3, dtype=">i4"),
        np.array([True, False]),
        np.array(["ab", "cde"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.arange(3).astype(np.complex64),
    ],
    ids=lambda a: f"{a.dtype.str}{a.shape}",
)
def test_numpy_arrays_come_back(array: np.ndarray) -> None:
    array.setflags(write=False)
    snapshot = Snapshot()
    snapshot.write({"a": array}, b"", CommitId(1, 1))
    back = read_commit(snapshot, CommitId(1, 1))["a"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    assert len(snapshot._newer.frame.layout.entries) == 1, "it went as bytes, not as a pickle"


def test_object_and_structured_arrays_are_pickled() -> None:
    objects = np.array([{"a": 1}, None], dtype=object)
    records = np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])
    snapshot = Snapshot()
    snapshot.write({"o": objects, "r": records}, b"", CommitId(1, 1))
    back = read_commit(snapshot, CommitId(1, 1))
    assert back["o"].tolist() == [{"a": 1}, None]
    assert back["r"].dtype == records.dtype


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([1.0, 2.0]).expand(3, 2),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.tensor([1 + 2j]).conj().imag,
        torch.nn.Parameter(torch.randn(4)),
    ],
    ids=[
        "transposed",
        "strided",
        "channels_last",
        "expanded",
        "conjugated",
        "negated",
        "negated_contiguous",
        "parameter",
    ],
)
def test_tensors_that_are_not_plain_memory_come_back_by_value(tensor: torch.Tensor) -> None:
    snapshot = Snapshot()
    snapshot.write({"x": tensor}, b"", CommitId(1, 1))
    assert torch.equal(read_commit(snapshot, CommitId(1, 1))["x"], tensor.detach().resolve_conj().resolve_neg())


def test_tied_tensors_are_stored_once_and_look_alikes_are_not() -> None:
    weight = torch.randn(100, 10)
    snapshot = Snapshot()
    snapshot.write(
        {"a": weight, "b": weight.view(100, 10), "t": weight.t(), "i": weight.view(torch.int32)}, b"", CommitId(1, 1)
    )
    a, b, t, i = snapshot._newer.frame.layout.entries
    assert a.offset == b.offset
    assert len({a.offset, t.offset, i.offset}) == 3
    back = read_commit(snapshot, CommitId(1, 1))
    for name, tensor in {"a": weight, "b": weight, "t": weight.t(), "i": weight.view(torch.int32)}.items():
        assert torch.equal(back[name], tensor)


def test_tensors_are_aligned_to_their_items() -> None:
    snapshot = Snapshot()
    dtypes = [torch.uint8, torch.float64, torch.float16, torch.complex128, torch.float32]
    captured = {f"{n}.{dtype}": torch.ones(n, dtype=dtype) for n in range(1, 9) for dtype in dtypes}
    snapshot.write(captured, b"", CommitId(1, 1))
    back = read_commit(snapshot, CommitId(1, 1))
    assert all(back[name].data_ptr() % tensor.element_size() == 0 for name, tensor in captured.items())
    assert all(torch.equal(back[name], tensor) for name, tensor in captured.items())


def test_two_commits_are_kept_in_turn_in_the_same_memory() -> None:
    snapshot = Snapshot()
    x = torch.zeros(1000)
    addresses = []
    for tick in range(1, 6):
        x.fill_(tick)
        snapshot.write({"x": x, "tick": "." * tick}, b"own %d" % tick, CommitId(1, tick))
        addresses.append(snapshot._newer.memory.data_ptr())
        assert snapshot.newest == CommitId(1, tick)
        for commit in filter(None, (snapshot.newest, snapshot.previous)):
            back = read_commit(snapshot, commit)
            assert back["x"].unique().tolist() == [commit.tick]
            assert back["tick"] == "." * commit.tick
            assert snapshot.read_private(commit) == b"own %d" % commit.tick
    assert snapshot.previous == CommitId(1, 4)
    assert addresses == [addresses[0], addresses[1]] * 2 + [addresses[0]]
    assert addresses[0] != addresses[1]


def test_a_buffer_grows_and_is_kept_when_less_is_needed() -> None:
    snapshot = Snapshot()
    for tick, n in enumerate([10, 10, 100_000, 100_000], start=1):
        snapshot.write({"x": torch.full((n,), float(tick))}, b"", CommitId(1, tick))
    big = snapshot._older.memory.data_ptr()
    snapshot.write({"x": torch.ones(10)}, b"", CommitId(1, 5))
    assert snapshot._newer.memory.data_ptr() == big
    assert read_commit(snapshot, CommitId(1, 5))["x"].shape == (10,)
    assert read_commit(snapshot, CommitId(1, 4))["x"].shape == (100_000,)


def test_what_cannot_be_pickled_is_named_and_costs_no_commit() -> None:
    snapshot = Snapshot()
    for tick in (1, 2):
        snapshot.write({"x": torch.full((5,), float(tick))}, b"", CommitId(1, tick))
    with pytest.raises(StateError, match=r"state\.lock cannot be committed, .* cannot be pickled \(lock:"):
        snapshot.write({"x": torch.zeros(5), "fine": 1, "lock": threading.Lock()}, b"", CommitId(1, 3))
    assert (snapshot.newest, snapshot.previous) == (CommitId(1, 2), CommitId(1, 1))
    assert read_commit(snapshot, CommitId(1, 1))["x"].tolist() == [1.0] * 5
    assert read_commit(snapshot, CommitId(1, 2))["x"].tolist() == [2.0] * 5


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (torch.empty(3, device="meta"), "meta device"),
        (torch.nn.LazyLinear(2).weight, "lazy parameter"),
        (torch.ones(2).as_subclass(Wrapper), "Wrapper"),
    ],
    ids=["sparse", "meta", "lazy", "wrapper"],
)
def test_tensors_without_dense_bytes_are_refused_by_name(tensor: torch.Tensor, what: str) -> None:
    with pytest.raises(StateError, match=rf"state\.odd is a .*{what}"):
        Snapshot().write({"odd": tensor}, b"", CommitId(1, 1))


def test_a_write_that_fails_half_way_leaves_the_newest_commit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot()
    for tick in (1, 2):
        snapshot.write({"x": torch.full((5,), float(tick))}, b"", CommitId(1, tick))

    def half(buffer: torch.Tensor, *_: object) -> None:
        buffer.fill_(7)
        raise MemoryError("the machine is full")

    monkeypatch.setattr("elasticstate.state.snapshot.gather", half)
    with pytest.raises(MemoryError):
        snapshot.write({"x": torch.full((5,), 3.0)}, b"", CommitId(1, 3))
    assert (snapshot.newest, snapshot.previous) == (CommitId(1, 2), None)
    assert read_commit(snapshot, CommitId(1, 2))["x"].tolist() == [2.0] * 5
    with pytest.raises(StateError, match=r"commit \(1, 1\) is not held, only \(1, 2\) and None"):
        read_commit(snapshot, CommitId(1, 1))


def test_lambdas_and_local_classes_are_kept() -> None:
    class Local:
        value = 5

    snapshot = Snapshot()
    snapshot.write({"f": lambda x: x + 1, "c": Local(), "n": 3}, b"", CommitId(1, 1))
    back = read_commit(snapshot, CommitId(1, 1))
    assert (back["f"](1), back["c"].value, back["n"]) == (2, 5, 3)
    assert isinstance(back["c"], Local)


def test_a_commit_goes_from_one_snapshot_to_another_without_its_private_part() -> None:
    one, other = Snapshot(), Snapshot()
    one.write({"x": torch.arange(10.0), "n": [1, 2]}, b"secret", CommitId(3, 4))
    for tick in (1, 2):
        other.write({"x": torch.zeros(1)}, b"", CommitId(1, tick))
    header, payload = one.outgoing()
    assert b"secret" not in header + payload.numpy().tobytes()
    memory = other.incoming(header, b"mine")
    assert (other.newest, other.previous) == (CommitId(1, 2), None), "half received: only the newest is there"
    memory.copy_(payload)
    live = torch.zeros(10)
    assert other.seal_incoming(CommitId(4, 0), other.load_incoming({"x": live}))["n"] == [1, 2]
    assert torch.equal(live, torch.arange(10.0))
    other.verify()
    assert (other.newest, other.previous) == (CommitId(4, 0), None), "a commit off the job's line is not kept"
    back = read_commit(other, CommitId(4, 0))
    assert torch.equal(back["x"], torch.arange(10.0))
    assert back["n"] == [1, 2]
    assert other.read_private(CommitId(4, 0)) == b"mine"


def test_restamping_gives_the_newest_commit_another_id() -> None:
    snapshot = Snapshot()
    with pytest.raises(StateError, match=r"no commit that can become \(2, 0\)"):
        snapshot.restamp(CommitId(2, 0))
    snapshot.write({"n": 1}, b"", CommitId(1, 1))
    snapshot.write({"n": 2}, b"", CommitId(1, 2))
    snapshot.restamp(CommitId(2, 0))
    assert (snapshot.newest, snapshot.previous) == (CommitId(2, 0), CommitId(1, 1))
    assert read_commit(snapshot, CommitId(2, 0))["n"] == 2


def test_aliases_are_found() -> None:
    snapshot = Snapshot()
    snapshot.write({"x": torch.ones(4), "a": np.ones(4)}, b"", CommitId(1, 1))
    back = read_commit(snapshot, CommitId(1, 1))
    kept = {
        "own": torch.ones(4),
        "slice": back["x"][2:],
        "a": back["a"],
        "own_a": np.ones(4),
        "none": torch.ones(0),
        "n": 1,
    }
    assert snapshot.aliases(kept) == ["slice", "a"]


def test_write_into_writes_in_place_only_where_all_is_alike() -> None:
    target = torch.zeros(3, requires_grad=True)
    assert write_into(target, torch.ones(3)) is target
    assert target.tolist() == [1, 1, 1]
    value = torch.ones(3)
    for other in (torch.zeros(2), torch.zeros(3, dtype=torch.float64), None, 5, np.zeros(3)):
        made = write_into(other, value)
        assert made is not other
        assert made is not value
        assert torch.equal(made, value)
    array = np.zeros(3)
    assert write_into(array, np.ones(3)) is array
    assert array.tolist() == [1, 1, 1]
    array.setflags(write=False)
    assert write_into(array, np.zeros(3)) is not array


def test_room_that_was_made_ahead_is_used_and_what_is_held_is_kept() -> None:
    snapshot = Snapshot()
    snapshot.reserve(1 << 20)
    rooms = {buffer.memory.data_ptr() for buffer in (snapshot._newer, snapshot._older)}
    for tick in (1, 2):
        snapshot.write({"x": torch.full((1000,), tick)}, b"", CommitId(1, tick))
    assert {buffer.memory.data_ptr() for buffer in (snapshot._newer, snapshot._older)} == rooms
    snapshot.reserve(1 << 22)
    assert read_commit(snapshot, CommitId(1, 2))["x"].sum() == 2000
    assert read_commit(snapshot, CommitId(1, 1))["x"].sum() == 1000


def test_a_commit_waits_while_the_agent_copies_the_buffer_that_it_overwrites(
    file_storage: Callable[[], Any],
) -> None:
    storage = file_storage()
    snapshot = Snapshot(storage)
    for tick in (1, 2):
        snapshot.write({"x": torch.ones(10) * tick}, b"", CommitId(1, tick))
    index = snapshot._older.index
    until = time.monotonic_ns() + 30_000_000
    storage.page.pin(index, until)
    snapshot.write({"x": torch.ones(10)}, b"", CommitId(1, 3))
    assert time.monotonic_ns() >= until
    storage.page.pin(1 - index, 0)
    snapshot.write({"x": torch.ones(10)}, b"", CommitId(1, 4))
    assert snapshot.newest == CommitId(1, 4)
