"""Each example runs under elasticrun and with plain python, and gives the result that it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forks import Started, Template
from job import Job

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ["minimal.py", "custom_state.py", "lr_scaling.py", "stream.py", "uneven.py"]


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_runs_in_two_workers_and_alone(template: Template, tmp_path: Path, script: str) -> None:
    elastic = run(sys.executable, "-m", "elasticstate", "-np", "2", sys.executable, EXAMPLES / script)
    status, alone, error = Started(template, tmp_path / script, [EXAMPLES / script]).finish(240)
    assert elastic.strip()
    assert status == 0, error[-3000:]
    assert alone.strip()


def test_digits_reaches_its_accuracy_alone() -> None:
    output = run(sys.executable, EXAMPLES / "digits.py", "--epochs", "20")
    accuracy = re.findall(r"accuracy[^0-9]*([01]\.\d+)", output)
    assert accuracy, output
    assert float(accuracy[-1]) >= 0.95


def test_the_demo_survives_what_is_done_to_it() -> None:
    output = run(sys.executable, EXAMPLES / "demo.py")
    assert re.search(r"accuracy[^0-9]*0\.9[5-9]", output), output


def test_a_stream_goes_on_where_the_commit_stands(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "stream.py"), "--pace", "0.02"]
    with Job(tmp_path, "-np", "3", "--min-np", "2", command=command) as job:
        job.wait_for("some lines", lambda: " lines\n" in job.output)
        job.kill(1)
        job.finish(0)
        assert job.wait_for_event("worker_exited", signal=9)["rank"] == 1
        assert len(job.events("world_formed")) > 1
        trained, there = map(int, re.findall(r"(\d+) of (\d+) lines: loss", job.output)[-1])
        assert there - 3 < trained <= there


def test_the_discovery_script_prints_its_hosts_file(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    assert run(EXAMPLES / "discover.sh", HOSTS_FILE=str(hosts)) == "localhost:2\n"


@pytest.mark.parametrize("example", sorted(EXAMPLES.rglob("*")), ids=lambda path: path.name)
def test_an_example_is_read_in_a_minute(example: Path) -> None:
    if example.suffix in (".py", ".sh"):
        assert len(example.read_text(encoding="utf-8").splitlines()) < 80
