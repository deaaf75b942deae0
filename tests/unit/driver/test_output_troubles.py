"""Outputs that cannot be written: the warnings, and the entries in the event file and the status."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from elasticstate.core.ids import WorkerId
from elasticstate.driver.job import JobState
from elasticstate.driver.output import OutputTroubles
from elasticstate.driver.report import Journal, Report
from elasticstate.net.messages import OutputTrouble
from tests.kit.core import POLICY

FULL = "No space left on device"


def test_the_same_trouble_on_many_hosts_is_one_warning_and_one_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = Report("j", str(tmp_path / "events"), verbose=False)
    outputs = OutputTroubles(report, Journal(report, JobState(POLICY, 0.0)))
    logs = "--log-dir /logs"
    for host in "abc":
        outputs.update(host, OutputTrouble(logs, FULL, (), 0))
    outputs.update("a", OutputTrouble(logs, FULL, (), 5))
    assert re.fullmatch(
        rf"host b: {logs}: {FULL}, for 0.\d s; 0 bytes dropped; output above a limit is dropped",
        min(outputs.lines(), key=lambda line: "host b" not in line),
    )
    outputs.forget("c")  # the host is lost
    for host, dropped_bytes in (("a", 5), ("b", 10)):
        outputs.update(host, OutputTrouble(logs, "", (), dropped_bytes))
    assert list(outputs.lines()) == []
    outputs.update("a", OutputTrouble("stdout", "not read", (), 0))
    outputs.update("a", OutputTrouble("stdout", "not read", (WorkerId("a", 3, 1),), 0))
    asyncio.run(report.close(60))
    assert capfd.readouterr().err.splitlines() == [
        f"elasticrun: warning: host a: {logs}: {FULL}; output above a limit is dropped",
        f"elasticrun: host b: {logs} can be written again; dropped 15 bytes",
        "elasticrun: warning: host a: stdout: not read; output above a limit is dropped",
        "elasticrun: warning: host a: stdout: not read; waiting workers: a:3. With --log-dir, no worker waits for the "
        "terminal",
    ]
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [(event["event"], event["host"]) for event in events] == [
        *(("output_blocked", host) for host in "abc"),
        *(("output_resumed", host) for host in "ab"),
        *(("output_blocked", "a"), ("output_blocked", "a")),
    ]
    assert events[-1]["workers"] == ["a:3#1"]
    assert (events[4]["output"], events[4]["dropped_bytes"]) == (logs, 10)
