"""Newcomers that a shell starts: neither the template process nor the others notice what the shell does."""

from __future__ import annotations

import re
from pathlib import Path

from tests.kit.job import Hosts, Job

FAST = ("--join-window", "30", "--min-interrupt-distance", "0.5")


def test_a_newcomer_knows_before_it_is_ready_how_much_a_commit_takes(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1")
    told = ["sh", "-c", 'echo "room for $ELASTICSTATE_RESERVE_BYTES bytes"; exec "$@"', "sh"]
    options = ("-np", "1", *hosts.options, *FAST)
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", before=told) as job:
        job.wait_for_step(10)
        hosts.set("localhost:2")
        joined = job.wait_for_event("sync", generation=2)
        job.wait_for_event("training_resumed")
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()
        assert len(job.events("world_formed")) >= 2
        room = max(int(said) for said in re.findall(r"room for (\d+) bytes", job.output))
        assert room >= 0.9 * joined["bytes"]


def test_newcomers_that_crash_while_importing_disturb_nobody(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    options = ("-np", "2", "--min-np", "1", *hosts.options, *FAST)
    crash = 'case "$ELASTICSTATE_WORKER" in 127.0.0.2:*) exec "$1" -c "import no_such_module";; esac; exec "$@"'
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", before=["sh", "-c", crash, "sh"]) as job:
        job.wait_for_step(10)
        hosts.set("localhost:2", "127.0.0.2:1")
        job.wait_for_event("worker_exited", 2, host="127.0.0.2", exit_code=1)
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()
        assert len(job.events("world_formed")) == 1
        assert "No module named 'no_such_module'" in job.output
