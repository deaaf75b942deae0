"""Waits of a worker while a world is formed, and the ways in which it is freed from them."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from elasticstate import present_world
from elasticstate.core.ids import WorkerId
from elasticstate.core.types import Placement
from elasticstate.worker.contexts.gloo import GlooContext
from elasticstate.worker.loop import store_address


def test_rank_0_is_got_out_of_a_wait_for_its_own_store_whatever_its_address_on_the_network() -> None:
    """The peers of rank 0 connect to the store at the host's address; rank 0 uses another address."""
    server = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    place = Placement(WorkerId("c", 0, 1), 0, 0, 1, 0, 0, 1)
    context = GlooContext()
    context.sockets.watch_store(*store_address(present_world.fixed(place, 2, f"192.0.2.1:{server.port}")))
    waiting = threading.Event()
    failure: list[BaseException] = []

    def wait_for_a_peer_that_does_not_come() -> None:
        waiting.set()
        try:
            server.wait(["nobody"])
        except RuntimeError as error:
            failure.append(error)

    thread = threading.Thread(target=wait_for_a_peer_that_does_not_come)
    thread.start()
    waiting.wait()
    for _ in range(2000):  # like the sentinel, until the generation has been left
        context.sockets.sever()
        thread.join(0.005)
        if not thread.is_alive():
            break
    assert not thread.is_alive(), "it waits for 60 s"
    assert failure
    with pytest.raises(RuntimeError):
        server.get("nobody")


def test_the_others_find_it_at_the_address_of_rank_0() -> None:
    place = Placement(WorkerId("b", 0, 1), 1, 0, 1, 0, 0, 1)
    assert store_address(present_world.fixed(place, 2, "192.0.2.1:7")) == ("192.0.2.1", 7)
