"""The commit line of a sharded job, through real workers, agents and drivers."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path

import pytest

from tests.kit.job import Job
from tests.kit.sharded_job import ATTACHING, attached


@pytest.fixture
def name() -> str:
    return f"line-{uuid.uuid4().hex[:8]}"


def test_each_world_starts_from_the_line_also_with_a_new_driver(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text(ATTACHING)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "logs")]
    hosts = (
        "-np",
        "2",
        "--min-np",
        "1",
        "-H",
        "localhost:1,127.0.0.2:1",
        "--join-window",
        "30",
        "--min-interrupt-distance",
        "0.2",
    )
    with Job(tmp_path, *hosts, "--replicas", "0", "--job-name", name, command=command) as job:
        first = attached(job, 1, 2)
        assert [line["line"] for line in first] == [None, None]
        os.kill(first[1]["pid"], signal.SIGKILL)
        alone = attached(job, 2, 1)[0]
        assert alone["line"][0] == 1, "a commit of the first world"
        assert {host for _, host, *_ in alone["sources"]} == {"localhost", "127.0.0.2"}
        assert len({digest for digest, *_ in alone["sources"]}) == 2
        assert all(source[3] == alone["line"] for source in alone["sources"])
        both = attached(job, 3, 2)
        assert both[0]["line"] == both[1]["line"]
        assert both[0]["line"][0] == 2
        assert len(both[0]["sources"]) == 1, "one slot has all shards of a world of one"
        job.kill_driver()
        os.kill(both[1]["pid"], signal.SIGKILL)
        job.start("--reattach", name)
        job.wait_for_event("driver_restarted")
        again = attached(job, 4, 1)[0]
        assert again["line"][0] == 3, "a commit of the world before"
        assert len({digest for digest, *_ in again["sources"]}) == 2
        job.process.send_signal(signal.SIGINT)
        job.finish(130)
