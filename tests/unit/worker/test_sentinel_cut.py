"""A context that only Python can sever: a thread severs it from the end of a generation until the worker leaves."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from elasticstate import _native
from elasticstate.core.ids import WorkerId
from elasticstate.core.types import MemberOptions, Placement
from elasticstate.log import logger
from elasticstate.net import messages
from elasticstate.worker import sentinel as sentinel_module
from elasticstate.worker.sentinel import Sentinel

ME = WorkerId("h", 0, 1)
PLACE = Placement(ME, 0, 0, 1, 0, 0, 1)
LONG_S = 10.0


class Context:
    """Context that counts the calls of ``sever``."""

    severs_in_python = True

    def __init__(self) -> None:
        self.sockets = _native.GlooSockets()
        self.severed = threading.Semaphore(0)
        self.failure = ""

    def sever(self) -> None:
        self.severed.release()

    def own_failure(self) -> str:
        return self.failure


def world(generation: int) -> messages.World:
    return messages.World(generation, (PLACE,), 1, 0, (), "h:1", options=MemberOptions(60.0, 60.0, False, False))


@pytest.fixture
def sentinel() -> Iterator[Sentinel]:
    agent, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sentinel = Sentinel(mine.detach(), ME, _native.ControlPage(None))
    sentinel.start(())
    with agent:
        yield sentinel
        sentinel.finish()  # after this, the agent may exit
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the next sentinel of this process begins anew


def test_again_and_again_until_the_generation_has_been_left(sentinel: Sentinel) -> None:
    before, context = threading.active_count(), Context()
    sentinel.enter(world(5), context)
    assert threading.active_count() == before + 2, "one cuts, one watches"
    assert not context.severed.acquire(blocking=False), "nothing has ended"
    sentinel.report_failure("a peer is gone")
    for _ in range(3):
        assert context.severed.acquire(timeout=LONG_S)
    sentinel.leave()
    assert threading.active_count() == before
    while context.severed.acquire(blocking=False):
        pass
    assert not context.severed.acquire(timeout=0.02), "it has been left"


def test_a_generation_that_does_not_end_is_never_cut(sentinel: Sentinel) -> None:
    before, context = threading.active_count(), Context()
    sentinel.enter(world(5), context)
    sentinel.leave()
    assert threading.active_count() == before
    assert not context.severed.acquire(blocking=False)


def test_the_end_of_another_generation_does_not_cut_this_one(sentinel: Sentinel) -> None:
    first, second = Context(), Context()
    sentinel.enter(world(5), first)
    sentinel.report_failure("a peer is gone")
    assert first.severed.acquire(timeout=LONG_S)
    sentinel.leave()
    sentinel.enter(world(6), second)
    assert not second.severed.acquire(timeout=0.02)
    sentinel.leave()


def test_a_failure_that_only_the_backend_sees_ends_the_generation(
    sentinel: Sentinel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel_module, "_WATCH_INTERVAL_S", 0.01)
    context = Context()
    sentinel.enter(world(5), context)
    assert not context.severed.acquire(timeout=0.05)
    context.failure = "the link is lost"
    assert context.severed.acquire(timeout=LONG_S)
    assert sentinel.has_ended(5)
    assert sentinel.cause == "the link is lost"
    sentinel.leave()


def test_a_script_is_reproached_only_for_what_it_knows(sentinel: Sentinel, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[object] = []
    monkeypatch.setattr(logger, "warning", lambda *args: warnings.append(args))
    sentinel.enter(world(5), Context())
    sentinel.refuse(is_told=False)
    assert not warnings, "no collective has raised an error: this refusal is the first news"
    sentinel.refuse(is_told=False)
    assert len(warnings) == 1, "the script has caught the refusal"
    sentinel.refuse(is_told=False)
    assert len(warnings) == 1
    sentinel.leave()
    sentinel.enter(world(6), Context())
    sentinel.refuse()
    assert len(warnings) == 2, "it has caught the error of a collective"
    sentinel.leave()
