"""Scripts in Horovod's style that go on after the training: metrics, another elastic function, another init()."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Hosts, Job

OPTIONS = ("-np", "3", "--min-np", "2", "--join-window", "60")


def script(log: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "horovod_after.py"), "--log", str(log), *arguments]


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_collectives_after_a_training_with_a_failure(tmp_path: Path, backend: str) -> None:
    """Rank 0 ends after the others have ended."""
    last = tmp_path / "last"
    command = script(tmp_path / "logs", "--dies-at", "3", "--exits-last", str(last))
    with Job(tmp_path, *OPTIONS, "--backend", backend, command=command) as job:
        size = job.wait_for("the end of the training", lambda: job.log("trained"))[0]["size"]
        ended = job.wait_for("the last collective", lambda: len(job.log("last")) == size and job.log("last"))
        for line in ended:
            if line["rank"] > 0:
                job.wait_for_event("worker_exited", pid=line["pid"], exit_code=0)
        last.touch()
        job.finish(0)
    assert job.events("worker_exited")[0]["signal"] == 9
    assert {line["generation"] > 1 for line in job.log("trained")} == {True}
    assert [line["rank"] for line in job.log("alone")] == [0]


def test_a_failure_after_the_training_is_an_error_on_the_others(tmp_path: Path) -> None:
    command = script(tmp_path / "logs", "--dies-after")
    with Job(tmp_path, *OPTIONS, command=command) as job:
        job.finish(1)
    # The agent may learn of the others' ends first: they fail within milliseconds. The root cause is the first death.
    assert [event["signal"] for event in job.events("worker_exited")].count(9) == 1
    failed = job.log("failed")
    assert {line["rank"] for line in failed} == {0, 2}
    for line in failed:
        assert line["error"].startswith("a worker has failed after the training, where no other world is made: ")
    assert "SIGKILL" in job.output.splitlines()[-2]
    assert len(job.events("world_formed")) == 1


def test_a_script_without_run_shuts_down_and_begins_again(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "2", command=script(tmp_path / "logs", "--inelastic")) as job:
        job.finish(0)
    assert len(job.log("last")) == 2


def test_a_state_learns_of_a_planned_change(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    (tmp_path / "train.py").write_text(
        "import time, torch, elasticstate.horovod as hvd\n"
        "hvd.init()\n"
        "class Told(hvd.elastic.ObjectState):\n"
        "    def on_hosts_updated(self, timestamp, update_res):\n"
        "        assert abs(timestamp - time.time()) < 5\n"
        "        print('hosts', update_res, flush=True)\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    while hvd.size() == 2:\n"
        "        time.sleep(0.01)\n"
        "        state.commit()\n"
        "train(Told(step=0))\n"
    )
    options = ("-np", "2", "--min-np", "2", "--max-np", "3", "--join-window", "60", *hosts.options)
    with Job(tmp_path, *options, command=[sys.executable, str(tmp_path / "train.py")]) as job:
        job.wait_for_event("world_formed")
        hosts.set("localhost:3")
        job.finish(0)
        assert job.output.count("hosts 3") == 2


def test_alone() -> None:
    program = (
        "import torch, elasticstate.horovod as hvd\n"
        "hvd.init()\n"
        "assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1]\n"
        "state = hvd.elastic.TorchState(step=0)\n"
        "train = hvd.elastic.run(lambda state: hvd.size())\n"
        "assert train(state) == 1\n"
        "assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1]\n"
        "assert train(hvd.elastic.TorchState(step=1)) == 1\n"
        "hvd.shutdown()\n"
        "hvd.init()\n"
        "assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
