"""The file format of a buffer, read by other tools, or forged by a stranger."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open

from elasticstate.core.ids import CommitId
from elasticstate.errors import StateError
from elasticstate.state.base import committer_of
from elasticstate.state.layout import ALIGNMENT_BYTES, OBJECTS, RANDOM, parse_header
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.torch import TorchState
from tests.kit.state import read_commit

ALL_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
WITHOUT_VALUES = [d for d in ALL_DTYPES if str(d).removeprefix("torch.").startswith(("q", "bit"))]
PLAIN = [
    d for d in ALL_DTYPES if d not in WITHOUT_VALUES and not str(d).removeprefix("torch.").startswith(("int1", "uint1"))
] + [torch.int16, torch.uint16]


def whole(memory: torch.Tensor) -> tuple[memoryview, int]:
    return memory.numpy().data, memory.numel()


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    n = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(0, 2 if dtype is torch.bool else 100, (n,), dtype=torch.uint8).view(dtype).view(shape)


def opened(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(file, framework="pt") as reader:
        return {name: reader.get_tensor(name) for name in reader.keys()}, reader.metadata()  # noqa: SIM118


def commit_of(values: dict[str, Any], storage: Any) -> Snapshot:
    snapshot = Snapshot(storage)
    snapshot.write(values, b"random", CommitId(1, 1))
    return snapshot


def test_a_live_commit_is_read_by_safetensors(file_storage: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    model[2].weight = torch.nn.Parameter(torch.randn(5, 2).t())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state = TorchState(model=model, optimizer=optimizer, epoch=3)
    storage = file_storage()
    committer_of(state).use_storage(storage)
    for _ in range(2):
        state.commit()
    for file in storage.files:
        tensors, metadata = opened(file)
        assert metadata["format"] == "pt"
        expected = {f"model.parameters.{name}": p for name, p in model.named_parameters()}
        expected |= {f"model.buffers.{name}": b for name, b in model.named_buffers()}
        for i, p in enumerate(model.parameters()):
            expected |= {f"optimizer.state.{i}.{key}": t for key, t in optimizer.state[p].items()}
        assert tensors.keys() == {*expected, OBJECTS, RANDOM}
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        assert all(tensors[name].dtype == tensor.dtype for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_every_dtype_comes_back_and_can_be_read_by_others(dtype: torch.dtype, file_storage: Callable[[], Any]) -> None:
    values = {"zero": filled(dtype), "some": filled(dtype, 3, 5), "none": filled(dtype, 0, 2)}
    storage = file_storage()
    back = read_commit(commit_of(values, storage), CommitId(1, 1))
    for name, tensor in values.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes(back[name].view(-1).view(torch.uint8)) == bytes(tensor.view(-1).view(torch.uint8))
    tensors, _ = opened(storage.files[0])
    raw = tensors["some"].contiguous().view(-1).view(torch.uint8)
    assert bytes(raw) == bytes(values["some"].view(-1).view(torch.uint8))


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8], ids=str)
def test_quantised_tensors_are_refused(dtype: torch.dtype) -> None:
    tensor = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, dtype)
    with pytest.raises(StateError, match=r"state\.odd is a quantised tensor"):
        Snapshot().write({"odd": tensor}, b"", CommitId(1, 1))


def test_the_data_is_aligned_and_a_small_change_leaves_it_in_place(file_storage: Callable[[], Any]) -> None:
    starts = []
    for n in (3, 4):
        snapshot = commit_of({f"layer.{i}.weight": torch.ones(i) for i in range(n)}, file_storage())
        snapshot.forget()
        starts.append(snapshot._newer.frame.tensors)
    assert starts[0] == starts[1]
    assert starts[0] % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("name", [OBJECTS, RANDOM, "__metadata__"])
def test_names_that_the_format_needs_are_refused(name: str) -> None:
    with pytest.raises(StateError, match=f"state.{name} cannot be committed under this name"):
        Snapshot().write({name: torch.ones(1)}, b"", CommitId(1, 1))


def rich_commit(storage: Any) -> Snapshot:
    weight = torch.arange(12.0)
    values = {
        "weight": weight,
        "tied": weight,
        "z": torch.ones(3, dtype=torch.complex128),
        "text": np.array(["ab", "cde"]),
        "day": np.array(["2020-01-01"], dtype="datetime64[D]"),
        "empty": torch.ones(0, 3),
        "turned": torch.ones(2, 3).t(),
        "n": 5,
    }
    return commit_of(values, storage)


def test_what_was_written_is_parsed(file_storage: Callable[[], Any]) -> None:
    snapshot = rich_commit(file_storage())
    frame, _ = parse_header(*whole(snapshot._newer.memory))
    assert frame == snapshot._newer.frame


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no objects": lambda h: h.pop(OBJECTS),
    "no random state": lambda h: h.pop(RANDOM),
    "no metadata": lambda h: h.pop("__metadata__"),
    "no notes": lambda h: h["__metadata__"].pop("elasticstate"),
    "another version": lambda h: noted(h, version=2),
    "negative": lambda h: h["weight"].update(shape=[-12]),
    "huge": lambda h: h["weight"].update(shape=[1 << 62, 1 << 62, 0]),
    "many dimensions": lambda h: h["weight"].update(shape=[12, *[1] * 100]),
    "another size": lambda h: h["weight"].update(shape=[13]),
    "unknown dtype": lambda h: h["weight"].update(dtype="F33"),
    "backwards": lambda h: h["weight"].update(data_offsets=h["weight"]["data_offsets"][::-1]),
    "beyond the end": lambda h: h["weight"].update(data_offsets=[n + (1 << 40) for n in h["weight"]["data_offsets"]]),
    "a hole": lambda h: h.pop("weight"),
    "tied to nothing": lambda h: noted(h, tied={"tied": "nobody"}),
    "two things": lambda h: noted(h, kinds={"weight": ["<U0", [12]]}),
    "python code": lambda h: noted(h, kinds={"text": ["O", [3]]}),
    "a dtype torch has not": lambda h: noted(h, kinds={"z": ["torch.nn", [3]]}),
    "names twice": lambda h: noted(h, order=["weight", "weight"]),
    "no names": lambda h: noted(h, order=[]),
    "strides of nothing": lambda h: noted(h, strides={"nobody": [1]}),
    "strides with holes": lambda h: noted(h, strides={"weight": [3, 1, 9]}),
    "overlapping strides": lambda h: noted(h, strides={"weight": [0]}),
}


def noted(header: dict[str, Any], **changes: Any) -> None:
    notes = json.loads(header["__metadata__"]["elasticstate"])
    header["__metadata__"]["elasticstate"] = json.dumps({**notes, **changes})


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_no_commit(name: str, file_storage: Callable[[], Any]) -> None:
    memory = rich_commit(file_storage())._newer.memory.clone()
    content = memory.numpy()
    capacity = int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8 : 8 + capacity].tobytes())
    HEADERS[name](header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(capacity)
    assert len(text) == capacity
    content[8 : 8 + capacity] = np.frombuffer(text, dtype=np.uint8)
    with pytest.raises((ValueError, StateError)):
        parse_header(*whole(memory))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_rubbish_is_never_more_than_an_error(data: st.DataObject) -> None:
    """Random bytes, or a valid header with random changes."""
    good = rich_commit(None)._newer.memory.clone()
    if data.draw(st.booleans()):
        memory = torch.frombuffer(bytearray(data.draw(st.binary(min_size=1, max_size=200))), dtype=torch.uint8)
    else:
        memory = good
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, 1500))
            patch = data.draw(st.binary(min_size=1, max_size=8))
            memory[at : at + len(patch)] = torch.frombuffer(bytearray(patch), dtype=torch.uint8)
    try:
        frame, _ = parse_header(*whole(memory))
    except (ValueError, StateError):
        return
    for entry in frame.layout.entries:
        assert 0 <= entry.offset <= entry.offset + entry.size_bytes <= frame.objects - frame.tensors
    assert frame.objects <= memory.numel()
