"""Calls: the reports of calls that the driver receives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticstate.agent.supervisor import Calls
from elasticstate.agent.workers import WorkerHandle
from elasticstate.core.ids import WorkerId
from elasticstate.core.types import CallReport, WatchCalls
from elasticstate.net import messages

A, B = WorkerId("h", 0, 1), WorkerId("h", 1, 1)


class Scene:
    """An agent's calls, with two workers."""

    def __init__(self, limit_s: float | None = 60.0) -> None:
        self.sent: list[tuple[WorkerId, float | None]] = []
        self.handles = {worker: self._handle(worker) for worker in (A, B)}
        self.calls = Calls(self.handles, limit_s, self._send)

    def _handle(self, worker: WorkerId) -> WorkerHandle:
        return WorkerHandle(cast(Any, SimpleNamespace(worker=worker)), *[cast(Any, None)] * 2, "error", 0, False)

    def _send(self, message: messages.FromAgent) -> None:
        assert isinstance(message, messages.FromWorker)
        assert isinstance(message.body, CallReport)
        self.sent.append((message.worker, message.body.waiting_s))

    def report(self, worker: WorkerId, at: float, waiting_s: float | None, generation: int = 1) -> None:
        report = CallReport(generation, 0, (), 1, "barrier()", waiting_s)
        self.calls.received(self.handles[worker], report, at)

    def take(self) -> list[tuple[WorkerId, float | None]]:
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_short_wait_is_not_forwarded(scene: Scene) -> None:
    scene.report(A, 10.0, 0.5)
    scene.calls.look(60.0)
    scene.report(A, 61.0, None)
    scene.calls.look(200.0)
    assert scene.take() == []


def test_a_long_wait_is_forwarded_once_and_so_is_its_end(scene: Scene) -> None:
    scene.report(A, 10.0, 0.5)
    scene.calls.look(69.5)
    scene.calls.look(70.0)
    assert scene.take() == [(A, 60.0)]
    scene.report(A, 80.0, None)
    scene.report(A, 81.0, None)
    assert scene.take() == [(A, None)]


def test_all_reports_of_a_watched_generation_are_forwarded(scene: Scene) -> None:
    scene.report(A, 10.0, 0.5)
    scene.report(B, 10.0, 0.5, generation=2)
    scene.calls.watch(WatchCalls(1, True), 12.0)
    assert scene.take() == [(A, 2.5)]
    scene.report(A, 13.0, None)
    scene.report(B, 13.0, 1.0)
    assert scene.take() == [(A, None), (B, 1.0)]
    scene.calls.watch(WatchCalls(1, False), 14.0)
    scene.report(A, 15.0, 1.0)
    assert scene.take() == []
    scene.report(B, 15.0, None)
    assert scene.take() == [(B, None)], "the driver knows of its wait"


def test_without_the_check_nothing_is_forwarded() -> None:
    scene = Scene(None)
    scene.report(A, 10.0, 100.0)
    scene.calls.look(200.0)
    scene.calls.watch(WatchCalls(1, True), 200.0)
    assert scene.take() == []
