"""Goodput, computed from hand-made times."""

from __future__ import annotations

import pytest

from elasticstate.driver.goodput import Goodput


def test_a_job_without_ticks_has_none() -> None:
    assert Goodput(0.0).share(10.0) is None


def test_boot_and_downtime_do_not_count() -> None:
    goodput = Goodput(0.0)
    goodput.first_tick(1, 4.0)
    goodput.end(8.0)
    goodput.first_tick(2, 9.0)
    goodput.end(10.0)
    assert goodput.share(10.0) == pytest.approx(0.5)


def test_only_the_first_worker_begins_a_generation() -> None:
    goodput = Goodput(0.0)
    goodput.first_tick(1, 1.0)
    goodput.first_tick(1, 3.0)
    goodput.end(5.0)
    assert goodput.share(5.0) == pytest.approx(0.8)


def test_ticks_that_are_done_again_do_not_count() -> None:
    goodput = Goodput(0.0)
    goodput.first_tick(1, 0.0)
    goodput.ticks(1, 11)  # ten ticks after the first, one second each
    goodput.ticks(1, 7)
    goodput.ticks(2, 99)  # of another generation
    goodput.end(10.0)
    goodput.lost(4)
    assert goodput.share(10.0) == pytest.approx(0.6)


def test_the_present_generation_counts_up_to_now() -> None:
    goodput = Goodput(0.0)
    goodput.first_tick(1, 5.0)
    assert goodput.share(10.0) == pytest.approx(0.5)


def test_a_planned_end_is_that_of_the_first_worker_that_leaves_however_late_the_next_world_comes() -> None:
    goodput = Goodput(0.0)
    goodput.first_tick(1, 2.0)
    goodput.left(1, 6.0)
    goodput.left(1, 6.5)
    goodput.end(9.0)  # the end of the next world
    assert goodput.share(10.0) == pytest.approx(0.4)
    goodput.first_tick(2, 9.0)
    goodput.left(1, 9.5)  # a late report
    assert goodput.share(10.0) == pytest.approx(0.5)
