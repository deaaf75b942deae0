"""Slurm: the allocation and the step that this process runs in, as Slurm's environment variables describe them.

The variables are those of salloc(1), sbatch(1) and srun(1), "output environment variables".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


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
