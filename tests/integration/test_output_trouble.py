"""Jobs whose output nobody reads, or that have none: real driver, real agents, plain commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.kit.elasticrun import running

LINES = 30_000
NOISY = f"for _ in range({LINES}): print('x' * 99)"


def status_of(name: str) -> str:
    command = [sys.executable, "-m", "elasticstate", "status", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def test_a_terminal_that_is_not_read_is_reported_with_the_workers_that_wait_for_it(tmp_path: Path) -> None:
    """No output of the workers is lost: without --log-dir, no file has it."""
    with running(tmp_path, "-np", "2", sys.executable, "-c", NOISY) as job:
        workers = ["localhost:0#1", "localhost:1#1"]
        job.wait(
            lambda: any(sorted(e["workers"]) == workers for e in job.events("output_blocked")), "both workers waiting"
        )
        event = job.events("output_blocked")[-1]
        assert (event["host"], event["output"], event["reason"]) == ("localhost", "stdout", "not read")
        started = max(event["time"] for event in job.events("worker_started"))
        assert event["time"] - started < 10
        shown = status_of(job.name)
        assert "output that cannot be written:\n  host localhost: stdout: not read, for" in shown
        assert "waiting workers: localhost:0, localhost:1. With --log-dir, no worker waits for the terminal" in shown
        status, stdout, stderr = job.end()
    assert status == 0
    for slot in (0, 1):
        assert stdout.count(f"[localhost:{slot}] {'x' * 99}\n") == LINES
    assert "warning: host localhost: stdout: not read; " in stderr


def test_log_files_have_what_a_terminal_that_is_not_read_lacks(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "2", "--log-dir", "logs", sys.executable, "-c", NOISY) as job:
        job.wait(lambda: len(job.events("worker_exited")) == 2, "the ends of both workers")
        _, stdout, stderr = job.end()
    for slot in (0, 1):
        assert (tmp_path / "logs" / f"localhost-{slot}.out").read_text().count("x" * 99 + "\n") == LINES
    assert stdout.count("\n") < 2 * LINES
    blocked = job.events("output_blocked")
    assert {(event["output"], len(event["workers"])) for event in blocked} == {("stdout", 0)}
    assert "warning: host localhost: stdout: " in stderr


def test_a_job_without_stderr_runs_as_any_other(tmp_path: Path) -> None:
    """No socket of the driver or of an agent may get the descriptor number of stderr."""
    events = tmp_path / "events"
    command = [sys.executable, "-m", "elasticstate", "--events-file", str(events), "-np", "2", "--"]
    script = "import sys; print('one', flush=True); print('two', file=sys.stderr)"
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command, sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[localhost:0] one", "[localhost:1] one"]
    names = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    assert names.count("worker_started") == 2, "nobody was restarted"


def test_full_terminals_end_nothing(tmp_path: Path) -> None:
    """Every write of driver and agent to the terminal fails."""
    events = tmp_path / "events"
    command = [sys.executable, "-m", "elasticstate", "--events-file", str(events), "-np", "1", "--"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*command, "sh", "-c", f"echo one; echo two >&2; touch {tmp_path}/done"],
            stdout=full,
            stderr=full,
            timeout=60,
        )
    assert done.returncode == 0
    assert os.path.exists(tmp_path / "done")
    assert json.loads(events.read_text().splitlines()[-1])["event"] == "job_finished"


def test_a_job_ends_although_nobody_reads_what_it_says(tmp_path: Path) -> None:
    """The job loses the last lines that nobody reads within --stop-timeout."""
    options = ["-np", "1", "--stop-timeout", "0.5", "--log-dir", "logs"]
    with running(tmp_path, *options, "sh", "-c", "head -c 300000 /dev/zero | tr '\\0' '\\n' >&2") as job:
        began = time.monotonic()
        assert job.process.wait(30) == 0
        assert time.monotonic() - began < 20
        assert job.events("job_finished")
        job.end()
