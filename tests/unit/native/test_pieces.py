"""Copies between one flat buffer and pieces of memory, through the Python interface: bytes, bounds, threads.

native/tests/test_pieces.cpp compares random plans with a plain loop, under the sanitizers.
"""

from __future__ import annotations

import sys
import threading
import time
from itertools import accumulate

import numpy as np
import pytest
import torch

from elasticstate._native import Pieces, checksum, checksums, copy, copy_runs, gather, gather_each, scatter

MIB = 1 << 20
NOTHING = Pieces([], [], [])


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def pieces_of(tensors: list[torch.Tensor]) -> Pieces:
    """Return the tensors as pieces, one after the other without gaps."""
    sizes = [tensor.nbytes for tensor in tensors]
    return Pieces([tensor.data_ptr() for tensor in tensors], sizes, [0, *accumulate(sizes)][:-1])


@pytest.mark.parametrize("size", [0, 1, 1000, MIB + 3])
def test_bytes_are_copied_with_their_checksum_and_nothing_around_them(size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    target = bytearray(size + 10)
    before = checksum(np.frombuffer(b"before", np.uint8), 0, 6)
    found = copy(memoryview(target)[5 : 5 + size], memoryview(source), before)
    assert bytes(target) == bytes(5) + source + bytes(5)
    whole = np.frombuffer(b"before" + source, np.uint8)
    assert found == checksum(whole, 0, len(whole))
    with pytest.raises(ValueError, match=f"a target of {size + 10} bytes, but {size} bytes"):
        copy(target, source)


@pytest.mark.parametrize("sizes", [[5, 0, 17], [64 * MIB + 7], [1, 40 * MIB + 3, 0, 5, 24 * MIB], [100_003] * 300])
def test_a_buffer_is_gathered_and_scattered_whole_with_its_checksum(sizes: list[int]) -> None:
    total = sum(sizes)
    random = np.random.default_rng(total)
    tensors = [torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8)) for size in sizes]
    buffer = zeros(total)
    found = gather(buffer, pieces_of(tensors), 0, total)
    assert torch.equal(buffer, torch.cat(tensors))
    assert found == checksum(buffer, 0, total)
    copies = [zeros(size) for size in sizes]
    assert scatter(buffer, pieces_of(copies), 0, total) == found
    assert all(map(torch.equal, copies, tensors))


@pytest.mark.parametrize("has_addresses", [True, False])
def test_each_piece_gets_a_checksum_in_the_same_pass(has_addresses: bool) -> None:
    sizes = [0, 5, 17 * MIB + 3, 0, 1000, 9 * MIB]
    tensors = [torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)) for size in sizes]
    total, offsets = sum(sizes), [0, *accumulate(sizes)][:-1]
    pieces = pieces_of(tensors) if has_addresses else Pieces([0] * len(sizes), sizes, offsets)
    buffer = zeros(total) if has_addresses else torch.cat(tensors)
    each, middle = np.zeros(len(pieces), np.uint32), 6 * MIB + 1
    first = gather_each(buffer, pieces, 0, middle, each)
    assert gather_each(buffer, pieces, middle, total, each, first) == checksum(buffer, 0, total)
    assert torch.equal(buffer, torch.cat(tensors))
    assert each.tolist() == checksums(buffer, offsets, sizes)
    with pytest.raises(ValueError, match="outside a buffer of 5"):
        gather_each(buffer, pieces, 0, total, each[:5])


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
    ids=["zeros", "ones", "ascending", "digits", "nothing"],
)
def test_checksums_are_those_of_rfc_3720(data: bytes, crc: int) -> None:
    buffer = np.frombuffer(data, dtype=np.uint8)
    assert checksum(buffer, 0, len(data)) == crc
    assert checksums(buffer, [0], [len(data)]) == [crc]
    assert gather(buffer.copy(), NOTHING, 0, len(data)) == crc


def test_a_range_goes_on_where_the_one_before_it_ended() -> None:
    source, buffer = torch.arange(100, dtype=torch.uint8), zeros(140)
    pieces = Pieces([source.data_ptr(), 0], [100, 20], [10, 110])
    whole = gather(buffer, pieces, 0, 140)
    again = zeros(140)
    first = gather(again, pieces, 0, 57)
    assert not again[57:].any()
    assert gather(again, pieces, 57, 140, first) == whole
    assert torch.equal(again, buffer)
    assert checksum(buffer, 57, 140, checksum(buffer, 0, 57)) == whole


def test_each_range_has_its_checksum() -> None:
    buffer = torch.arange(200, dtype=torch.uint8)
    offsets, sizes = [0, 5, 5, 199, 200], [200, 0, 77, 1, 0]
    expected = [checksum(buffer, offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
    assert checksums(buffer, offsets, sizes) == expected


@pytest.mark.parametrize(("begin", "end"), [(0, 11), (11, 11), (6, 5), (0, 2**62)])
def test_a_range_outside_the_buffer_is_refused_and_nothing_is_copied(begin: int, end: int) -> None:
    buffer, one = zeros(10), torch.ones(10, dtype=torch.uint8)
    for way in (gather, scatter):
        with pytest.raises(ValueError, match=f"bytes {begin} to {end} are outside a buffer of 10"):
            way(buffer, pieces_of([one]), begin, end)
    with pytest.raises(ValueError, match="outside a buffer of 10"):
        checksum(buffer, begin, end)
    assert not buffer.any()
    assert one.all()


def test_a_piece_that_ends_outside_the_buffer_is_copied_as_far_as_the_range_goes() -> None:
    buffer, one = zeros(10), torch.ones(20, dtype=torch.uint8)
    gather(buffer, Pieces([one.data_ptr()], [20], [5]), 0, 10)
    assert buffer.tolist() == [0] * 5 + [1] * 5


def test_checksums_of_what_does_not_fit_name_it() -> None:
    with pytest.raises(ValueError, match="range 1: 5 bytes at offset 6 are outside a buffer of 10"):
        checksums(zeros(10), [0, 6], [10, 5])
    with pytest.raises(ValueError, match="2 offsets, but 1 sizes"):
        checksums(zeros(10), [0, 6], [10])


def test_pieces_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="piece 1: offset 4 lies before the last one's end, 5"):
        Pieces([0, 0], [5, 5], [0, 4])
    with pytest.raises(ValueError, match="1 addresses, 0 sizes and 1 offsets"):
        Pieces([0], [], [0])
    with pytest.raises(TypeError):
        Pieces([0], [-1], [0])


def test_a_buffer_with_gaps_or_of_another_type_is_refused_not_copied_or_converted() -> None:
    read_only = np.zeros(10, dtype=np.uint8)
    read_only.flags.writeable = False
    for buffer in (zeros(20)[::2], torch.zeros(10), zeros(10).reshape(2, 5), read_only):
        with pytest.raises(TypeError):
            gather(buffer, NOTHING, 0, 10)
    assert scatter(read_only, NOTHING, 0, 10) == checksum(read_only, 0, 10)
    with pytest.raises(TypeError):
        checksum(torch.zeros(10), 0, 10)


def test_other_threads_run_during_a_copy() -> None:
    source, buffer = zeros(64 * MIB), zeros(64 * MIB)
    pieces = pieces_of([source])
    wanted, ran = threading.Event(), threading.Event()

    def run_when_wanted() -> None:
        wanted.wait()
        ran.set()

    other = threading.Thread(target=run_when_wanted)
    switch_interval = sys.getswitchinterval()
    other.start()
    # From here on, another thread gets the GIL only when this thread releases it. Only the copy below does that.
    sys.setswitchinterval(1_000)
    try:
        wanted.set()
        deadline = time.monotonic() + 60
        while not ran.is_set() and time.monotonic() < deadline:
            gather(buffer, pieces, 0, 64 * MIB)
        ran_during_a_copy = ran.is_set()
    finally:
        sys.setswitchinterval(switch_interval)
        other.join()
    assert ran_during_a_copy


def test_runs_are_copied_in_any_order_and_several_times() -> None:
    source = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 40 * MIB, dtype=np.uint8))
    offsets, sizes = [7, 0, 20 * MIB, 7, 40 * MIB], [30 * MIB, 0, 5, 3, 0]
    targets = [zeros(size + 1) for size in sizes]
    copy_runs(source, offsets, sizes, [target.data_ptr() for target in targets])
    for offset, size, target in zip(offsets, sizes, targets, strict=True):
        assert torch.equal(target[:size], source[offset : offset + size])
        assert target[size] == 0


def test_runs_outside_the_buffer_are_refused_before_anything_is_copied() -> None:
    target, source = zeros(10), torch.ones(10, dtype=torch.uint8)
    at = target.data_ptr()
    for offset, size in ((8, 3), (11, 0), (1 << 63, 1 << 63)):
        with pytest.raises(ValueError, match=r"range 1: .* outside a buffer of 10"):
            copy_runs(source, [0, offset], [2, size], [at, at])
    with pytest.raises(ValueError, match="1 addresses, but 2 sizes"):
        copy_runs(source, [0, 0], [2, 2], [at])
    with pytest.raises(ValueError, match="1 offsets, but 2 sizes"):
        copy_runs(source, [0], [2, 2], [at, at])
    assert not target.any()
