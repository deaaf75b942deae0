"""elasticstate.horovod in real jobs: its results on three ranks, and scripts in Horovod's style."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.kit.forks import elasticrun
from tests.kit.job import SCRIPTS, Job

EXAMPLE = Path(__file__).parents[2] / "examples" / "horovod_style.py"
SOURCES = [
    (SCRIPTS / name).read_text()
    for name in (
        "horovod_checks.py",
        "horovod_join_checks.py",
        "horovod_mismatch_checks.py",
        "horovod_name_checks.py",
        "horovod_optimizer_checks.py",
        "horovod_sparse_checks.py",
    )
]
CHECKS = re.findall(r"^def (check_\w+)", "\n".join(SOURCES), re.MULTILINE)
OPTIONS = (
    "-np",
    "3",
    "--min-np",
    "2",
    "--join-window",
    "60",
    "--min-interrupt-distance",
    "0.2",
)


def script(name: str, log: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / name), "--log", str(log), *arguments]


@pytest.fixture(scope="module")
def checked(runtime_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], str]:
    """Run the checks. Return the checks that passed on each rank, and the output of the job."""
    folder = tmp_path_factory.mktemp("checks")
    with Job(folder, "-np", "3", command=script("horovod_checks.py", folder / "logs")) as job:
        job.wait_for("end", lambda: job.process.poll() is not None)
        passed = [(folder / "logs" / f"{rank}.txt").read_text().split() for rank in range(3)]
        return passed, f"status {job.process.returncode}:\n{job.output[-6000:]}"


@pytest.mark.parametrize("check", CHECKS)
def test_on_three_ranks(checked: tuple[list[list[str]], str], check: str) -> None:
    passed, output = checked
    assert all(check in names for names in passed), output


def test_a_job_without_elastic_run_ends_well(checked: tuple[list[list[str]], str], tmp_path: Path) -> None:
    assert checked[1].startswith("status 0:"), checked[1]
    with Job(tmp_path, "-np", "2", command=script("horovod_style.py", tmp_path / "logs", "--inelastic")) as job:
        job.finish(0)
        assert len({line["digest"] for line in job.log("start")}) == 2, "each rank has had weights of its own"
        finals = job.log("final")
        assert len(finals) == 2
        assert len({line["digest"] for line in finals}) == 1
        assert len(job.events("world_formed")) == 1
        assert job.events("job_finished")[0]["status"] == "succeeded"


def test_an_elastic_script_survives_a_death_inside_backward_and_takes_the_worker_back(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    arguments = ("--stop", str(stop), "--dies-at", "11")
    with Job(tmp_path, *OPTIONS, command=script("horovod_style.py", tmp_path / "logs", *arguments)) as job:
        assert job.wait_for_event("worker_exited", signal=9)["rank"] == 1
        assert job.wait_for_event("world_formed", size=2)["generation"] == 2
        joined = job.wait_for_event("world_formed", 2, size=3)["generation"]
        whole = job.wait_for("an epoch in a world of three again", lambda: whole_epochs(job, joined))
        job.wait_for("half of the first loss", lambda: has_learnt(job))
        stop.touch()
        job.finish(0)
    finals = job.log("final")
    assert len(finals) == 3
    assert len({line["digest"] for line in finals}) == 1
    for line in job.log("enter"):
        assert line["lr"] == pytest.approx(0.01 * line["size"])
    by_generation: dict[int, set[str]] = {}
    for line in job.log("enter"):
        by_generation.setdefault(line["generation"], set()).add(line["digest"])
    assert all(len(digests) == 1 for generation, digests in by_generation.items() if generation > 1)
    epochs = job.log("epoch")
    assert {line["epoch"] for line in epochs} == set(range(max(line["epoch"] for line in epochs) + 1))
    for line in epochs:
        seen = line["seen"]
        if line["epoch"] in whole:
            assert set(seen) == {1}, f"epoch {line['epoch']}: {seen}"
        else:  # a world that changes in mid-epoch may distribute the rest unevenly
            assert min(seen) == 1
            assert sum(seen) <= len(seen) + 4


def has_learnt(job: Job) -> bool:
    losses = [line["loss"] for line in job.log("epoch")]
    return min(losses) < losses[0] / 2


def whole_epochs(job: Job, generation: int) -> set[int]:
    """Return the epochs that began and ended in this generation or a later one."""
    first = [line["epoch"] for line in job.log("enter") if line["generation"] == generation]
    return {line["epoch"] for line in job.log("epoch") if first and line["epoch"] > max(first)}


def check_joins(job: Job) -> None:
    """Check that all ranks have the same weights after each join of each world, and at the end."""
    finals = job.log("final")
    assert len({line["digest"] for line in finals}) == 1
    joined: dict[tuple[int, int], list[str]] = {}
    for line in job.log("joined"):
        joined.setdefault((line["generation"], line["epoch"]), []).append(line["digest"])
    assert all(len(set(digests)) == 1 for digests in joined.values())
    epochs = {epoch for _, epoch in joined}
    assert epochs == set(range(1, max(epochs) + 1))
    assert max(epochs) >= 6


def test_models_that_become_unlike_end_the_job_with_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    """The models differ after steps that were correct. Some ranks detect it after they have begun to send gradients."""
    program = (
        "import torch, elasticstate.horovod as hvd\n"
        "hvd.init()\n"
        "weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights[:1], lr=0.25))\n"
        "state = hvd.elastic.TorchState(optimizer=optimizer, first=weights[0], second=weights[1], step=0)\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    for state.step in range(state.step, 5):\n"
        "        if state.step == 3 and hvd.rank() == 1:\n"
        "            optimizer.add_param_group({'params': weights[1:]})\n"
        "        optimizer.zero_grad()\n"
        "        sum(weights).sum().backward()\n"
        "        optimizer.step()\n"
        "        assert weights[0].tolist() == [0.75 - 0.25 * state.step] * 2\n"
        "        state.commit()\n"
        "train(state)\n"
    )
    (tmp_path / "script.py").write_text(program)
    with Job(tmp_path, "-np", "2", command=[sys.executable, str(tmp_path / "script.py")]) as job:
        job.finish(3)
        message = (
            "CallUsageError: the ranks do not make the same call: rank 0: a step of "
            "DistributedOptimizer(op=Average, compression=Unchanged, backward_passes_per_step=1) with nothing more; "
            "rank 1: a step of DistributedOptimizer(op=Average, compression=Unchanged, backward_passes_per_step=1) "
            "with parameter 1: float32[2]."
        )
        exits = job.events("worker_exited")
        ended = {event["worker"] for event in exits if message in event["error"]}
        assert ended == {"localhost:0#1", "localhost:1#1"}
        assert len(job.events("world_formed")) == 1


@pytest.mark.parametrize("whom", ["a joined rank", "a training rank"])
def test_a_death_while_some_have_joined_is_survived_and_a_newcomer_taken_in(tmp_path: Path, whom: str) -> None:
    with Job(tmp_path, *OPTIONS, command=script("horovod_join.py", tmp_path / "logs", "--kill", whom)) as job:
        job.finish(0)
        (strike,) = job.log("strikes")
        assert job.events("worker_exited")[0]["pid"] == strike["victim"]
        check_joins(job)
        assert [event["size"] for event in job.events("world_formed")][:3] == [3, 2, 3]
        assert {line["size"] for line in job.log("final")} == {3}


def test_a_planned_change_at_the_tick_of_a_join_interrupts_all_ranks(tmp_path: Path) -> None:
    """All ticks here are those of join(), with which ranks 0 and 1 receive the commit of rank 2."""
    program = (
        "import os, sys, torch, elasticstate.horovod as hvd\n"
        "hvd.init()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    while not hvd.allreduce(torch.tensor(float(os.path.exists(sys.argv[1])))):\n"
        "        for _ in range(1 + hvd.rank()):\n"
        "            optimizer.zero_grad()\n"
        "            model(torch.ones(1, 2)).sum().backward()\n"
        "            optimizer.step()\n"
        "        hvd.join()\n"
        "train(hvd.elastic.TorchState(model, optimizer))\n"
    )
    stop = tmp_path / "stop"
    (tmp_path / "script.py").write_text(program)
    command = [sys.executable, str(tmp_path / "script.py"), str(stop)]
    with Job(tmp_path, *OPTIONS, command=command) as job:
        job.wait_for_event("sync", 9)
        job.kill(2, number=signal.SIGTERM)
        assert job.wait_for_event("world_formed", 2)["left"] == ["localhost:2#1"]
        stop.touch()
        job.finish(0)
        ended = {event["worker"]: event["exit_code"] for event in job.events("worker_exited")}
        assert [ended[f"localhost:{slot}#1"] for slot in range(3)] == [0, 0, 0], job.output
        assert isinstance(job.events("end")[0]["at"], int)


def test_the_example_learns(tmp_path: Path) -> None:
    process = elasticrun(["-np", "2", sys.executable, str(EXAMPLE), "--epochs", "5"], tmp_path)
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 0, error[-3000:]
    assert float(re.findall(r"accuracy ([01]\.\d+)", printed)[-1]) > 0.85
