"""Whole jobs of plain commands and of workers without torch: real driver, real agents, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.kit.elasticrun import running, started
from tests.kit.processes import has_ended

STUBBORN = ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"]
QUICK = ["--driver-timeout", "0.5", "--stop-timeout", "0.5", "--cooldown-range", "0", "0"]


def rewrite(file: Path, text: str) -> None:
    """Replace the content of a file atomically: a driver reads it again and again."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(file)


# ------------------------------------------------------------------------------------------------------ the usual


def test_output_is_tagged_and_kept_apart(tmp_path: Path) -> None:
    script = "import sys; print('one'); print('two'); print('err', file=sys.stderr)"
    with running(tmp_path, "-np", "2", "--log-dir", "logs", sys.executable, "-c", script) as job:
        status, stdout, stderr = job.end()
    assert status == 0
    assert sorted(stdout.splitlines()) == [f"[localhost:{slot}] {word}" for slot in (0, 1) for word in ("one", "two")]
    assert {"[localhost:0] err", "[localhost:1] err"} <= set(stderr.splitlines())
    assert f"elasticrun: job {job.name} succeeded after" in stderr.splitlines()[-1]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        f"localhost-{slot}.{end}" for slot in (0, 1) for end in ("err", "out")
    ]
    assert (tmp_path / "logs" / "localhost-1.out").read_text().splitlines()[1:] == ["one", "two"]
    assert [event["status"] for event in job.events("job_finished")] == ["succeeded"]
    pids = [event["pid"] for event in job.events("worker_exited")]
    assert len(set(pids)) == 2
    assert all(pids)


def test_a_worker_finds_its_place_in_the_environment(tmp_path: Path) -> None:
    names = "ELASTICSTATE_WORKER ELASTICSTATE_JOB ELASTICSTATE_LOCAL_ADDRESS OMP_NUM_THREADS GRPC_VERBOSITY"
    script = f"import os; print([os.environ.get(name) for name in {names.split()}])"
    with running(tmp_path, "-np", "2", "-H", "localhost,127.0.0.2", sys.executable, "-c", script) as job:
        status, stdout, _ = job.end()
    assert status == 0
    assert sorted(stdout.splitlines()) == [
        f"[127.0.0.2:0] ['127.0.0.2:0:1', '{job.name}', '127.0.0.2', '1', None]",
        f"[localhost:0] ['localhost:0:1', '{job.name}', '127.0.0.1', '1', None]",
    ]


@pytest.mark.parametrize("hosts", [(), ("-H", "localhost:1")])
def test_a_misspelled_interface_of_the_only_host_is_an_error_at_once(hosts: tuple[str, ...], tmp_path: Path) -> None:
    with running(tmp_path, "-np", "1", *hosts, "--network-interface", "none0", "true") as job:
        status, _, stderr = job.end()
    assert status == 2
    (line,) = stderr.splitlines()
    assert line.startswith("elasticrun: --network-interface: 'none0': this host has no network interface 'none0'")


def test_discovery_that_fails_at_first_ends_the_job(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "1", "--host-discovery-script", "false", "true") as job:
        status, _, stderr = job.end()
    assert status == 1
    assert stderr.splitlines()[-2:] == [
        "elasticrun: root cause: the first call of host discovery failed",
        "elasticrun:   false exited with 1: no output on stderr",
    ]


def test_a_host_that_is_taken_away_is_left_and_comes_back(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n127.0.0.2:1\n")
    argv = ["-np", "2", "--hostfile", str(hosts), "--discovery-interval", "0.05", *QUICK, *STUBBORN]
    with running(tmp_path, *argv) as job:
        started(job, 2)
        rewrite(hosts, "localhost:1\n")
        job.wait_for("host_removed")
        job.wait(lambda: len(job.agents()) == 1, "the end of the agent of 127.0.0.2")
        rewrite(hosts, "localhost:1\n127.0.0.2:1\n")
        started(job, 2)
        assert [event["worker"] for event in job.events("worker_started")][2:] == [
            *("localhost:0#2", "127.0.0.2:0#2")
        ], "all workers restart together"
        job.process.terminate()
        assert job.end()[0] == 143
    assert job.events("agent_lost") == []


def test_status_and_sigusr1_tell_the_same(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "1", *QUICK, "sleep", "100") as job:
        started(job, 1)
        ask = [sys.executable, "-m", "elasticstate", "status", job.name]
        asked = subprocess.run(ask, capture_output=True, text=True, timeout=20)
        assert asked.returncode == 0, asked.stderr
        assert f"job {job.name}: WAITING" in asked.stdout
        assert "localhost:0 is booting for" in asked.stdout
        job.process.send_signal(signal.SIGUSR1)
        taken = subprocess.run(
            [sys.executable, "-m", "elasticstate", "--job-name", job.name, "-np", "1", "true"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert taken.returncode == 2
        assert "a job of this name is already running" in taken.stderr
        job.process.terminate()
        status, _, stderr = job.end()
    assert status == 143
    assert f"elasticrun: job {job.name}: WAITING" in stderr


def test_the_token_is_seen_in_no_list_of_processes(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "1", *QUICK, "sleep", "100") as job:
        workers = started(job, 1)
        runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
        token = json.loads((runtime / f"elasticstate-{os.getuid()}-{job.name}" / "driver.json").read_text())["token"]
        assert len(token) > 20
        for process in [psutil.Process(job.process.pid), *job.agents(), *workers]:
            assert token not in " ".join(process.cmdline())
            assert token not in process.environ().values()
        job.process.terminate()
        job.end()


# ---------------------------------------------------------------------------------------------- ends of all kinds


def test_ctrl_c_ends_with_130_and_a_second_one_kills_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "2", "--stop-timeout", "60", *STUBBORN) as job:
        workers = started(job, 2)
        job.process.send_signal(signal.SIGINT)
        assert job.process.stderr is not None
        line = ""
        while "SIGINT" not in line:
            line = job.process.stderr.readline()
            assert line, "the driver did not say that it stops"
        job.process.send_signal(signal.SIGINT)
        assert job.end()[0] == 130
        job.wait(lambda: all(map(has_ended, workers)), "the end of the workers")


def test_ctrl_c_reaches_only_the_driver(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole foreground group, so agents and workers must not be in it."""
    with running(tmp_path, "-np", "2", "sleep", "100") as job:
        workers = started(job, 2)
        group = os.getpgid(job.process.pid)
        assert all(os.getpgid(p.pid) != group for p in [*job.agents(), *workers])
        job.process.send_signal(signal.SIGINT)
        assert job.end()[0] == 130


def test_who_ignores_sigterm_is_killed_after_the_stop_timeout(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "2", "--stop-timeout", "0.3", *STUBBORN) as job:
        workers = started(job, 2)
        job.process.terminate()
        status, _, stderr = job.end()
        assert all(map(has_ended, workers))
    assert status == 143
    assert "was stopped by SIGTERM after" in stderr.splitlines()[-1]
    assert job.events("job_finished")[0]["status"] == "stopped"


def test_nothing_outlives_a_killed_driver(tmp_path: Path) -> None:
    """Agents and workers end within the driver timeout. After every test a fixture looks for left files, too."""
    with running(tmp_path, "-np", "2", "-H", "localhost,127.0.0.2", *QUICK, *STUBBORN) as job:
        workers, agents = started(job, 2), job.agents()
        job.process.kill()
        stderr = job.end()[2]  # waits for all processes that hold the pipe
        job.wait(lambda: all(map(has_ended, [*workers, *agents])), "the end of agents and workers")
    assert stderr.count("stopping the workers: no driver within --driver-timeout of 0.5 s") == 2


def test_the_workers_of_a_killed_agent_go_too_and_come_back(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "2", "-H", "localhost,127.0.0.2", *QUICK, *STUBBORN) as job:
        started(job, 2)
        agent = job.agents()[0]
        worker = agent.children()[0]
        agent.kill()
        lost = job.wait_for("agent_lost")
        assert [event["reason"] for event in lost] == ["was killed by SIGKILL"]
        job.wait(lambda: has_ended(worker), "the death of its worker")
        started(job, 2)
        assert len(job.events("worker_started")) == 4, "all workers restart"
        job.process.terminate()
        assert job.end()[0] == 143


def test_what_has_fled_the_session_ends_with_the_job(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    flee = f"setsid sh -c 'echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 100' & exec sleep 100"
    with running(tmp_path, "-np", "1", *QUICK, "sh", "-c", flee) as job:
        started(job, 1)
        job.wait(pid_file.exists, "the pid of the fugitive")
        fugitive = psutil.Process(int(pid_file.read_text()))
        job.process.terminate()
        assert job.end()[0] == 143
        job.wait(lambda: has_ended(fugitive), "the end of the fugitive")


def test_an_agent_that_stands_still_is_as_good_as_dead(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "1", "--heartbeat-timeout", "1", *QUICK, *STUBBORN) as job:
        worker = started(job, 1)[0]
        agent = job.agents()[0]
        at = time.time()
        agent.suspend()
        lost = job.wait_for("agent_lost")
        assert lost[0]["time"] - at > 0.8, "the time-out, less the time since its last heartbeat"
        assert [event["reason"] for event in lost] == ["sent no heartbeat for --heartbeat-timeout of 1 s"]
        job.wait(lambda: has_ended(worker) and has_ended(agent), "the death of both")
        job.process.terminate()
        assert job.end()[0] == 143


# --------------------------------------------------------------------------- workers that speak with their agent

SPEAK = """
import os, sys, time
from elasticstate._native import ControlPage
from elasticstate.options import worker_environment
from elasticstate.net import messages
from elasticstate.net.link import StorageLink, WorkerLink
told = worker_environment()
page = ControlPage(StorageLink(told.socket, told.worker).ask().page)
link = WorkerLink(told.socket)
link.connect()
link.send(messages.Hello(told.worker, os.getpid(), messages.PROTOCOL_VERSION))
def receive():
    while True:
        try:
            return link.receive()
        except BlockingIOError:
            page.heartbeat()
            time.sleep(0.02)
print("up", flush=True)
"""


def test_a_worker_that_falls_silent_is_killed(tmp_path: Path) -> None:
    argv = ["-np", "1", "--heartbeat-timeout", "3", "--reset-limit", "0"]
    with running(tmp_path, *argv, sys.executable, "-c", SPEAK + "time.sleep(100)") as job:
        assert job.end()[0] == 1
    unresponsive = job.events("worker_unresponsive")
    assert [event["reason"] for event in unresponsive] == ["no heartbeat for --heartbeat-timeout of 3 s"]
    assert [event["signal"] for event in job.events("worker_exited")] == [signal.SIGKILL]


def test_a_worker_that_hangs_is_killed(tmp_path: Path) -> None:
    script = SPEAK + "page.set_place(messages.Place.TRAIN)\nwhile True: page.heartbeat(); time.sleep(0.02)"
    argv = ["-np", "1", "--hang-timeout", "1", "--reset-limit", "0"]
    with running(tmp_path, *argv, sys.executable, "-c", script) as job:
        assert job.end()[0] == 1
    assert [event["reason"] for event in job.events("worker_unresponsive")] == ["no tick for --hang-timeout of 1 s"]


def test_the_error_that_a_worker_writes_down_is_the_root_cause(tmp_path: Path) -> None:
    script = SPEAK + (
        "import elasticstate\n"
        "for text in ('the first error', 'a later one'):\n"
        "    elasticstate.ErrorHandler().record_exception(ValueError(text), 1)\n"
        "sys.stderr.write('noise'); os._exit(5)"
    )
    with running(tmp_path, "-np", "1", "--reset-limit", "0", sys.executable, "-c", script) as job:
        status, _, stderr = job.end()
    assert status == 3
    assert stderr.splitlines()[-1] == "elasticrun:   ValueError: the first error"


def test_a_worker_that_speaks_is_asked_to_leave_and_not_sent_sigterm(tmp_path: Path) -> None:
    script = SPEAK + "print(type(receive()).__name__, flush=True); os._exit(0)"
    with running(tmp_path, "-np", "1", sys.executable, "-c", script) as job:
        assert job.process.stdout is not None
        assert job.process.stdout.readline() == "[localhost:0] up\n"
        job.process.terminate()
        status, stdout, _ = job.end()
    assert status == 143
    assert stdout == "[localhost:0] Leave\n"


def test_worlds_and_the_gate_reach_the_workers_and_their_words_the_core(tmp_path: Path) -> None:
    """A whole job without torch: READY, world, first tick, gate, exit."""
    script = SPEAK + (
        "link.send(messages.Ready(0, None, None, '127.0.0.1:9', 0, 0.0))\n"
        "world = receive()\n"
        "print(world.placement.rank, world.size, world.store, flush=True)\n"
        "link.send(messages.First(world.generation))\n"
        "link.send(messages.Synced(world.generation, 10, 0.5))\n"
        "time.sleep(0.1)\n"  # time of training: goodput is rounded
        "link.send(messages.Gate(world.generation))\n"
        "assert receive() == messages.OpenGate(world.generation)\n"
    )
    with running(tmp_path, "-np", "2", "-H", "localhost,127.0.0.2", sys.executable, "-c", script) as job:
        status, stdout, stderr = job.end()
    assert status == 0, stderr
    assert sorted(line for line in stdout.splitlines() if "up" not in line) == [
        "[127.0.0.2:0] 1 2 127.0.0.1:9",
        "[localhost:0] 0 2 127.0.0.1:9",
    ]
    assert "generation 1: 2 workers on 2 hosts" in stderr
    assert [event["size"] for event in job.events("world_formed")] == [2]
    assert [event["bytes"] for event in job.events("sync")] == [10, 10]
    finished = job.events("job_finished")[0]
    assert finished["generations"] == 1
    assert 0 < finished["goodput"] < 1


@pytest.mark.parametrize(("options", "number"), [((), 15), (("--preemption-signals", "XCPU,SIGUSR2"), 12)])
def test_a_signal_to_an_agent_drains_its_host_which_then_rests(
    tmp_path: Path, options: tuple[str, ...], number: int
) -> None:
    argv = ("-np", "2", "--min-np", "1", "-H", "localhost,127.0.0.2", *QUICK, "--cooldown-range", "0", "1.5", *options)
    with running(tmp_path, *argv, *STUBBORN) as job:
        started(job, 2)
        agent = job.agents()[0]
        agent.send_signal(number)
        job.wait(lambda: has_ended(agent), "the end of the agent")
        is_in_preemption_cooldown = job.wait_for("host_cooldown")[0]
        again = job.wait_for("agent_joined", 3)[2]
        job.process.terminate()
        assert job.end()[0] == 143
    reason = f"{signal.Signals(number).name} to its agent"
    host = again["host"]
    assert [(event["host"], event["reason"]) for event in job.events("host_draining")] == [(host, reason)]
    assert (
        is_in_preemption_cooldown["host"],
        is_in_preemption_cooldown["seconds"],
        is_in_preemption_cooldown["reason"],
    ) == (host, 1.5, f"preemption notice: {reason}")
    assert again["time"] - is_in_preemption_cooldown["time"] >= 1.4
    assert job.events("agent_lost") == []


def test_a_host_with_notice_is_used_at_once_if_the_job_needs_it(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "1", *QUICK, *STUBBORN) as job:
        started(job, 1)
        job.agents()[0].terminate()
        again = job.wait_for("agent_joined", 2)[1]
        started(job, 1)
        job.process.terminate()
        assert job.end()[0] == 143
    assert again["time"] - job.events("host_cooldown")[0]["time"] < 60, "the cooldown would last 600 s otherwise"


def test_a_notice_command_that_fails_is_warned_of_once(tmp_path: Path) -> None:
    """There is one warning for any number of hosts, and the job continues."""
    script = tmp_path / "notice"
    script.write_text(f"#!/bin/sh\necho $ELASTICSTATE_HOST >> {tmp_path}/asked\necho no service >&2\nexit 2\n")
    script.chmod(0o755)
    asked = tmp_path / "asked"
    asked.touch()
    options = ("--preemption-command", "./notice")
    with running(tmp_path, "-np", "2", "-H", "localhost,127.0.0.2", *QUICK, *options, "sleep", "100") as job:
        hosts = ("localhost", "127.0.0.2")
        job.wait(lambda: all(asked.read_text().split().count(host) > 1 for host in hosts), "calls on both hosts")
        job.wait_for("warning")
        job.process.terminate()
        assert job.end()[0] == 143
    said = "--preemption-command './notice' exited with 2: no service; it runs again every 5 s"
    (warning,) = job.events("warning")
    assert any(warning["text"].startswith(f"host {host}: {said}") for host in hosts), warning
    assert job.events("host_draining") == []
