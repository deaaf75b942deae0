"""The copy of many arrays into one buffer: right bytes at the right places, and nothing converted on the way."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticstate._native import gather

MIB = 1 << 20


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), max_size=20), st.integers(0, 2**32 - 1))
def test_every_source_lands_at_its_offset_and_nothing_else_is_touched(layout: list[tuple[int, int]], seed: int) -> None:
    random = np.random.default_rng(seed)
    expected, sources, offsets = bytearray(), [], []
    for size, gap in layout:
        expected += b"\xee" * gap
        offsets.append(len(expected))
        sources.append(random.integers(0, 256, size, dtype=np.uint8))
        expected += sources[-1].tobytes()
    destination = np.full(len(expected), 0xEE, dtype=np.uint8)
    gather(destination, sources, offsets)
    assert destination.tobytes() == bytes(expected)


@pytest.mark.parametrize("sizes", [[64 * MIB + 7], [1, 40 * MIB + 3, 0, 5, 24 * MIB], [100_003] * 300])
def test_copies_that_are_split_over_threads_are_whole(sizes: list[int]) -> None:
    random = np.random.default_rng(sum(sizes))
    sources = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    offsets = [int(offset) for offset in np.cumsum([0, *sizes[:-1]])]
    destination = np.empty(sum(sizes), dtype=np.uint8)
    gather(destination, sources, offsets)
    assert np.array_equal(destination, np.concatenate(sources))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_of_every_type_are_taken_as_their_bytes(dtype: torch.dtype) -> None:
    source = torch.arange(48).to(dtype)
    destination = zeros(source.nbytes)
    gather(destination, [source.view(torch.uint8)], [0])
    assert torch.equal(destination.view(dtype), source)


@pytest.mark.parametrize("offset", [-1, 6, 11, 2**62])
def test_a_source_that_does_not_fit_is_named_and_nothing_is_copied(offset: int) -> None:
    destination = zeros(10)
    one = torch.ones(5, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"sources\[1\]: 5 bytes at offset -?\d+ do not fit into a destination of 10"):
        gather(destination, [one, one], [0, offset])
    assert not destination.any()


def test_a_source_larger_than_the_destination_is_named() -> None:
    with pytest.raises(ValueError, match=r"sources\[0\]"):
        gather(zeros(3), [zeros(4)], [0])


def test_each_source_needs_an_offset() -> None:
    with pytest.raises(ValueError, match="1 sources, but 0 offsets"):
        gather(zeros(3), [zeros(1)], [])


def test_a_destination_with_gaps_is_refused_not_copied() -> None:
    with pytest.raises(TypeError):
        gather(zeros(10)[::2], [zeros(1)], [0])


def test_a_destination_of_another_type_is_refused_not_converted() -> None:
    with pytest.raises(TypeError):
        gather(torch.zeros(10), [zeros(1)], [0])  # type: ignore[arg-type]


def test_a_destination_that_must_not_be_written_is_refused() -> None:
    destination = np.zeros(10, dtype=np.uint8)
    destination.flags.writeable = False
    with pytest.raises(TypeError):
        gather(destination, [np.ones(1, dtype=np.uint8)], [0])


def test_a_source_need_not_be_writable() -> None:
    destination = zeros(3)
    gather(destination, [np.frombuffer(b"abc", dtype=np.uint8)], [0])
    assert bytes(destination.tolist()) == b"abc"


@pytest.mark.parametrize("source", [zeros(10)[::2], torch.zeros(4), zeros(4).reshape(2, 2)])
def test_a_source_of_another_shape_or_type_is_refused_not_converted(source: torch.Tensor) -> None:
    with pytest.raises(TypeError):
        gather(zeros(100), [source], [0])


def test_other_threads_run_during_a_copy() -> None:
    source, destination = zeros(64 * MIB), zeros(64 * MIB)
    wanted, ran = threading.Event(), threading.Event()

    def run_when_wanted() -> None:
        wanted.wait()
        ran.set()

    other = threading.Thread(target=run_when_wanted)
    switch_interval = sys.getswitchinterval()
    other.start()
    # From here on a thread gets the GIL only when this one gives it away: nothing below does, except the copy.
    sys.setswitchinterval(1_000)
    try:
        wanted.set()
        deadline = time.monotonic() + 10
        while not ran.is_set() and time.monotonic() < deadline:
            gather(destination, [source], [0])
        ran_during_a_copy = ran.is_set()
    finally:
        sys.setswitchinterval(switch_interval)
        other.join()
    assert ran_during_a_copy
