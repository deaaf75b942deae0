"""A job on several hosts survives minutes of all faults, one every three seconds."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.plan import KINDS, MOST_AFFLICTED, make_plan, tally
from tests.chaos.run import Chaos
from tests.chaos.strikes import Strikes
from tests.multihost.network import missing

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


def packet_filter() -> str:
    """This machine's own: the hosts have theirs."""
    return subprocess.run(["iptables", "-S"], capture_output=True, text=True, check=True).stdout


def namespaces() -> set[int]:
    """The network namespaces that processes are in."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            found.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
    return found


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_minutes_of_chaos(tmp_path: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> None:
    rules = packet_filter()
    chaos = Chaos(tmp_path, pytestconfig.getoption("--chaos-seed"), pytestconfig.getoption("--chaos-minutes"))
    with capsys.disabled():
        print(f"\n{chaos.again}")
    chaos.run()
    assert packet_filter() == rules
    assert not chaos.namespaces & namespaces(), "a host is left"
    with capsys.disabled():
        print(chaos.report())
