"""The time that the training thread waits in torch's own collectives is measured, wherever torch waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticstate import _native

LATE_S = 0.1


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    """Yield the Gloo groups of two ranks in this process. This thread is the one that trains."""
    assert _native.measure_waits(), "torch's waits have other names: see native/wait_clock.cpp"
    page = _native.ControlPage(None)
    sentinel = _native.Sentinel(page, -1)
    sentinel.enter(1, _native.GlooSockets())
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, dist.default_pg_timeout), range(2)))
    yield made
    made.clear()  # ends the groups' threads


def waited_s(mine: Callable[[], object], others: Callable[[], object]) -> tuple[float, float]:
    """Let the other rank be late. Return the measured seconds of this rank's waits, and the seconds of its call."""

    def late() -> None:
        time.sleep(LATE_S)
        others()

    other = threading.Thread(target=late)
    other.start()
    before, begun = _native.waited_ns(), time.perf_counter()
    mine()
    passed_s, waited_ns = time.perf_counter() - begun, _native.waited_ns() - before
    other.join()
    return waited_ns / 1e9, passed_s


def test_the_first_rank_waits_and_the_late_one_does_not(groups: list[Any]) -> None:
    first, late = ([torch.ones(4)] for _ in range(2))
    waited, passed = waited_s(lambda: groups[0].allreduce(first).wait(), lambda: groups[1].allreduce(late).wait())
    assert LATE_S / 2 < waited <= passed
    before = _native.waited_ns()
    time.sleep(LATE_S)
    assert _native.waited_ns() == before, "a sleep is no wait for others"


def test_a_wait_with_a_time_out_counts(groups: list[Any]) -> None:
    limit = dist.default_pg_timeout
    first, late = ([torch.ones(4)] for _ in range(2))
    waited, passed = waited_s(lambda: groups[0].allreduce(first).wait(limit), lambda: groups[1].allreduce(late).wait())
    assert LATE_S / 2 < waited <= passed


def test_a_wait_for_a_future_counts_as_in_the_backward_pass_of_ddp(groups: list[Any]) -> None:
    first, late = ([torch.ones(4)] for _ in range(2))
    waited, passed = waited_s(
        lambda: groups[0].allreduce(first).get_future().wait(), lambda: groups[1].allreduce(late).wait()
    )
    assert LATE_S / 2 < waited <= passed
