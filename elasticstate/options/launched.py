"""Other launchers: the place that mpirun, srun and others give to this process, and the allocation of Slurm around it.

Both are read from their environment variables. Those of Slurm are in salloc(1), sbatch(1) and srun(1).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from elasticstate.errors import UsageError
from elasticstate.options.environment import worker_environment


@dataclass(frozen=True, slots=True)
class _Launcher:
    """Environment variables in which a launcher passes the place of a process."""

    name: str
    size: str
    rank: str = ""
    local_rank: str = ""
    local_size: str = ""
    others: tuple[str, ...] = ()  # further variables without which no world can form

    def number(self, variable: str) -> int | None:
        text = os.environ.get(variable, "")
        return int(text) if text.isdecimal() else None

    @property
    def unset(self) -> list[str]:
        """The variables that a world needs, and that are not set."""
        missing = [name for name in (self.rank, self.local_rank) if self.number(name) is None]
        return missing + [name for name in self.others if not os.environ.get(name)]


# A launcher that another one has started comes first: torchrun runs inside srun, and mpirun inside a step of Slurm.
_LAUNCHERS = (
    _Launcher("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK", others=("MASTER_ADDR", "MASTER_PORT")),
    _Launcher(
        "mpirun",  # Open MPI
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(
        "mpirun",  # MVAPICH2
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    _Launcher(
        "jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
    ),
    # A batch script is one process and has SLURM_NTASKS only.
    _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    _Launcher("horovodrun", "HOROVOD_SIZE"),
)


@dataclass(frozen=True, slots=True)
class LaunchedPlace:
    """Place of this process in a world that another launcher has started. Such a world never changes."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    host: str  # name of this process's host
    key: str  # of the world, unique on the host
    is_on_one_host: bool
    master: tuple[str, int] | None  # MASTER_ADDR and MASTER_PORT
    slurm_address: tuple[str, int] | None  # of rank 0, in a step of Slurm


def launched_place() -> LaunchedPlace | None:
    """Return the place that another launcher has given to this process.

    None: this process is alone, or a worker of elasticrun. Raises UsageError if variables are missing.
    """
    found = _in_use()
    if found is None:
        return None
    launcher = _chosen(found)
    if launcher is None:
        raise UsageError(_refusal(found[0]))
    size, rank, local_rank = (
        launcher.number(name) or 0 for name in (launcher.size, launcher.rank, launcher.local_rank)
    )
    return LaunchedPlace(
        launcher=launcher.name,
        rank=rank,
        size=size,
        local_rank=local_rank,
        host=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        key=hashlib.sha256(_job().encode()).hexdigest()[:16],
        is_on_one_host=launcher.number(launcher.local_size) == size or os.environ.get("SLURM_STEP_NUM_NODES") == "1",
        master=_master(),
        slurm_address=_slurm_address() if launcher.name == "srun" else None,
    )


def launched_local_rank() -> int:
    """Return the local rank that another launcher has given to this process; 0 if there is none."""
    launcher = _chosen(_in_use() or [])
    return 0 if launcher is None else launcher.number(launcher.local_rank) or 0


def refusal_of_other_launchers() -> str:
    """Return the reason why this process must not train alone; "" if it may.

    The reason is another launcher that has started several processes.
    """
    found = _in_use()
    if found is None:
        return ""
    size = os.environ[found[0].size]
    return (
        f"{found[0].size}={size}: another launcher has started {size} processes, and each of them would train alone. "
        "Put the training into a function decorated with @elasticstate.run, and pass this state to the function; or "
        f"unset {found[0].size} to train alone."
    )


def _in_use() -> list[_Launcher] | None:
    """Return the launchers that have started several processes, this one among them; None if there are none."""
    if worker_environment() is not None:
        return None
    return [launcher for launcher in _LAUNCHERS if (launcher.number(launcher.size) or 0) > 1] or None


def _chosen(found: list[_Launcher]) -> _Launcher | None:
    return next((launcher for launcher in found if not launcher.unset), None)


def _refusal(launcher: _Launcher) -> str:
    size = os.environ[launcher.size]
    if not launcher.rank:
        problem = f"{launcher.name} has started {size} processes, and elasticstate cannot join its world"
    else:
        unset = ", no ".join(launcher.unset)
        problem = f"{size} processes belong to one world, but this one cannot join the others: there is no {unset}"
    return (
        f"{launcher.size}={size}: {problem}. Start the script with 'elasticrun -np {size} python ...', or unset "
        f"{launcher.size} to train alone."
    )


def _job() -> str:
    """Return a name that all processes of the world have on this host, and those of another world have not."""
    step = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return os.environ.get("PMIX_NAMESPACE") or (" ".join(step) if all(step) else str(os.getppid()))


def _master() -> tuple[str, int] | None:
    """Return MASTER_ADDR and MASTER_PORT; None if one is not set."""
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return (host, int(port)) if host and port.isdecimal() else None


def _slurm_address() -> tuple[str, int] | None:
    """Return the host of task 0 of this step of Slurm, and a port that is likely to be free there."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    if not nodes:
        return None
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    assert first is not None, "the expression matches an empty text, too"
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
    reserved = re.match(r"\d+", os.environ.get("SLURM_STEP_RESV_PORTS", ""))
    port = int(reserved[0]) if reserved else 20_000 + int(hashlib.sha256(_job().encode()).hexdigest()[:8], 16) % 10_000
    return host, port


# ----------------------------------------------------------------------------------------------------- Slurm


@dataclass(frozen=True, slots=True)
class SlurmAllocation:
    """An allocation. ``tasks`` and ``cpus``: of each node, in the order of ``nodes``."""

    job_id: str
    nodes: str  # as Slurm writes lists, for example n[1-3,7]
    tasks: tuple[int, ...]
    cpus: tuple[int, ...]
    gpus: int  # of each node

    def slots(self, slots_per_host: int | None) -> tuple[int, ...]:
        """Return the slots of each node: ``--slots-per-host``, else one for each GPU, else one for each task.

        ``slots_per_host`` 0 (auto): one for each GPU; without any GPU, one for each CPU of the allocation.
        """
        if slots_per_host:
            return tuple(slots_per_host for _ in self.tasks)
        if self.gpus:
            return tuple(self.gpus for _ in self.tasks)
        return self.tasks if slots_per_host is None else self.cpus


def slurm_allocation(environ: Mapping[str, str] | None = None) -> SlurmAllocation | None:
    """Return the allocation that this process runs in; None if there is none."""
    environ = os.environ if environ is None else environ
    job_id, nodes = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NODELIST", "")
    cpus = _counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if not (job_id and nodes and cpus):
        return None
    tasks = _counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    if len(tasks) != len(cpus):  # within a step the variable describes the step
        tasks = (1,) * len(cpus)
    gpus = _last_number(environ.get("SLURM_GPUS_PER_NODE", "")) or _last_number(environ.get("SLURM_GPUS_ON_NODE", ""))
    return SlurmAllocation(job_id, nodes, tasks, cpus, gpus)


def slurm_tasks(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of processes that the srun that started this one has started; 0 if none has."""
    return _last_number((os.environ if environ is None else environ).get("SLURM_STEP_NUM_TASKS", ""))


def slurm_node() -> str:
    """Return Slurm's name for this node; "" outside of a step. Two nodes on one machine have the same host name."""
    return os.environ.get("SLURMD_NODENAME", "") if "SLURM_STEP_ID" in os.environ else ""


def slots_of_step() -> int:
    """Return the GPUs of this step on this node; without any, the CPUs that srun gave each task; 0 if unknown."""
    if "SLURM_STEP_ID" not in os.environ:
        return 0
    return _last_number(os.environ.get("SLURM_GPUS_ON_NODE", "")) or _last_number(
        os.environ.get("SLURM_CPUS_PER_TASK", "")
    )


def _counts(text: str) -> tuple[int, ...]:
    """Read Slurm's list of a number for each node: ``2(x3),1`` is 2, 2, 2, 1. Return () for anything else."""
    counts: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return ()
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _last_number(text: str) -> int:
    """Read ``4`` or ``a100:4``; 0 for anything else."""
    last = text.rpartition(":")[2]
    return int(last) if last.isdecimal() else 0
