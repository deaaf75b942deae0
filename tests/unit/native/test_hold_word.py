"""The word of ticks and hold, under real threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from elasticstate._native import HoldWord

HOLD = HoldWord.HOLD


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_hold_is_the_highest_bit() -> None:
    assert HOLD == 1 << 63


def test_each_call_returns_the_word_as_it_was_before() -> None:
    word = HoldWord()
    assert word.add_tick() == 0
    assert word.add_tick() == 1
    assert word.hold() == 2
    assert word.hold() == 2 | HOLD
    assert word.add_tick() == 2 | HOLD
    assert word.load() == 3 | HOLD
    word.clear()
    assert word.load() == 3
    word.hold()
    word.reset()
    assert word.load() == 0


def test_no_tick_of_many_threads_is_lost_or_seen_twice() -> None:
    word = HoldWord()
    seen: list[list[int]] = [[] for _ in range(4)]

    def count(mine: list[int]) -> None:
        mine.extend(word.add_tick() for _ in range(5_000))

    threads = [threading.Thread(target=count, args=(mine,)) for mine in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tick for mine in seen for tick in mine) == list(range(20_000))


def test_of_a_hold_and_the_end_of_a_tick_one_comes_first_and_both_know_which() -> None:
    """The answer to a hold includes each tick counted before it. A worker that counts a tick later sees the hold.

    So the tick at which the worker first sees the hold is the one after the answer, in every schedule.
    """
    word = HoldWord()
    for _ in range(2_000):
        word.reset()
        saw: list[int] = []
        go = threading.Barrier(2)

        def work(go: threading.Barrier = go, saw: list[int] = saw) -> None:
            go.wait()
            while not (old := word.add_tick()) & HOLD:
                pass
            saw.append((old & ~HOLD) + 1)

        worker = threading.Thread(target=work)
        worker.start()
        go.wait()
        answer = word.hold()
        worker.join()
        assert saw == [answer + 1]
