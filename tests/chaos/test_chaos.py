"""A job on several hosts survives all faults, one every three seconds."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.plan import KINDS, MOST_AFFLICTED, make_plan, tally
from tests.chaos.run import Chaos, check_no_tick_is_counted_twice, check_the_result
from tests.chaos.strikes import Strikes
from tests.kit.hosts import check_no_two_worlds
from tests.kit.job import Job, Line
from tests.kit.network import missing

HOSTS = 3


def test_the_same_seed_gives_the_same_plan() -> None:
    assert make_plan(7, 3, HOSTS) == make_plan(7, 3, HOSTS)
    assert make_plan(7, 3, HOSTS) != make_plan(8, 3, HOSTS)


@pytest.mark.parametrize("seed", range(50))
def test_three_minutes_have_all_kinds_and_leave_a_host(seed: int) -> None:
    plan = make_plan(seed, 3, HOSTS)
    assert all(tally(fault.kind for fault in plan).values())
    assert 180 / len(plan) < 2.9
    for fault in plan:
        assert fault.at_s + fault.lasts_s <= 180.01
        assert hasattr(Strikes, f"_{fault.kind}")
        lasting = [f for f in plan if KINDS[f.kind].hosts and f.at_s <= fault.at_s < f.at_s + f.lasts_s]
        afflicted = [host for f in lasting for host in f.targets]
        assert len(afflicted) == len(set(afflicted)) <= MOST_AFFLICTED


def ticks(*made: tuple[int, int, int]) -> list[Line]:
    """Make log lines from (generation, process id, step)."""
    return [
        {"what": "tick", "time": float(time), "generation": generation, "pid": pid, "step": step}
        for time, (generation, pid, step) in enumerate(made)
    ]


def test_the_observers_see_two_worlds_side_by_side_and_a_tick_that_counts_twice(tmp_path: Path) -> None:
    side_by_side = ticks((1, 7, 1), (2, 8, 1), (1, 7, 2), (1, 7, 3))
    job = Job(tmp_path, command=["false"])
    with job:
        (job.logs / "a-0-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in side_by_side))
        with pytest.raises(AssertionError, match="generation 1 went on beside a later one"):
            check_no_two_worlds(job, "tick")
    check_no_tick_is_counted_twice(side_by_side)
    with pytest.raises(AssertionError):
        check_no_tick_is_counted_twice(ticks((1, 7, 1), (1, 7, 2), (1, 7, 2)))


FINAL = {"step": 5, "total": 10, "epoch": 1, "items": 10, "consumed": 4, "seen": 14, "least": 1, "most": 2}


@pytest.mark.parametrize(("name", "value"), [("total", 14), ("seen", 18), ("least", 0), ("most", 3)])
def test_the_result_tells_of_a_step_or_an_item_that_counts_twice_or_not_at_all(name: str, value: int) -> None:
    check_the_result([FINAL])
    with pytest.raises(AssertionError):
        check_the_result([{**FINAL, name: value}])


def packet_filter() -> str:
    """Return the packet filter rules of this machine. Each test host has rules of its own."""
    return subprocess.run(["iptables", "-S"], capture_output=True, text=True, check=True).stdout


def namespaces() -> set[int]:
    """Return the network namespaces that contain processes of this run.

    Another run beside this one may have a namespace with the number of one that was removed here.
    """
    mark = f"\0ELASTICSTATE_TEST_RUN={os.getpid()}\0".encode()
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # the process has ended
            if mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                found.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
    return found


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_all_kinds_of_faults_at_one_job(
    tmp_path: Path,
    pytestconfig: pytest.Config,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    rules = packet_filter()
    chaos = Chaos(tmp_path, pytestconfig.getoption("--chaos-seed"), pytestconfig.getoption("--chaos-minutes"))
    with capsys.disabled():
        print(f"\n{chaos.again}")
    chaos.run()
    assert packet_filter() == rules
    assert not chaos.namespaces & namespaces(), "a host is left"
    record_property("report", chaos.report())
