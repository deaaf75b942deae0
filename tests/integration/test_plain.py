"""Scripts for torchrun under elasticrun: they do not use ``run``, and all workers restart together."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.forks import PACKAGE, SCRIPTS
from tests.kit.job import Hosts, Job

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
EXAMPLE = PACKAGE / "examples" / "plain_ddp.py"


def plain(directory: Path, *options: str, **arguments: object) -> Job:
    """Start the script of the tests, which logs ``VARIABLES``."""
    arguments["variables"] = ",".join(VARIABLES)
    words = [part for name, value in arguments.items() for part in ("--" + name.replace("_", "-"), str(value))]
    words = [word for word in words if word != "True"]
    command = [sys.executable, str(SCRIPTS / "plain.py"), "--log", str(directory / "logs"), *words]
    return Job(directory, *options, command=command)


def environments(job: Job, restarts: int = 0) -> list[dict[str, str]]:
    begun = [line for line in job.log("begin") if line["restarts"] == restarts]
    return [line["environment"] for line in sorted(begun, key=lambda line: line["rank"])]


def pid_of(job: Job, rank: int) -> int:
    """Return the process that has this rank in the newest world that trains."""
    return int([line for line in job.log("enter") if line["rank"] == rank][-1]["pid"])


def trains(job: Job, restarts: int) -> Any:
    return job.wait_for(f"a step after {restarts} restarts", lambda: of(job, "step", restarts))


def of(job: Job, what: str, restarts: int) -> list[Any]:
    return [line for line in job.log(what) if line["restarts"] == restarts]


def check_variables(job: Job) -> None:
    """Check the variables of torchrun that the first workers have seen."""
    assert all(line["launched"] for line in job.log("begin"))
    for rank, found in enumerate(environments(job)):
        assert found["MASTER_PORT"].isdigit()
        assert found["TORCHELASTIC_ERROR_FILE"]
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "ROLE_WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "4",
            "TORCHELASTIC_RUN_ID": "plain-variables",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("template", ["--preload=", pytest.param("--preload=off", marks=pytest.mark.long)])
def test_after_a_kill_all_workers_restart_and_continue_from_the_snapshot(tmp_path: Path, template: str) -> None:
    options = ("-np", "2", "--job-name", "plain-variables", "--max-restarts", "4", "--start-timeout", "5", template)
    with plain(tmp_path, *options, steps=150, step_time=0.05) as job:
        job.wait_for("step 10", lambda: any(line["step"] >= 10 for line in job.log("step")))
        first = {line["pid"] for line in job.log("enter")}
        os.kill(pid_of(job, 1), signal.SIGKILL)
        assert trains(job, 1)[0]["step"] > 10
        line = "generation 2: 2 workers on 1 host; lost: "
        job.wait_for("the line of the new world", lambda: line in job.output)
        assert len(of(job, "step", 1)) < 100, "the line comes as the world begins, not as the job ends"
        job.finish()
    check_variables(job)
    assert "import torch anew" not in job.output
    second = {line["pid"] for line in of(job, "enter", 1)}
    assert len(first) == len(second) == 2
    assert not first & second, "all workers restart"
    killed = [e for e in job.events("worker_exited") if e["signal"] == signal.SIGKILL]
    assert [(e["rank"], e["generation"]) for e in killed][:1] == [(1, 1)]
    formed = [(e["generation"], e["size"], len(e["joined"])) for e in job.events("world_formed")]
    assert formed == [(1, 2, 2), (2, 2, 2)]
    assert job.events("job_finished")[0]["status"] == "succeeded"
    assert job.events("job_finished")[0]["failures"] == 1
    assert {line["step"] for line in job.log("final")} == {150}
    lasted = job.events("job_finished")[0]["time"] - job.events("job_started")[0]["time"]
    assert lasted > 5, "the job was longer than --start-timeout"
    assert {e["MASTER_PORT"] for e in environments(job, 0)} != {e["MASTER_PORT"] for e in environments(job, 1)}


def test_a_tutorial_script_survives_a_kill_and_a_hosts_leave_and_return(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1", "127.0.0.1:1")
    command = [sys.executable, str(EXAMPLE), "--epochs", "100000", "--snapshot", str(tmp_path / "snapshot.pt")]
    options = (*hosts.options, "-np", "2", "--min-np", "1", "--max-np", "2", "--start-timeout", "5")
    with Job(tmp_path, *options, "--min-interrupt-distance", "0.5", command=command) as job:
        job.wait_for("an epoch of two", lambda: "of 2 restarts 0" in job.output)
        job.kill(0)
        job.wait_for("an epoch after the kill", lambda: "of 2 restarts 1" in job.output)
        hosts.set("localhost:1")
        job.wait_for("an epoch of one", lambda: "of 1 restarts 1" in job.output)
        hosts.set("localhost:1", "127.0.0.1:1")
        formed = job.wait_for("a fourth world", lambda: job.events("world_formed")[3:])
        assert (formed[0]["size"], formed[0]["hosts"]) == (2, 2)
        lines = len(job.output.splitlines())
        job.wait_for("another epoch of two", lambda: "rank 1 of 2" in "".join(job.output.splitlines()[lines:]))
        job.process.send_signal(signal.SIGINT)
        job.finish(130)
    assert [e["size"] for e in job.events("world_formed")] == [2, 2, 1, 2]
    assert [e["cause"] for e in job.events("end")][1:] == [
        "127.0.0.1:0#2 drains: discovery removed host 127.0.0.1",
        "127.0.0.1:0 joins",
    ]
    assert job.events("job_finished")[0]["failures"] == 1


def test_workers_of_both_kinds_in_one_job_are_an_error(tmp_path: Path) -> None:
    with plain(tmp_path, "-np", "2", run_rank=1) as job:
        job.finish(3)
    (cause,) = job.events("root_cause")
    assert "init_process_group() was called outside run, although localhost:1#1 uses run. " in cause["reason"]


def test_an_error_of_the_script_restarts_all_up_to_the_limit_and_is_the_root_cause(tmp_path: Path) -> None:
    with plain(tmp_path, "-np", "2", "--max-restarts", "1", fail_rank=1, fail_always=True) as job:
        job.finish(3)
    (cause,) = job.events("root_cause")
    assert cause["reason"].startswith("reset limit: 2 worlds have failed, --reset-limit is 1; first failure:")
    assert (cause["worker"], cause["rank"], cause["exit_code"]) == ("localhost:1#2", 1, 1)
    assert "ValueError: the script's own error" in job.output
    assert [e["generation"] for e in job.events("world_formed")] == [1, 2]
    failed = [line for line in job.output.splitlines() if line.startswith("elasticrun: attempt")]
    what = "failed: localhost:1#{} exited with 1: ValueError: the script's own error"
    assert failed == [f"elasticrun: attempt {n} of 2 {what.format(n)}" for n in (1, 2)]


def test_a_member_that_finishes_early_is_awaited(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text(
        "import os, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndist.barrier()\nif dist.get_rank():\n    time.sleep(2)\n"
        "print('done', dist.get_rank(), flush=True)\nos._exit(0)\n"
    )
    with Job(tmp_path, "-np", "2", command=[sys.executable, str(script)]) as job:
        job.finish()
    assert "done 1" in job.output
    assert [e["exit_code"] for e in job.events("worker_exited")] == [0, 0]


def test_a_preempted_host_leaves_and_the_others_restart(tmp_path: Path) -> None:
    options = ("-H", "localhost:1,127.0.0.1:1", "-np", "2", "--min-np", "1")
    options += ("--join-window", "30")  # the first world has both, however late the second agent comes
    with plain(tmp_path, *options, steps=200, step_time=0.05) as job:
        trains(job, 0)
        agents = {e["host"]: e["pid"] for e in job.events("agent_joined")}
        os.kill(agents["127.0.0.1"], signal.SIGTERM)
        job.wait_for_event("host_draining", host="127.0.0.1")
        job.wait_for("a world of one", lambda: [e for e in job.log("enter") if e["size"] == 1])
        job.finish()
    assert [e["size"] for e in job.events("world_formed")] == [2, 1]
    assert job.events("job_finished")[0]["failures"] == 0
    assert {line["restarts"] for line in job.log("begin")} == {0}, "a planned change is no failure"


def test_a_new_driver_continues_a_job_of_plain_workers(tmp_path: Path) -> None:
    name = f"plain-{os.getpid()}"
    with plain(tmp_path, "-np", "2", "--job-name", name, steps=200, step_time=0.05) as job:
        trains(job, 0)
        job.wait_for_event("world_formed")  # a driver that is killed may leave no events of its last moments
        job.kill_driver()
        before = len(job.log("step"))
        job.start("--reattach", name)
        job.wait_for_event("driver_restarted")
        job.wait_for("more steps", lambda: len(job.log("step")) > before)
        assert len({line["pid"] for line in job.log("enter")}) == 2, "the same workers train"
        os.kill(pid_of(job, 0), signal.SIGKILL)
        trains(job, 1)
        job.finish()
    assert [e["generation"] for e in job.events("world_formed")] == [1, 2]


# That a new process ends so, too, is in unit/worker/test_gloo_rest.py.
@pytest.mark.parametrize("template", ["--preload=", pytest.param("--preload=off", marks=pytest.mark.long)])
def test_a_worker_ends_although_a_collective_is_in_flight_at_its_end(tmp_path: Path, template: str) -> None:
    """With torch 2.13 alone, such a process waits for itself for ever, or aborts."""
    command = [sys.executable, str(SCRIPTS / "in_flight.py")]
    with Job(tmp_path, "-np", "2", "--min-np", "2", "--max-restarts", "1", template, command=command) as job:
        job.finish(0, timeout=200)
    assert job.output.count("trained") in {2, 3}
    assert [e["exit_code"] for e in job.events("worker_exited")][-2:] == [0, 0]
    assert job.events("job_finished")[0]["failures"] == 1
