"""Detection of the connections of a Gloo group: real ones, between two ranks in this process."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from elasticstate._native import GlooSockets

SOON_S = 30.0


def make(sockets: GlooSockets) -> list[dist.ProcessGroupGloo]:
    """Make a group of two ranks, up to ``end_group``."""
    store, groups = dist.HashStore(), {}

    def one(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=SOON_S))

    assert sockets.begin_group(2)
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[0], groups[1]]


def wait_until_nothing_is_connected() -> None:
    deadline = time.monotonic() + SOON_S
    while [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]:
        assert time.monotonic() < deadline, psutil.Process().net_connections("tcp")
        time.sleep(0.005)


def test_connections_that_are_lost_after_the_group_is_made_are_missed() -> None:
    sockets = GlooSockets()
    groups = make(sockets)
    sockets.end_group()
    assert not sockets.broken()
    del groups[1]
    gc.collect()
    wait_until_nothing_is_connected()
    assert sockets.broken()


def test_connections_that_are_lost_before_the_group_is_done_are_missed() -> None:
    sockets = GlooSockets()
    groups = make(sockets)
    del groups[1]
    gc.collect()
    wait_until_nothing_is_connected()
    sockets.end_group()
    assert sockets.broken()


def test_a_group_that_connects_when_it_is_used_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    sockets = GlooSockets()
    groups = make(sockets)
    assert len(groups) == 2
    sockets.end_group()
    assert not sockets.broken()
