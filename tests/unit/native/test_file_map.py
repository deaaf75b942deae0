"""Files that are mapped whole, and become longer: addresses stay, and what is in use stays mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from elasticstate._native import FileMap

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("mapped")
    yield fd
    os.close(fd)


def mapped_pages() -> int:
    """Return the pages of shared files that this process has mapped and touched."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[2])


def test_a_file_that_becomes_longer_is_mapped_behind_its_old_part(file: int) -> None:
    os.ftruncate(file, 3 * PAGE + 5)
    file_map = FileMap(file)
    old = file_map.memory()
    old[-1] = 7
    os.ftruncate(file, 9 * PAGE)
    assert file_map.grow(file)
    new = file_map.memory()
    assert (len(old), len(new)) == (3 * PAGE + 5, 9 * PAGE)
    assert new.ctypes.data == old.ctypes.data
    new[0], new[-1] = 1, 2
    assert (old[0], new[3 * PAGE + 4], os.pread(file, 1, 9 * PAGE - 1)) == (1, 7, b"\2")
    assert file_map.grow(file), "nothing to do"
    os.ftruncate(file, 1000 * PAGE)
    assert not file_map.grow(file), "more than was reserved"
    assert len(file_map.memory()) == 9 * PAGE


def test_all_pages_are_there_before_they_are_used(file: int) -> None:
    size = 40 << 20  # enough for several threads
    os.ftruncate(file, PAGE)
    file_map = FileMap(file)
    os.ftruncate(file, PAGE * 3)
    assert file_map.grow(file)
    before = mapped_pages()
    os.ftruncate(file, size)
    large = FileMap(file)
    assert mapped_pages() - before > 0.9 * size / PAGE
    assert not large.memory().any()


def test_memory_stays_while_an_array_of_it_exists(file: int) -> None:
    os.ftruncate(file, 2 * PAGE)
    memory = FileMap(file).memory()
    memory[:] = 5
    assert os.pread(file, 1, PAGE) == b"\5"
    before = mapped_pages()
    del memory
    assert mapped_pages() == before - 2


def test_an_empty_file_has_no_memory_and_a_wrong_descriptor_is_an_error(file: int) -> None:
    file_map = FileMap(file)
    assert file_map.memory().shape == (0,)
    os.ftruncate(file, PAGE)
    assert not file_map.grow(file)
    assert np.array_equal(FileMap(file).memory(), np.zeros(PAGE, np.uint8))
    with pytest.raises(OSError, match="fstat"):
        FileMap(-1)
