"""A real sharded job on two hosts, as people see it: status, Prometheus, dashboard and report in a real browser."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from elasticstate.cli import main
from tests.kit.browser import NO_CHROMIUM, WHY as WHY_NOT, opened, soon, url_of
from tests.kit.durable_job import saved, wait_for_copies
from tests.kit.job import Job, Line
from tests.kit.prometheus import PROMETHEUS, WHY, Prometheus, each_panel_has_data, page_of
from tests.kit.sharded_job import ATTACHING, attached

pytestmark = [
    pytest.mark.skipif(NO_CHROMIUM, reason=WHY_NOT),
    pytest.mark.skipif(PROMETHEUS is None, reason=WHY),
]

RATE = 2 << 20
SHARD_BYTES = 1024 * 1024 * 2  # of float32 in one of two shards


def test_line_replicas_memory_and_bandwidth_of_a_sharded_job_are_shown(tmp_path: Path) -> None:
    changes = (("torch.nn.Linear(2, 4)", "torch.nn.Linear(1024, 1024)"), ("state.commit()", "state.commit(every=100)"))
    script = ATTACHING
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "logs")]
    name = f"shards-{uuid.uuid4().hex[:8]}"
    hosts = ("-np", "2", "--min-np", "1", "-H", "localhost:1 rack=left,127.0.0.2:1 rack=right")
    shown = ("--dashboard", "0", "--metrics", "0", "--job-name", name)
    place = tmp_path / "durable"
    copies = ("--replica-rate", "2M", "--durable-dir", str(place), "--durable-interval", "2")
    copies += ("--driver-timeout", "3")  # for as long, the last commit is tried to be saved again
    begin, errors = time.monotonic(), list[str]()
    with Job(tmp_path, *hosts, *shown, *copies, command=command) as job:
        first = attached(job, 1, 2)
        shards = replicated_twice(job, name, begin)
        assert shards["memory"].keys() == {"localhost", "127.0.0.2"}
        assert all(memory >= 2 * SHARD_BYTES for memory in shards["memory"].values()), "its own shard and the other"
        assert shards["memory_bytes"] == sum(shards["memory"].values())
        with Prometheus(tmp_path / "prometheus", page_of(job).split("/")[2]) as prometheus:
            prometheus.wait_for("two scrapes", lambda: prometheus.value("rate(elasticstate_ticks_total[1m])"))
            each_panel_has_data(prometheus, sharded=True)
            sent = prometheus.value("elasticstate_replication_sent_bytes_total")
            assert sent is not None
            assert sent >= shards["sent_bytes"]
            assert "ElasticstateReplicaIsTooOld" not in prometheus.firing()
        with opened(url_of(job), errors) as page:
            the_page_shows_the_copies(page)
            os.kill(first[1]["pid"], signal.SIGSTOP)  # the survivor's world begins after --heartbeat-timeout
            os.kill(first[1]["pid"], signal.SIGKILL)
            soon(page.get_by_role("region", name="Commits"), re.compile(r"commit line\([2-9]\d*, \d+\)"))
        wait_for_copies(job, 1)
        place.rename(tmp_path / "lost")
        place.touch()
        job.wait_for("a durable copy that fails", lambda: failed_copies(job))
        job.process.send_signal(signal.SIGINT)
        job.finish(130)
    the_report_has_the_copies(job, tmp_path / "report.html", errors)
    assert not errors


def failed_copies(job: Job) -> list[Line]:
    return [event for event in job.events("durable_copy") if event["state"] == "failed"]


def the_report_has_the_copies(job: Job, path: Path, errors: list[str]) -> None:
    """Compare the report with the events of the job, and look at it."""
    replications = job.events("replication")
    assert sum(event["replicated"] for event in replications) >= 2
    assert sum(event["bytes"] for event in replications) >= 4 * SHARD_BYTES
    for event in replications:
        assert event["bytes"] <= 2 * RATE * 12, "two hosts, in ten seconds and what the report before has left"
        assert event["age_s"] > 0
        assert event["memory_bytes"] > 0
    (first, *_) = (tuple(event["commit"]) for event in replications)
    assert first[0] == 1
    assert main(["report", str(job.events_file), "-o", str(path)]) == 0
    with opened(path.as_uri(), errors) as page:
        expect(page.get_by_role("heading", name="Copies", exact=True)).to_be_visible()
        counts = f"{sum(e['replicated'] for e in replications)}, {sum(e['failed'] for e in replications)} failed"
        summary = page.get_by_role("region", name="Summary")
        expect(summary.get_by_role("row", name="replications")).to_contain_text(counts)
        counts = f"{len(saved(job))} saved, {len(failed_copies(job))} failed"
        expect(summary.get_by_role("row", name="durable copies")).to_contain_text(counts)
        for title, text in {
            "Age of the newest replicated commit": rf"at most {max(e['age_s'] for e in replications):.3g} s",
            "Bandwidth of replication": r"[\d.]+ MB sent from host to host; up to [\d.]+ MB of memory for copies",
            "Time to save a durable copy": rf"{len(saved(job))} saved in .* s; {len(failed_copies(job))} failed",
            "Size of durable copies": r"[\d.]+ MB in all, the newest [\d.]+ MB",
        }.items():
            figure = page.get_by_role("figure").filter(has=page.get_by_role("heading", name=title))
            expect(figure).to_contain_text(re.compile(text))
            expect(figure.get_by_role("img")).to_be_visible()
        failures = page.get_by_role("region", name="Copies that failed")
        reasons = {}  # of the last failure of those that differ by the folder alone
        for event in failed_copies(job):
            reason = event["reason"].partition("; next attempt")[0]
            reasons[event["kind"], reason.replace(str(event["folder"]), "")] = reason
        for (kind, _), reason in reasons.items():
            expect(failures).to_contain_text(re.compile(rf"durable copy\s*{kind}"))
            expect(failures).to_contain_text(reason)
        screenshots(page, "report")


def replicated_twice(job: Job, name: str, begin: float) -> dict[str, Any]:
    """Wait until two commits have been replicated. Check the rate all the time. Return the last overview."""
    seen: set[tuple[int, ...]] = set()

    def look() -> dict[str, Any] | None:
        status = [sys.executable, "-m", "elasticstate", "status", name, "--json"]
        shards: dict[str, Any] | None = json.loads(subprocess.check_output(status))["shards"]
        if shards is None:
            return None
        elapsed_s = time.monotonic() - begin
        assert shards["sent_bytes"] <= 2 * RATE * (elapsed_s + 0.05), "two hosts, and the bytes of 0.05 s at once"
        seen.add(tuple(shards["replicated"] or ()))
        return shards if len(seen - {()}) >= 2 and shards["sent_bytes"] >= 4 * SHARD_BYTES else None

    found: dict[str, Any] = job.wait_for("two replicated commits", look)
    text = subprocess.check_output([sys.executable, "-m", "elasticstate", "status", name], text=True)
    assert re.search(r"^commit line \(1, \d+\), [\d.]+ s old; replicated on 1 other host: \(1, \d+\), ", text, re.M), (
        text
    )
    assert re.search(
        r"^  \d+ copies, [\d.]+ MB of memory on 2 hosts; sent from host to host: [\d.]+ MB/s, ", text, re.M
    )
    return found


def the_page_shows_the_copies(page: Page) -> None:
    commits = page.get_by_role("region", name="Commits")
    for text in (
        r"commit line\(1, \d+\)[\d.]+ s ago",
        r"replicated commit\(1, \d+\)[\d.]+ s ago, on 1 other host",
        r"replication(\d of 4 copiesof \(1, \d+\), for [\d.]+ s|complete)",
        r"memory of copies[\d.]+ MB\d copies on 2 hosts, at most [\d.]+ MB on one",
        r"sent between hosts[\d.]+ [kM]B/s[\d.]+ MB in all",
    ):
        soon(commits, re.compile(text))
    soon(commits, re.compile(r"newest durable copy\(1, \d+\)[\d.]+ s ago, [\d.]+ MB"))
    expect(page.get_by_role("list", name="Troubles with copies")).to_be_hidden()
    for host, rack in (("localhost", "left"), ("127.0.0.2", "right")):
        soon(page.get_by_role("grid").get_by_role("rowheader").filter(has_text=host), f"joined, rack {rack}")
    commits.get_by_text("Memory of copies by host").focus()
    page.keyboard.press("Enter")
    table = commits.get_by_role("table")
    expect(table.get_by_role("row")).to_have_count(3)
    soon(table.get_by_role("row", name="127.0.0.2"), re.compile(r"127\.0\.0\.2right[\d.]+ MB"))
    screenshots(page, "shards")


def screenshots(page: Page, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.screenshot(path=f"{folder}/{name}-{scheme}.png", full_page=True)
