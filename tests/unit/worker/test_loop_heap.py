"""Freed memory stays with the process: the next blocks cause no page faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import elasticstate

SCRIPT = """
import ctypes, resource, sys
PR_SET_THP_DISABLE = 41  # else the kernel may give huge pages to some blocks, and page faults tell nothing
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
import torch
from elasticstate.worker import loop as heap

def faults_of(count, megabytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(megabytes << 18) for _ in range(count)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    heap.keep_freed_memory()
    heap.fill(int(sys.argv[2]) << 20)
# The second blocks are smaller. glibc's memalign needs more space than the block has: a freed block of the same size
# serves only if its neighbour is free, too.
print(faults_of(12, 10), faults_of(12, 9))
"""
PAGES = 12 * (10 << 20) // os.sysconf("SC_PAGESIZE")  # of the blocks


def faults(*arguments: str, **variables: str) -> tuple[int, int]:
    """Return the page faults of 12 blocks of 10 MB, and of 12 blocks of 9 MB after the first were freed."""
    package = str(Path(elasticstate.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": package, "MALLOC_ARENA_MAX": "1", **variables}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    first, second = map(int, printed.split())
    return first, second


def test_without_the_setting_the_blocks_are_fresh_again() -> None:
    assert min(faults("trim")) > PAGES // 2


def test_freed_memory_is_used_again() -> None:
    first, second = faults("keep", "0")
    assert first > PAGES // 2
    assert second < PAGES // 4


def test_filled_memory_is_used_by_the_first_blocks() -> None:
    first, second = faults("keep", "160")
    assert first < PAGES // 4
    assert second < PAGES // 4


@pytest.mark.parametrize(
    "setting", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}]
)
def test_settings_of_the_user_stay(setting: dict[str, str]) -> None:
    _, second = faults("keep", "0", **setting)
    assert second > PAGES // 2
