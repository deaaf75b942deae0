"""Overview of a sharded job, from states of the real core and figures of agents."""

from __future__ import annotations

import msgspec

from elasticstate.core.types import CopyFigures
from elasticstate.driver.status import CopyTotals, overview_of, shards_of
from tests.kit.core import ALL_KEPT, NEWER, RUNNING, attach, drive


def test_counters_of_an_agent_continue_after_a_lost_connection_and_begin_anew_with_another_agent() -> None:
    totals = CopyTotals()
    totals.update("a", CopyFigures(1000, 50, 7), 1.0)
    totals.update("b", CopyFigures(500, 0, 50), 1.0)
    totals.host_lost("a")
    assert (totals.sent_bytes, totals.received_bytes, totals.memory()) == (50, 57, {"b": 500})
    totals.update("a", CopyFigures(1000, 60, 7), 5.0)
    assert (totals.sent_bytes, totals.received_bytes) == (60, 57), "the same agent is back"
    totals.host_lost("a")
    totals.update("a", CopyFigures(200, 10, 0), 9.0)
    assert (totals.sent_bytes, totals.received_bytes) == (70, 57), "another agent"
    assert totals.memory() == {"a": 200, "b": 500}


def test_the_bandwidth_is_that_of_the_last_seconds() -> None:
    totals = CopyTotals()
    for second in range(30):
        totals.update("a", CopyFigures(10, min(second, 20) * 100, 0), float(second))
    assert totals.bytes_per_s(29.0) == 10.0
    assert totals.bytes_per_s(60.0) == 0.0, "no agent reports"
    totals = CopyTotals()
    totals.update("a", CopyFigures(10, 1000, 0), 1.0)
    assert totals.bytes_per_s(1.0) == 0.0, "no time has passed"
    for second in range(20):
        totals.update("a", CopyFigures(10, 1000 + 100 * second, 0), 1.0 + second)
    assert totals.bytes_per_s(20.0) == 100.0


def test_a_job_without_shards_has_no_such_overview() -> None:
    m, _ = drive(RUNNING)
    totals = CopyTotals()
    totals.update("a", CopyFigures(), 1.0)
    assert shards_of(m, 2.0, totals) is None
    assert overview_of("j", m, "", 2.0, None, totals)[0].shards is None


def test_the_status_shows_line_replica_memory_and_bandwidth() -> None:
    m, _ = attach()
    totals = CopyTotals()
    for second in range(5):
        for host in "abc":
            totals.update(host, CopyFigures(2_000_000, 1_000_000 * second, 1_000_000 * second), float(second))
    found = shards_of(m, 4.0, totals)
    assert found is not None
    assert list(found.lines()) == [
        "commit line (1, 0), 2.9 s old; replicated on 1 other host: no commit yet",
        "  in progress for 2.9 s: (1, 0), 0 of 6 copies",
        "  0 copies, 6.0 MB of memory on 3 hosts; sent from host to host: 3.0 MB/s, 12.0 MB in all",
    ]
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')} + {NEWER}", m)
    found = shards_of(m, 4.0, totals)
    assert found is not None
    assert list(found.lines()) == [
        "commit line (1, 5), 2.0 s old; replicated on 1 other host: (1, 0), 2.0 s old",
        "  in progress for 2.0 s: (1, 5), 0 of 6 copies",
        "  6 copies, 6.0 MB of memory on 3 hosts; sent from host to host: 3.0 MB/s, 12.0 MB in all",
    ]
    decoded = msgspec.json.decode(msgspec.json.encode(overview_of("j", m, "", 4.0, None, totals)[0]))["shards"]
    assert decoded["memory"] == {"a": 2_000_000, "b": 2_000_000, "c": 2_000_000}
    assert (decoded["memory_bytes"], decoded["sent_bytes"], decoded["bytes_per_s"]) == (6_000_000, 12_000_000, 3e6)
    assert decoded["replication"] == {"commit": [1, 5], "done": 0, "copies": 6, "since_s": 2.0}


def test_the_status_says_why_replicas_are_old_or_few() -> None:
    m, _ = attach()
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')} + {NEWER}\n2.1 dropped b b:0 1.5", m)
    found = shards_of(m, 2.2)
    assert found is not None
    assert found.trouble == "the last attempt to replicate failed"
    assert list(found.lines())[1] == "  the last attempt to replicate failed; the next one begins in 0.4 s"
    assert found.replication is None
    m, _ = drive("2.3 agent-lost c exited + agent-lost b exited", m)
    found = shards_of(m, 2.4)
    assert found is not None
    assert found.trouble == "there is no other host to keep copies"
    few, _ = attach(replicas=9)
    found = shards_of(few, 2.0)
    assert found is not None
    assert found.trouble == "copies need 9 other hosts, and only 2 can keep them"
    none, _ = attach(replicas=0)
    found = shards_of(none, 2.0)
    assert found is not None
    assert (found.replicas, found.trouble) == (0, "")
    assert list(found.lines()) == ["commit line (1, 0), 0.9 s old; no replicas"]
