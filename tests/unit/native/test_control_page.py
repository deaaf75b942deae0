"""The page that worker and agent share: consistent stamps, and seals that are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticstate._native import ControlPage
from tests.kit.pages import page_at

ME, OTHER = b"job, host, slot!", b"another job's..."
NO_TAG = bytes(16)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "control"
    file.write_bytes(bytes(4096))
    return file


def test_what_one_process_writes_another_reads(path: Path) -> None:
    worker, agent = page_at(path), page_at(path)
    worker.heartbeat()
    worker.heartbeat()
    worker.progress()
    assert agent.stamp() == (2, 1, 0, 0, 0)
    assert agent.trains_since == 0
    worker.begin_training(7)
    assert agent.trains_since == 7
    worker.enter(1)
    assert agent.trains_since == 0, "in the new generation"
    worker.seal(1, ME, 5, 9, 1234, 4096, 0xDEADBEEF, b"the tag of a job")
    assert agent.sealed(1, ME) == (5, 9, 1234, 4096, 0xDEADBEEF, b"the tag of a job")
    assert agent.sealed(0, ME) is None


def test_a_reset_forgets_all_but_the_seals(path: Path) -> None:
    page = page_at(path)
    page.seal(0, ME, 1, 2, 3, 4, 5)
    page.progress()
    page.reset()
    assert page.stamp()[1:] == (0, 0, 0, 0)
    assert page.sealed(0, ME) == (1, 2, 3, 4, 5, NO_TAG)


def test_the_last_seal_counts_and_none_after_unseal(path: Path) -> None:
    page = page_at(path)
    for tick in range(1, 6):
        page.seal(0, ME, 1, tick, 0, 0, 0)
        assert page.sealed(0, ME) == (1, tick, 0, 0, 0, NO_TAG)
    page.unseal(0)
    assert page.sealed(0, ME) is None


def test_a_seal_of_another_job_is_none(path: Path) -> None:
    page = page_at(path)
    page.seal(0, OTHER, 7, 7, 0, 0, 0)
    assert page.sealed(0, ME) is None
    assert page.sealed(0, OTHER) is not None


def test_every_bit_of_a_seal_counts(path: Path) -> None:
    page = page_at(path)
    page.seal(0, ME, 5, 9, 1, 2, 3)
    data = bytearray(path.read_bytes())
    start = data.index(ME)
    for bit in range(80 * 8):
        data[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert page_at(path).sealed(0, ME) is None, bit
        data[start + bit // 8] ^= 1 << bit % 8


def test_a_page_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot read the size"):
        ControlPage(1 << 20)
    short = tmp_path / "short"
    short.write_bytes(bytes(4095))
    with pytest.raises(ValueError, match="shorter"):
        page_at(short)
    page = ControlPage(None)
    with pytest.raises(ValueError, match="0 or 1"):
        page.seal(2, ME, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="16 bytes"):
        page.sealed(0, b"short")
