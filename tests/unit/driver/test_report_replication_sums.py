"""Events of replication, from states of the real core."""

from __future__ import annotations

from typing import Any

from elasticstate.core.types import CopyFigures, Shards
from elasticstate.driver.report import ReplicationSums
from elasticstate.driver.status import CopyTotals
from tests.kit.core import ALL_KEPT, NEWER, attach, drive


def test_an_event_sums_up_the_replications_of_ten_seconds() -> None:
    totals = CopyTotals()
    sums = ReplicationSums(Shards(), totals)
    m, _ = attach()  # the first replication begins at 1.1
    assert sums.look(m.shards, 1.1) is None
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')} + {NEWER}", m)
    assert sums.look(m.shards, 2.0) is None
    totals.update("a", CopyFigures(500, 900, 0), 2.5)
    m, _ = drive(f"5.0 {ALL_KEPT.format('1.5')}", m)
    assert sums.look(m.shards, 5.0) is None
    totals.update("b", CopyFigures(300, 100, 0), 5.5)
    assert sums.look(m.shards, 11.9) is None
    found = sums.look(m.shards, 12.0)
    assert found == {
        "commit": [1, 5],
        "age_s": 10.0,  # of commit (1, 5), since 2.0; (1, 0) was 3.9 s old when (1, 5) was replicated
        "replicated": 2,
        "failed": 0,
        "seconds": 3.9,
        "bytes": 1000,
        "memory_bytes": 800,
    }
    assert sums.look(m.shards, 99.0) is None, "nothing has ended since then"
    assert sums.rest(99.0) is None


def test_the_time_of_a_replication_in_progress_counts_as_its_bytes_do() -> None:
    totals = CopyTotals()
    m, _ = attach()
    sums = ReplicationSums(Shards(), totals)
    sums.look(m.shards, 1.1)
    m, _ = drive(f"2.1 {ALL_KEPT.format('1.0')} + {NEWER}", m)
    sums.look(m.shards, 2.1)
    totals.update("a", CopyFigures(500, 900, 0), 11.0)
    first = sums.rest(12.1)
    m, _ = drive(f"14.1 {ALL_KEPT.format('1.5')}", m)
    sums.look(m.shards, 14.1)
    totals.update("a", CopyFigures(500, 1000, 0), 14.5)
    second = sums.rest(15.0)
    assert first is not None
    assert second is not None
    assert [(found["replicated"], found["seconds"], found["bytes"]) for found in (first, second)] == [
        (1, 11.0, 900),
        (1, 2.0, 100),
    ]


def test_failures_are_counted_with_the_last_reason() -> None:
    m, _ = attach()
    sums = ReplicationSums(m.shards, CopyTotals())
    m, _ = drive("2.1 dropped b b:0 1.0 its disk burns", m)
    assert sums.look(m.shards, 2.1) is None
    found: dict[str, Any] | None = sums.rest(3.0)
    assert found is not None
    assert (found["commit"], found["age_s"], found["replicated"], found["failed"]) == (None, None, 0, 1)
    assert found["reason"] == "slot b:0 on host b: its disk burns"
    assert found["seconds"] == 1.0


def test_a_replication_may_end_and_the_next_one_fail_in_one_step() -> None:
    m, _ = attach()
    sums = ReplicationSums(m.shards, CopyTotals())
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')} + {NEWER}", m)
    sums.look(m.shards, 2.0)
    m, _ = drive("2.1 dropped b b:0 1.5 once", m)
    sums.look(m.shards, 2.1)
    found: dict[str, Any] | None = sums.rest(2.1)
    assert found is not None
    assert (found["replicated"], found["failed"], found["commit"]) == (1, 1, [1, 0])


def test_a_job_without_shards_has_no_event() -> None:
    sums = ReplicationSums(Shards(), CopyTotals())
    m, _ = drive("0.0 hosts a:2", np=2)
    assert sums.look(m.shards, 1000.0) is None
    assert sums.rest(1000.0) is None
