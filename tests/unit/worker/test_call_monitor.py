"""Monitor of collective calls: reports of states that last, from its own thread."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator

import pytest

from elasticstate.core.types import CallReport
from elasticstate.worker import call_monitor


@pytest.fixture
def reports() -> Iterator[queue.Queue[CallReport]]:
    found: queue.Queue[CallReport] = queue.Queue()
    call_monitor.start(found.put)
    yield found
    call_monitor.stop()


def test_a_call_outside_of_a_job_is_not_recorded() -> None:
    call_monitor.begin_call(1, 0, (), 1, "barrier()")
    call_monitor.end_call()
    assert call_monitor._newest is None


def test_a_wait_that_lasts_is_reported_and_so_is_its_end(reports: queue.Queue[CallReport]) -> None:
    call_monitor.begin_call(3, 2, (0, 1), 7, "x" * 1000)
    report = reports.get(timeout=30)
    assert (report.generation, report.process_set, report.ranks, report.number) == (3, 2, (0, 1), 7)
    assert report.call == "x" * 300
    assert report.waiting_s is not None
    assert report.waiting_s >= 0.5
    call_monitor.end_call()
    assert reports.get(timeout=30).waiting_s is None
    last = reports.get(timeout=30)
    assert (last.number, last.waiting_s) == (7, None), "a pause after the call is reported, too"


def test_a_forked_child_reports_nothing(reports: queue.Queue[CallReport]) -> None:
    child = os.fork()
    if child == 0:
        call_monitor.begin_call(1, 0, (), 1, "barrier()")
        os._exit(0 if call_monitor._newest is None else 1)
    assert os.waitpid(child, 0)[1] == 0
