"""Stalls: some ranks wait in a call of elasticstate.horovod, and another rank has not made it. In real jobs."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Job, Line

OPTIONS = ("-np", "3", "--min-np", "2", "--join-window", "60")
CHECK = ("--stall-check-time", "1")
OF_ALL = "allreduce(name='of all 3', op=Average) of float32[1]"
STEP = "a step of DistributedOptimizer(op=Average, compression=Unchanged, backward_passes_per_step=1)"


def start(directory: Path, where: str, *options: str) -> Job:
    script = [sys.executable, str(SCRIPTS / "horovod_stall.py"), "--log", str(directory / "logs")]
    return Job(directory, *OPTIONS, *options, command=[*script, "--where", *where.split()])


def release(job: Job, where: str = "all") -> None:
    """Let the late rank make its call."""
    (job.logs / f"go-{where}").touch()


def order(job: Job) -> list[str]:
    """Return the events that tell the course of a stall."""
    told = {"stall", "stall_ended", "end", "world_formed"}
    return [e["event"] for e in job.events() if e["event"] in told or (e["event"] == "worker_exited" and e["signal"])]


def status(job: Job) -> str:
    name = job.wait_for_event("job_started")["job"]
    command = [sys.executable, "-m", "elasticstate", "status", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def check_stall(stall: Line, call: str, waiting: list[int], missing: list[int]) -> None:
    assert (stall["call"], stall["waiting"], stall["missing"]) == (call, waiting, missing)
    assert stall["generation"] == 1
    assert 1.0 <= stall["seconds"] < 60.0


CALLS = {  # the call in which the others wait, and the last one of the missing rank
    "first": ("the first call, which makes groups", "no call in this world reported"),
    "all": (OF_ALL, "last call allreduce(name='of all 2'"),
    "step": (STEP, "last call allreduce(name='of all 3'"),
}


@pytest.mark.parametrize(("where", "backend"), [("first all step", "gloo"), ("all", "mpi")])
def test_each_stall_is_reported_once_and_so_is_its_end(tmp_path: Path, where: str, backend: str) -> None:
    with start(tmp_path, where, *CHECK, "--backend", backend) as job:
        for count, place in enumerate(where.split(), 1):
            call, last = CALLS[place]
            stall = job.wait_for_event("stall", count)
            check_stall(stall, call, [0, 1], [2])
            assert stall["who"].startswith("localhost:2#1 (rank 2): ")
            assert last in stall["who"]
            assert f"ranks 0, 1 in {call}; missing: localhost:2#1 (rank 2): " in status(job)
            release(job, place)
            ended = job.wait_for_event("stall_ended", count)
            assert (ended["call"], ended["reason"]) == (call, "the call has ended")
            assert ended["seconds"] > stall["seconds"]
        job.finish(0)
        assert order(job) == ["world_formed", *["stall", "stall_ended"] * count]
        reported = r"stall: ranks 0, 1 have waited for up to [\d.]+ s in .*; missing: localhost:2#1"
        assert len(re.findall(reported, job.output)) == count
        assert job.output.count("stall ended after") == count


def test_only_members_of_a_process_set_are_missing_in_its_calls(tmp_path: Path) -> None:
    """Rank 1 is late. Rank 0 waits for it in a call of both; rank 2, which is not in the set, in a call of all."""
    with start(tmp_path, "set", *CHECK) as job:
        job.wait_for_event("stall", 2)
        stalls = {stall["call"]: stall for stall in job.events("stall")}
        of_pair = "allreduce(name='of pair 3', op=Average) of float32[1]"
        check_stall(stalls[of_pair], of_pair, [0], [1])
        check_stall(stalls[OF_ALL], OF_ALL, [2], [0, 1])
        assert f"localhost:0#1 (rank 0): waits in {of_pair}" in stalls[OF_ALL]["who"]
        release(job, "set")
        job.wait_for_event("stall_ended", 2)
        job.finish(0)
        assert len(job.events("stall")) == 2


def test_the_death_of_the_missing_rank_ends_the_stall_and_the_others_continue(tmp_path: Path) -> None:
    with start(tmp_path, "all", *CHECK) as job:
        check_stall(job.wait_for_event("stall"), OF_ALL, [0, 1], [2])
        job.kill(2)
        ended = job.wait_for_event("stall_ended")
        assert (ended["reason"], ended["generation"]) == ("generation 1 has ended", 1)
        job.finish(0)
        course = order(job)
        death = course.index("worker_exited")  # or the others report the broken generation first
        assert course[:2] == ["world_formed", "stall"]
        assert 2 <= death < course.index("world_formed", 1)
        course.remove("worker_exited")
        assert course[2:5] == ["end", "stall_ended", "world_formed"]
        assert len(job.events("stall")) == 1
        assert {line["step"] for line in job.log("final")} == {6}


def test_horovods_variables_report_a_stall_and_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "1")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "4")
    with start(tmp_path, "all") as job:
        job.finish(1)
        check_stall(*job.events("stall"), OF_ALL, [0, 1], [2])
        (ended,) = job.events("stall_ended")
        assert ended["reason"] == "--stall-shutdown-time"
        assert ended["seconds"] >= 4.0
        (cause,) = job.events("root_cause")
        assert cause["rank"] == 2
        assert f"{OF_ALL} was not made on all ranks within --stall-shutdown-time of 4 s" in cause["reason"]
        assert "missing: localhost:2#1 (rank 2)" in cause["reason"]


def test_nothing_is_reported_without_the_check(tmp_path: Path) -> None:
    with start(tmp_path, "all", "--no-stall-check") as job:
        job.wait_for("the late rank", lambda: list(job.logs.glob("late-*")))
        reported_at = time.monotonic() + 3.0  # with a check of 1 s, the report comes after 2 s
        job.wait_for("time for a report", lambda: time.monotonic() > reported_at)
        assert "stall for " not in status(job)
        release(job)
        job.finish(0)
        assert order(job) == ["world_formed"]


def test_a_new_driver_reports_a_stall_that_began_before_it(tmp_path: Path) -> None:
    name = f"stall-{uuid.uuid4().hex[:8]}"
    with start(tmp_path, "all", *CHECK, "--job-name", name) as job:
        job.wait_for_event("stall")
        job.kill_driver()
        job.start(*job.arguments)
        job.wait_for_event("driver_restarted")
        again = job.wait_for_event("stall", 2)
        check_stall(again, OF_ALL, [0, 1], [2])
        assert again["seconds"] > job.events("stall")[0]["seconds"], "the wait counts from its begin"
        release(job)
        job.wait_for_event("stall_ended")
        job.finish(0)
        assert order(job) == ["world_formed", "stall", "stall", "stall_ended"]


def test_the_hang_time_out_replaces_the_missing_worker_after_the_report(tmp_path: Path) -> None:
    with start(tmp_path, "all", *CHECK, "--hang-timeout", "8") as job:
        job.wait_for_event("stall")
        assert job.wait_for_event("worker_unresponsive")["worker"] == "localhost:2#1"
        job.finish(0)
        course = [event for event in order(job) if event != "worker_exited"]  # the others may be done before it ends
        assert course[:5] == ["world_formed", "stall", "end", "stall_ended", "world_formed"]
        assert {line["step"] for line in job.log("final")} == {6}
