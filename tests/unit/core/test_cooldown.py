"""The formulas of backoff and cooldown, by table."""

from __future__ import annotations

import pytest

from elasticstate.core.cooldown import JITTER, backoff_s, cooldown_s


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (7, 32), (8, 60), (9, 60), (10_000, 60)]
)
def test_a_slot_is_restarted_after_0_1_2_4_to_60_seconds(failures: int, seconds: float) -> None:
    assert backoff_s(failures) == seconds


@pytest.mark.parametrize(("count", "seconds"), [(0, 10), (1, 20), (2, 40), (5, 320), (6, 600), (10_000, 600)])
def test_a_cooldown_doubles_up_to_its_limit_with_a_small_jitter(count: int, seconds: float) -> None:
    for host in ("a", "b", "c"):
        assert seconds <= cooldown_s(host, count, 10.0, 600.0) <= seconds * (1 + JITTER)


def test_the_jitter_differs_by_host_and_is_the_same_every_time() -> None:
    hosts = [f"host{i}" for i in range(50)]
    first = [cooldown_s(host, 0, 10.0, 600.0) for host in hosts]
    assert len(set(first)) > 25
    assert first == [cooldown_s(host, 0, 10.0, 600.0) for host in hosts]
