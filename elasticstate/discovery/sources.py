"""The project's own sources of hosts: agents that dial in, a list, a file, a script, an allocation of Slurm."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

from elasticstate.core.ids import HostSlots, without_case
from elasticstate.discovery import DiscoveryFault, Hosts, HostSource
from elasticstate.errors import OptionError
from elasticstate.exit_status import how_it_ended
from elasticstate.machine import slots_of_this_machine
from elasticstate.options import Options, slurm_allocation
from elasticstate.options.kinds import parse_host
from elasticstate.processes import as_command, ask
from elasticstate.threads import in_thread


class DialIn(HostSource):
    """No hosts: the agents that dial in are the hosts, and the driver knows them from their connections."""

    can_change = False

    async def hosts(self) -> Hosts:
        return ()


def default_slots(options: Options) -> int:
    """Return the slots of a host that is named without slots (``--slots-per-host``)."""
    return 1 if options.slots_per_host is None else options.slots_per_host or slots_of_this_machine()


def parse_hosts(text: str, default_slots: int) -> Hosts:
    """Read one host per line; ``#`` begins a comment. Raises DiscoveryFault.

    The slots of repeated names are added. Names have no case; the first spelling counts.
    """
    found: dict[str, HostSlots] = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line:
            try:
                name, slots, rack = parse_host(line, default_slots)
            except ValueError as error:
                raise DiscoveryFault("malformed", f"{error}. Name one host on each line") from None
            name, earlier, known = found.get(without_case(name), HostSlots(name, 0))
            if rack and known and rack != known:
                raise DiscoveryFault("malformed", f"host {name} is in rack {known} and in rack {rack}. Name one rack")
            found[without_case(name)] = HostSlots(name, earlier + slots, known or rack)
    return tuple(found.values())


class HostList(HostSource):
    """The hosts of ``--hosts``; without the option, this machine with a slot for each worker and spare."""

    can_change = False

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._text = "\n".join(options.hosts) or f"localhost:{options.np + options.spares}"
        self._default_slots = default_slots(options)

    async def hosts(self) -> Hosts:
        return parse_hosts(self._text, self._default_slots)


class Hostfile(HostSource):
    """The hosts in the file of ``--hostfile``, which is read at each call."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._path = options.hostfile or ""
        self._default_slots = default_slots(options)

    async def hosts(self) -> Hosts:
        try:
            text = await in_thread(partial(Path(self._path).read_text, errors="replace"))
        except OSError as error:
            raise DiscoveryFault("failed", f"hostfile {self._path} could not be read: {error.strerror}") from None
        return parse_hosts(text, self._default_slots)


class DiscoveryScript(HostSource):
    """The hosts that ``--host-discovery-script`` prints. It runs at each call."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._command = options.host_discovery_script or ""
        self._timeout_s = options.discovery_timeout_s
        self._default_slots = default_slots(options)

    async def hosts(self) -> Hosts:
        return parse_hosts(await run_script(self._command, self._timeout_s), self._default_slots)


async def run_script(command: str, timeout_s: float) -> str:
    """Return the output of a shell command. It runs in a session of its own, and is killed with its children.

    Raises DiscoveryFault.
    """
    try:
        answer = await ask(as_command(command), timeout_s)
    except TimeoutError:
        raise DiscoveryFault(
            "timeout", f"{command} did not end within {timeout_s:g} s (see --discovery-interval)"
        ) from None
    except PermissionError as error:
        raise DiscoveryFault(
            "failed", f"{command} could not be started: {error}. Make the file executable: chmod +x {command}"
        ) from None
    except (OSError, ValueError) as error:
        raise DiscoveryFault("failed", f"{command} could not be started: {error}") from None
    if answer.exit_code != 0:
        output = answer.stderr.strip() or "no output on stderr"
        raise DiscoveryFault("failed", f"{command} {how_it_ended(answer.exit_code)}: {output}")
    return answer.stdout


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
