"""Goodput, computed from hand-made times."""

from __future__ import annotations

import pytest

from elasticstate.core.goodput import Goodput


def test_a_job_without_ticks_has_none() -> None:
    assert Goodput().share(10.0, 10.0) is None


def test_boot_and_downtime_do_not_count() -> None:
    goodput = Goodput().with_first_tick(1, 4.0).with_end(9, 8.0).with_first_tick(2, 9.0).with_end(2, 10.0)
    assert goodput.share(10.0, 10.0) == pytest.approx(0.5)


def test_only_the_first_worker_begins_a_generation() -> None:
    goodput = Goodput().with_first_tick(1, 1.0).with_first_tick(1, 3.0).with_end(3, 5.0)
    assert goodput.share(5.0, 5.0) == pytest.approx(0.8)


def test_redone_ticks_do_not_count() -> None:
    goodput = Goodput().with_first_tick(1, 0.0).with_end(11, 10.0)  # ten ticks after the first, one second each
    assert goodput.with_redone(4).share(10.0, 10.0) == pytest.approx(0.6)
    assert goodput.with_redone(40).share(10.0, 10.0) == 0


def test_ticks_before_a_reattach_do_not_count_as_its_ticks() -> None:
    goodput = Goodput().with_first_tick(3, 0.0, ticks=101).with_end(111, 10.0)
    assert goodput.tick_s == pytest.approx(1.0)


def test_the_present_generation_counts_up_to_now() -> None:
    assert Goodput().with_first_tick(1, 5.0).share(10.0, 10.0) == pytest.approx(0.5)


def test_only_the_first_end_of_a_generation_counts() -> None:
    goodput = Goodput().with_first_tick(1, 2.0).with_end(5, 6.0).with_end(5, 6.5)
    assert goodput.share(10.0, 10.0) == pytest.approx(0.4)
