"""Bugs of the reference, numbered as in the reports of its users. Each test here fails with that behaviour.

Numbers 2 to 5 (a newcomer's optimizer state, its learning rate, the sampler after a removal, in-place changes of lists)
are in ``tests/unit/state``; 7b (cooldown against min-np) is in ``tests/simulation``; 7c, 8 and 9a (below min-np after a
removal, a second failure in the recovery, an early exit with 0) are in ``test_survival.py``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.kit.job import Hosts, Job

FAST = ("--join-window", "1", "--min-interrupt-distance", "0.2")


def first(folder: Path, line: str) -> list[str]:
    """Return the begin of a command that runs a line before the script. ``worker``: the name of the worker."""
    path = folder / "first.py"
    lines = ("import os, runpy, sys", 'worker = os.environ["ELASTICSTATE_WORKER"]', line)
    path.write_text("\n".join((*lines, "sys.argv = sys.argv[2:]", 'runpy.run_path(sys.argv[0], run_name="__main__")')))
    return [sys.executable, str(path)]


def test_1_a_joiner_holds_the_synced_state_before_its_first_commit(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1")
    stop = tmp_path / "stop"
    fault = ["kill@backward:rank=0:generation=2"]  # the only old worker, before the first commit of generation 2
    with Job(tmp_path, "-np", "1", *hosts.options, *FAST, steps=10, until=stop, fault=fault, commit_every=3) as job:
        job.wait_for_step(12)
        hosts.set("localhost:2")
        job.wait_for_event("worker_exited", signal=9)
        job.wait_for_event("world_formed", generation=3)
        stop.touch()
        job.finish(0)
        job.check_survival(faults=1)
        second = [e for e in job.log("enter") if e["generation"] == 2]
        third = [e for e in job.log("enter") if e["generation"] == 3]
        assert job.events("world_formed")[1]["size"] == 2
        assert second, "the newcomer may still read the state from the memory of the host when the old worker dies"
        assert {(e["step"], e["digest"]) for e in third} == {(e["step"], e["digest"]) for e in second}
        assert second[0]["step"] >= 12


def test_6_no_notice_of_hosts_is_lost_while_the_job_boots_regroups_or_changes_twice_in_a_second(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1")
    with Job(tmp_path, "-np", "1", *hosts.options, *FAST, steps=10, until=tmp_path / "stop") as job:
        job.wait_for_event("worker_started")
        hosts.set("localhost:1", "127.0.0.2:1")  # before a worker has registered
        job.wait_for_event("host_added", host="127.0.0.2")
        job.wait_for_event("world_formed", size=2)
        hosts.set("localhost:2", "127.0.0.2:1")
        hosts.set("localhost:2", "127.0.0.2:1", "127.0.0.3:1")  # two changes within a discovery interval
        job.wait_for_event("hold")
        hosts.set("localhost:2", "127.0.0.3:1")  # during an interrupt
        job.wait_for_event("host_removed", host="127.0.0.2")
        worlds = len(job.events("world_formed"))
        os.kill(job.pid_of(0), signal.SIGKILL)
        hosts.set("localhost:1", "127.0.0.3:1")  # during a recovery
        job.wait_for(
            "world of the last answer of discovery",
            lambda: (
                job.events("world_formed")[worlds:]
                and (job.events("world_formed")[-1]["size"], _hosts_of_last_world(job)) == (2, 2)
            ),
        )
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()


def _hosts_of_last_world(job: Job) -> int:
    hosts: int = job.events("world_formed")[-1]["hosts"]
    removed = {e["host"] for e in job.events("host_removed")}
    return hosts if "127.0.0.2" in removed else 0


def test_7_a_newcomer_that_never_gets_ready_blocks_nobody(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    silent = first(tmp_path, 'if worker.startswith("127.0.0.2:"): os.execlp("sleep", "sleep", "1000")')
    options = ("-np", "2", *hosts.options, *FAST, "--stop-timeout", "1")
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", before=silent) as job:
        job.wait_for_step(5)
        hosts.set("localhost:3", "127.0.0.2:1")
        job.wait_for_event("worker_started", host="127.0.0.2")
        job.wait_for_event("world_formed", size=3)  # the other newcomer is admitted without it
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()


def test_9_one_bad_slot_does_not_cost_the_host(tmp_path: Path) -> None:
    bad = first(tmp_path, 'if ":1:" in worker: sys.exit(7)')
    with Job(tmp_path, "-np", "3", "--min-np", "2", *FAST, steps=30, before=bad) as job:
        job.finish(0)
        job.check_survival()
        assert job.events("world_formed")[0]["size"] == 2
        assert job.events("worker_exited")[0]["exit_code"] == 7
