"""The nodes of an allocation of Slurm."""

from __future__ import annotations

import shlex

from elasticstate.core.types import HostSlots
from elasticstate.discovery import DiscoveryFault, Hosts, HostSource
from elasticstate.discovery.sources import run_script
from elasticstate.errors import OptionError
from elasticstate.options import Options, slurm_allocation

_INTERVAL_S = 10.0  # each call asks slurmctld, which serves a whole cluster
_UNUSABLE = ("drain", "drng", "down", "fail")  # beginnings of states in which a node starts nothing new


class SlurmNodes(HostSource):
    """The nodes of the allocation that this process runs in, without those that an administrator drains."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        allocation = slurm_allocation()
        if allocation is None:
            raise OptionError(
                "--discovery: 'slurm': this process runs in no allocation of Slurm (there is no SLURM_JOB_ID or "
                "SLURM_JOB_NODELIST). Run elasticrun inside salloc or sbatch, or name the hosts with -H."
            )
        self._nodes = shlex.quote(allocation.nodes)
        self._slots = allocation.slots(options.slots_per_host)
        self._timeout_s = options.discovery_timeout_s
        self._names: list[str] = []
        if options.discovery_interval_s is None:
            self.interval_s = _INTERVAL_S

    async def hosts(self) -> Hosts:
        if not self._names:
            self._names = (await self._ask(f"scontrol show hostnames {self._nodes}")).split()
        lines = await self._ask(f"sinfo --noheader --Node --nodes={self._nodes} --format='%N %T'")
        states = dict(line.split(maxsplit=1) for line in lines.splitlines() if " " in line)
        if len(self._names) != len(self._slots):
            raise DiscoveryFault("malformed", f"{self._nodes} are not the {len(self._slots)} nodes of the allocation")
        return tuple(
            HostSlots(name, slots)
            for name, slots in zip(self._names, self._slots, strict=True)
            if not states.get(name, "").startswith(_UNUSABLE)
        )

    async def _ask(self, command: str) -> str:
        return await run_script(command, self._timeout_s)
