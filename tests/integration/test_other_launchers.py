"""Scripts that another launcher has started: mpirun, srun and torchrun start one world, which never changes.

There is no Slurm here: its processes are started with the variables that srun sets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticstate.mpi.installation import AS_ROOT
from tests.kit.forks import Started, Template

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
MPIRUN = BIN / "mpirun"
LONGEST_S = 300.0
NEEDS_MPIRUN = pytest.mark.skipif(not MPIRUN.exists(), reason="needs mpirun: pip install 'elasticstate[mpi]'")
# Elasticstate's own names: the ranks begin with different states, commit, and compare the states at the end.
OWN = """
import json, sys, torch, elasticstate as elastic
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms.join import Join
rank = elastic.local_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(2, 1)
state = elastic.TorchState(model=model, optimizer=torch.optim.Adam(model.parameters()), step=7 * rank)
seen = []

@elastic.run
def train(state):
    seen.append((elastic.rank(), elastic.size(), elastic.cross_rank(), elastic.cross_size(), elastic.local_size()))
    ddp = DistributedDataParallel(state.model, init_sync=False)
    batches = 3 + elastic.rank()
    with Join([ddp, state]):
        for _ in range(batches):
            state.optimizer.zero_grad()
            ddp(torch.ones(1, 2)).sum().backward()
            state.optimizer.step()
            state.step += 1
            state.commit()
    state.check()
    newest = state.model.weight.detach().clone()
    with torch.no_grad():
        state.model.weight.zero_()
    state.restore()
    assert torch.equal(state.model.weight, newest)
    return state.step, newest.tolist(), str(state.commits[0])

step, weight, commit = train(state)
# One write a line: torchrun's workers are unbuffered and write into one pipe, and print() writes the end separately.
sys.stdout.write(json.dumps({"place": seen, "step": step, "weight": weight, "commit": commit}) + "\\n")
"""


def environment(directory: Path, **variables: str) -> dict[str, str]:
    """Return an environment without another launcher, and with a directory for the records of this test."""
    return {**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(directory), **variables}


def call(command: list[object], directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        env=environment(directory, **variables),
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The script OWN in a file."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@contextmanager
def tasks_of_srun(
    template: Template, directory: Path, count: int, *command: object, nodes: int = 1
) -> Iterator[list[Started]]:
    """Start the tasks of a step as srun does: equally many on each of the nodes 127.0.0.1, 127.0.0.2, ..."""
    step = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": f"127.0.0.[1-{nodes}]" if nodes > 1 else "127.0.0.1",
    }
    tasks = []
    for rank in range(count):
        node, local_rank = divmod(rank, count // nodes)
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": local_rank, "SLURMD_NODENAME": f"127.0.0.{node + 1}"}
        variables = step | {name: str(value) for name, value in own.items()}
        output = directory.parent / f"task-{rank}"
        tasks.append(Started(template, output, command, environment(directory, **variables)))
    try:
        yield tasks
    finally:
        for task in tasks:
            task.kill()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def check_own(found: list[dict[str, Any]], places: list[tuple[int, int, int, int, int]]) -> None:
    """Check the lines of OWN: all ranks begin with the state of rank 0, and end with that of the last rank."""
    assert sorted(tuple(line["place"][0]) for line in found) == places
    assert all(len(line["place"]) == 1 for line in found)
    assert {line["step"] for line in found} == {3 + len(places) - 1}
    assert len({str(line["weight"]) for line in found}) == 1


def logged(log: Path, what: str) -> list[dict[str, Any]]:
    return [line for path in log.glob("*.jsonl") for line in lines(path.read_text()) if line["what"] == what]


def nothing_is_left(directory: Path) -> None:
    assert not list(directory.glob("elasticstate-*"))


@NEEDS_MPIRUN
@pytest.mark.parametrize("kind", ["elastic", pytest.param("inelastic", marks=pytest.mark.long)])
def test_mpirun_starts_one_world_for_a_horovod_script(tmp_path: Path, kind: str) -> None:
    (tmp_path / "stop").touch()
    options = ["--inelastic"] if kind == "inelastic" else ["--stop", tmp_path / "stop"]
    script = [SCRIPTS / "horovod_style.py", "--log", tmp_path, *options]
    done = call([MPIRUN, "--oversubscribe", "-np", "2", sys.executable, *script], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    finals = logged(tmp_path, "final")
    assert sorted((line["rank"], line["size"]) for line in finals) == [(0, 2), (1, 2)]
    assert len({line["digest"] for line in finals}) == 1
    assert done.stderr.count("has started this world of 2 workers") == (kind == "elastic")
    nothing_is_left(tmp_path)


@NEEDS_MPIRUN
def test_mpirun_starts_one_world_for_run(tmp_path: Path) -> None:
    done = call([MPIRUN, "--oversubscribe", "-np", "2", sys.executable, "-c", OWN], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    check_own(lines(done.stdout), [(rank, 2, 0, 1, 2) for rank in range(2)])
    assert done.stderr.count("mpirun has started this world of 2 workers. It never changes") == 1
    nothing_is_left(tmp_path)


@NEEDS_MPIRUN
@pytest.mark.long
def test_processes_of_mpirun_on_several_hosts_meet_by_mpi(tmp_path: Path) -> None:
    """Each process believes that it is alone on its host."""
    command = [MPIRUN, "--oversubscribe", "-np", "2", "env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", sys.executable, "-c", OWN]
    done = call(command, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    check_own(lines(done.stdout), [(rank, 2, 0, 1, 2) for rank in range(2)])


@NEEDS_MPIRUN
def test_an_error_of_a_rank_ends_a_world_that_meets_by_mpi(tmp_path: Path) -> None:
    program = (
        "import torch, elasticstate.horovod as hvd\n"
        "hvd.init()\n"
        "if hvd.rank() == 1: raise ValueError('too bad')\n"
        "hvd.allreduce(torch.ones(1))\n"
    )
    command = [MPIRUN, "--oversubscribe", "-np", "2", "env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", sys.executable]
    done = call([*command, "-c", program], tmp_path)
    assert done.returncode != 0
    assert "ValueError: too bad" in done.stderr


def test_torchrun_starts_one_world_for_run(tmp_path: Path, own: Path) -> None:
    done = call([BIN / "torchrun", "--standalone", "--nproc-per-node", "2", own], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    check_own(lines(done.stdout), [(rank, 2, 0, 1, 2) for rank in range(2)])
    assert done.stderr.count("torchrun has started this world of 2 workers") == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_srun_starts_one_world(template: Template, tmp_path: Path, own: Path, nodes: int) -> None:
    records = tmp_path / "records"
    records.mkdir()
    with tasks_of_srun(template, records, 2, own, nodes=nodes) as tasks:
        ends = [task.finish(LONGEST_S) for task in tasks]
    assert [status for status, _, _ in ends] == [0, 0], ends
    found = [line for _, printed, _ in ends for line in lines(printed)]
    places = [(0, 2, 0, 1, 2), (1, 2, 0, 1, 2)] if nodes == 1 else [(0, 2, 0, 2, 1), (1, 2, 1, 2, 1)]
    check_own(found, places)
    nothing_is_left(records)


def test_the_loss_of_a_rank_ends_the_world_with_an_error_that_names_elasticrun(
    template: Template, tmp_path: Path
) -> None:
    script = [SCRIPTS / "horovod_style.py", "--log", tmp_path, "--dies-at", "3", "--stop", tmp_path / "never"]
    with tasks_of_srun(template, tmp_path, 2, *script) as tasks:
        status, _, error = tasks[0].finish(LONGEST_S)
        assert tasks[1].finish(LONGEST_S)[0] == -signal.SIGKILL
    assert status == 1
    assert "CollectiveError: a worker of this world was lost" in error
    assert "Start the script with elasticrun to continue after losses." in error


def test_the_loss_of_a_rank_without_run_raises_in_the_others(template: Template, tmp_path: Path) -> None:
    script = tmp_path / "loss.py"
    script.write_text(
        "import os, signal, torch, elasticstate.horovod as hvd\n"
        "hvd.init()\n"
        "own = [os.environ[f'HOROVOD_{name}'] for name in ('RANK', 'SIZE', 'LOCAL_RANK', 'HOSTNAME')]\n"
        "assert own == [str(hvd.rank()), '2', str(hvd.rank()), '127.0.0.1'], own\n"
        "assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2\n"
        "if hvd.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "try: hvd.allreduce(torch.ones(1))\n"
        "except RuntimeError: print('lost', flush=True)\n"
    )
    with tasks_of_srun(template, tmp_path, 2, script) as tasks:
        _, printed, error = tasks[0].finish(LONGEST_S)
        assert tasks[1].finish(LONGEST_S)[0] == -signal.SIGKILL
    assert printed == "lost\n"
    assert "the world failed before all workers reached its end: a worker of this world was lost" in error


def test_processes_without_a_place_are_refused(template: Template, tmp_path: Path, own: Path) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("HOROVOD_SIZE", "2"), ("PMI_SIZE", "2")):
        started = Started(template, tmp_path / name, [own], environment(tmp_path, **{name: value}))
        status, _, error = started.finish(LONGEST_S)
        assert status == 1
        assert f"UsageError: {name}=2: " in error
        assert "Start the script with 'elasticrun -np 2 python ...'" in error


def test_a_directory_that_is_missing_is_an_error_on_all_ranks(template: Template, tmp_path: Path, own: Path) -> None:
    with tasks_of_srun(template, tmp_path / "missing", 2, own) as tasks:
        ends = [task.finish(LONGEST_S) for task in tasks]
    assert [status for status, _, _ in ends] == [1, 1]
    assert all("OptionError: XDG_RUNTIME_DIR" in error for _, _, error in ends), ends


@NEEDS_MPIRUN
def test_a_commit_outside_run_does_not_train_worlds_of_one(tmp_path: Path) -> None:
    """Refused, except in a script that makes its own process group."""
    program = (
        "import elasticstate, torch.distributed as dist\n"
        "state = elasticstate.ObjectState(step=0)\n"
        "try:\n    state.commit()\n"
        "except elasticstate.UsageError as error:\n    print(f'error: {error}', flush=True)\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "state.commit()\nprint('committed', flush=True)\n"
    )
    done = call([MPIRUN, "--oversubscribe", "-np", "2", sys.executable, "-c", program], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = sorted(done.stdout.splitlines())
    assert printed[:2] == ["committed"] * 2
    assert len(printed) == 4
    assert all(line.startswith("error: OMPI_COMM_WORLD_SIZE=2: another launcher has started") for line in printed[2:])
