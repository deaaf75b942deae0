"""The place of a process in the world of another launcher, read from the environment."""

from __future__ import annotations

import os

import pytest

from elasticstate.core.ids import WorkerId
from elasticstate.errors import UsageError
from elasticstate.options import LaunchedPlace, WorkerEnvironment, launched_place, refusal_of_other_launchers

WORKER = WorkerEnvironment("/s", "mark", WorkerId("localhost", 0, 1), "job", "id", "127.0.0.1", "/c", (), "gloo")
TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
SLURM = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
NODES = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURMD_NODENAME": "n2"}
LAUNCHERS = (
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "JSM_NAMESPACE_SIZE",
    "HOROVOD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "WORLD_SIZE",
)


def place(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> LaunchedPlace | None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI_COMM", "PMI", "MV2_", "JSM_", "HOROVOD_", "MASTER_", "ELASTICSTATE_SOCKET")):
            monkeypatch.delenv(name)
    for name in (*TORCH, "MPI_LOCALRANKID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return launched_place()


@pytest.mark.parametrize(
    ("variables", "launcher", "rank", "size", "local_rank"),
    [
        (TORCH, "torchrun", 3, 4, 1),
        (OPEN_MPI, "mpirun", 2, 3, 0),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_LOCAL_RANK": "1"}, "mpirun", 1, 2, 1),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}, "mpiexec", 1, 2, 1),
        ({"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_LOCAL_RANK": "0"}, "jsrun", 1, 2, 0),
        (SLURM, "srun", 5, 8, 1),
        (TORCH | SLURM, "torchrun", 3, 4, 1),  # one torchrun in each task
        ({"PMI_SIZE": "8", "PMI_RANK": "5", **SLURM}, "srun", 5, 8, 1),  # srun --mpi=pmi2
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "h1", "MASTER_PORT": "1", **SLURM}, "srun", 5, 8, 1),
        (SLURM | {"OMPI_COMM_WORLD_SIZE": "1"}, "srun", 5, 8, 1),
    ],
)
def test_the_place_is_read(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], launcher: str, rank: int, size: int, local_rank: int
) -> None:
    found = place(monkeypatch, variables)
    assert found is not None
    assert (found.launcher, found.rank, found.size, found.local_rank) == (launcher, rank, size, local_rank)
    assert found.master == (("h1", int(variables["MASTER_PORT"])) if "MASTER_ADDR" in variables else None)
    assert refusal_of_other_launchers()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        *({name: "1"} for name in LAUNCHERS),
        {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_PROCID": "0"},  # a batch script: one process
        {**TORCH, **WORKER.variables()},  # set by elasticrun, in one of its worlds
        {"WORLD_SIZE": "many"},
    ],
)
def test_a_process_without_others_has_no_place(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    assert place(monkeypatch, variables) is None
    assert refusal_of_other_launchers() == ""


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_size_without_a_place_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}=3: .*'elasticrun -np 3 python"):
        place(monkeypatch, {name: "3"})
    assert refusal_of_other_launchers().startswith(f"{name}=3: another launcher has started 3 processes")


@pytest.mark.parametrize(
    ("variables", "is_on_one_host"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, True),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        (OPEN_MPI, False),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, True),
        (SLURM | NODES, False),
    ],
)
def test_a_world_on_one_host_is_recognized(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_on_one_host: bool
) -> None:
    found = place(monkeypatch, variables)
    assert found is not None
    assert found.is_on_one_host == is_on_one_host


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n7", "n7"),
        ("n7,n9", "n7"),
        ("n[07-12,15],login", "n07"),
        ("rack[1-2]node[3,4]-ib,n1", "rack1node3-ib"),
    ],
)
def test_the_tasks_of_srun_meet_at_the_host_of_task_0(monkeypatch: pytest.MonkeyPatch, nodes: str, first: str) -> None:
    found = place(monkeypatch, SLURM | NODES | {"SLURM_STEP_NODELIST": nodes})
    assert found is not None
    assert found.slurm_address is not None
    host, port = found.slurm_address
    assert host == first
    assert 20_000 <= port < 30_000
    other = place(monkeypatch, SLURM | NODES | {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_ID": "1"})
    assert other is not None
    assert other.key != found.key
    reserved = place(
        monkeypatch, SLURM | NODES | {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_RESV_PORTS": "12000-12003"}
    )
    assert reserved is not None
    assert reserved.slurm_address == (first, 12_000)
