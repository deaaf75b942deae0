"""Each example runs under elasticrun and with plain python, and gives the result that it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.kit import forks
from tests.kit.forks import Started
from tests.kit.job import Job

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ["custom_state.py", "lr_scaling.py", "stream.py", "uneven.py"]
IMPORTED = ("sklearn.datasets", "sklearn.model_selection", "torchdata.stateful_dataloader")  # take two seconds


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


def test_the_smallest_example_runs_in_two_workers_and_alone() -> None:
    """All processes are new ones, as those of users are."""
    assert run(sys.executable, "-m", "elasticstate", "-np", "2", sys.executable, EXAMPLES / "minimal.py").strip()
    assert run(sys.executable, EXAMPLES / "minimal.py").strip()


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_runs_in_two_workers_and_alone(tmp_path: Path, script: str) -> None:
    template = forks.template(*IMPORTED)
    with Job(tmp_path, "-np", "2", imported=IMPORTED, command=[sys.executable, str(EXAMPLES / script)]) as job:
        job.finish(timeout=240)
    status, alone, error = Started(template, tmp_path / script, [EXAMPLES / script]).finish(240)
    assert job.output.strip()
    assert status == 0, error[-3000:]
    assert alone.strip()


def test_the_sharded_gpt_learns(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "2", command=[sys.executable, str(EXAMPLES / "fsdp.py"), "--steps", "60"]) as job:
        job.finish(timeout=240)
    losses = re.findall(r"step (\d+): loss (\d+\.\d+) on 2 workers", job.output)
    assert [int(step) for step, _ in losses] == [20, 40, 60]
    assert float(losses[-1][1]) < 4.0, "a model that knows nothing has ln(128) = 4.85"


def test_digits_reaches_its_accuracy_alone(tmp_path: Path) -> None:
    started = Started(forks.template(*IMPORTED), tmp_path / "digits", [EXAMPLES / "digits.py", "--epochs", "12"])
    status, output, error = started.finish(240)
    assert status == 0, error[-3000:]
    accuracy = re.findall(r"accuracy[^0-9]*([01]\.\d+)", output)
    assert accuracy, output
    assert float(accuracy[-1]) >= 0.95


def test_the_job_of_readme_survives_a_killed_worker(tmp_path: Path) -> None:
    losses = tmp_path / "losses"
    command = [sys.executable, str(EXAMPLES / "gpt.py"), "--steps", "30", "--pace", "0.4", "--losses", str(losses)]
    with Job(tmp_path, "-np", "4", "--min-np", "2", command=command) as job:
        job.wait_for("a step", lambda: losses.exists() and losses.read_text())
        job.kill(2)
        lines = (
            r"generation 1: 4 workers on 1 host",
            r"localhost:\d \(rank 2\) ended: SIGKILL",
            r"generation 2: 3 workers on 1 host; lost: localhost:\d \(SIGKILL\); training resumed after [\d.]+ s",
            r"generation 3: 4 workers on 1 host; joined: localhost:\d; training resumed after [\d.]+ s",
        )
        job.finish()
        assert [line for line in lines if not re.search(line, job.output)] == []


def test_the_demo_survives_what_is_done_to_it() -> None:
    output = run(sys.executable, EXAMPLES / "demo.py")
    assert re.search(r"accuracy[^0-9]*0\.9[5-9]", output), output


def test_a_stream_goes_on_where_the_commit_stands(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "stream.py"), "--pace", "0.02"]
    with Job(tmp_path, "-np", "3", "--min-np", "2", imported=IMPORTED, command=command) as job:
        job.wait_for("some lines", lambda: " lines\n" in job.output)
        job.kill(1)
        job.finish(0)
        assert job.wait_for_event("worker_exited", signal=9)["rank"] == 1
        assert len(job.events("world_formed")) > 1
        trained, there = map(int, re.findall(r"(\d+) of (\d+) lines: loss", job.output)[-1])
        assert there - 3 < trained <= there


def test_diloco_learns_through_a_killed_worker(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "local_sgd.py"), "--steps", "80", "--fragments", "2"]
    with Job(tmp_path, "-np", "2", "--min-np", "1", command=[*command, "--pace", "0.01"]) as job:
        job.wait_for("50 steps", lambda: "step 50: " in job.output)
        job.kill(1)
        job.finish(0)
        assert job.wait_for_event("worker_exited", signal=9)["rank"] == 1
        assert len(job.events("world_formed")) > 1
    (loss,) = re.findall(r"evaluation loss ([\d.]+)", job.output)
    assert float(loss) < 3.5, "a model that knows nothing has ln(128) = 4.85"


def test_the_port_from_torchft_survives_a_killed_worker(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "from_torchft.py"), "--steps", "200", "--pace", "0.01"]
    with Job(tmp_path, "-np", "3", "--min-np", "2", command=command) as job:
        job.wait_for("100 steps", lambda: "[100] loss = " in job.output)
        job.kill(0)
        job.finish(0)
        assert job.wait_for_event("worker_exited", signal=9)["rank"] == 0
        assert len(job.events("world_formed")) > 1
    (loss,) = re.findall(r"\] 200 steps: loss ([\d.]+)", job.output)
    assert float(loss) < 0.5


def test_the_port_from_ray_train_survives_a_killed_worker(tmp_path: Path) -> None:
    script = [sys.executable, EXAMPLES / "from_ray_train.py", "--epochs", "12", "--pace", "0.01"]
    with open(tmp_path / "output", "w") as file:
        process = subprocess.Popen(
            script,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        wait_for("an epoch", lambda: "epoch 1: " in (tmp_path / "output").read_text(), process)
        worker_of(process, "localhost:1").kill()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    output = (tmp_path / "output").read_text()
    assert "localhost:1 (rank 1) ended: SIGKILL" in output
    epochs = [int(epoch) for epoch in re.findall(r"epoch (\d+): ", output)]
    assert sorted(set(epochs)) == list(range(12)), output
    assert epochs == sorted(epochs), "the end of an epoch may be printed twice, but no epoch is trained again"
    (accuracy,) = re.findall(r"workers: accuracy ([01]\.\d+)", output)
    assert float(accuracy) > 0.9


def wait_for(what: str, condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"the job has ended before {what}"
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)


def worker_of(process: subprocess.Popen[bytes], slot_id: str) -> psutil.Process:
    """Return the process of the worker in a slot (host:slot)."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.environ().get("ELASTICSTATE_WORKER", "").startswith(f"{slot_id}:"):
                return child
    raise AssertionError(f"no worker runs in {slot_id}")


def test_the_discovery_script_prints_its_hosts_file(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    assert run(EXAMPLES / "discover.sh", HOSTS_FILE=str(hosts)) == "localhost:2\n"
