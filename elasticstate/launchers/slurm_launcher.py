"""Agents in steps of a Slurm allocation: one srun for each node, so that the loss of a node ends no other step."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elasticstate.errors import OptionError
from elasticstate.launchers.command import CommandLauncher
from elasticstate.options import Options, slurm_allocation
from elasticstate.processes import ask

_LIMIT_S = 10.0  # of each command


class SrunLauncher(CommandLauncher):
    """Launcher by srun, inside an allocation. A step may use all that the allocation has on its node."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        allocation = slurm_allocation()
        if allocation is None:
            raise OptionError(
                "--launcher: 'slurm': this process runs in no allocation of Slurm. Run elasticrun inside salloc or "
                "sbatch, or leave --launcher out."
            )
        self._job_id = allocation.job_id

    def refuse(self, host: str) -> str:
        return "" if shutil.which("srun") else "this machine has no srun. Install Slurm's client programs"

    def command(self, host: str, arguments: Sequence[str], log: Path, name: str) -> list[str]:
        return [
            *("srun", f"--jobid={self._job_id}", f"--nodelist={host}", "--nodes=1", "--ntasks=1"),
            "--overlap",  # with the steps of this node's earlier agent, and those of the user
            "--no-kill",
            "--mpi=none",
            "--cpu-bind=none",  # each worker may use all CPUs of the allocation
            "--unbuffered",
            "--quiet",
            "--chdir=/",  # no file of the user's directory hides a module of the agent
            f"--job-name={name}",
            *(self.python, *arguments),
        ]

    async def clear(self, host: str, name: str) -> None:
        """End the step, which has lost its srun. Slurm itself does so later, or never."""
        with suppress(OSError, TimeoutError):
            answer = await ask(f"squeue --steps --noheader --jobs={self._job_id} --format='%i %j'", _LIMIT_S)
            for step in (line.split()[0] for line in answer.stdout.splitlines() if line.split()[1:] == [name]):
                await ask(f"scancel --signal=KILL {step}", _LIMIT_S)
