"""Where the hosts of a job come from: host sources, and their answers over time.

A host source is a subclass of :class:`HostSource` with a name, which ``--discovery`` chooses, else :func:`source_name`.
Packages add their own by entry points (docs/guides/hosts.md).

The driver asks a source again and again. A bad answer changes nothing: if a script fails, takes too long or prints
invalid lines, its last answer stays valid, with one warning for each kind of fault. Only the first answer must be good.
An empty answer counts when it is given twice in a row, because files are truncated before they are written.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from elasticstate.core.ids import HostSlots, without_case
from elasticstate.errors import DiscoveryError, OptionError
from elasticstate.failures import how_it_ended
from elasticstate.machine import slots_of_this_machine
from elasticstate.net.names import learn_full_name
from elasticstate.options import Options, slurm_allocation
from elasticstate.options.kinds import RACK_RULE, is_host_name, parse_host
from elasticstate.plug_ins import plug_in
from elasticstate.processes import as_command, ask, remedy_for
from elasticstate.threads import in_thread

Hosts = tuple[HostSlots, ...]
"""An answer: the hosts with their numbers of slots, each host once."""

GROUP = "elasticstate.discovery"
SOURCES = {
    "list": "elasticstate.discovery:HostList",
    "hostfile": "elasticstate.discovery:Hostfile",
    "script": "elasticstate.discovery:DiscoveryScript",
    "dial-in": "elasticstate.discovery:DialIn",
    "slurm": "elasticstate.discovery:SlurmNodes",
    "ray": "elasticstate.ray:RayNodes",
    "kubernetes": "elasticstate.kubernetes:Pods",
}
"""The project's own host sources."""


class HostSource:
    """Source of the hosts of a job. It runs in the driver's event loop and must never block it.

    With ``--listen`` the agents that dial in are the hosts, with their own numbers of slots. Then a source can only let
    hosts leave: it names them with 0 slots, or not any more.

    Attributes:
        can_change: False: the driver asks only at the start.
        interval_s: seconds between two calls.
    """

    can_change = True

    def __init__(self, options: Options) -> None:
        """Raise OptionError if this source cannot be used with these options."""
        self.interval_s = 1.0 if options.discovery_interval_s is None else options.discovery_interval_s

    async def hosts(self) -> Hosts:
        """Return the present hosts. Raises DiscoveryError; any other error counts as one, too."""
        raise NotImplementedError

    async def close(self) -> None:
        """End what this source has begun elsewhere. Called once, at the end of the job."""


class DiscoveryFault(DiscoveryError):
    """A call without a valid answer. There is one warning for each ``kind``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def source_name(options: Options) -> str:
    """Return the name of the job's host source."""
    if options.discovery is not None:
        return options.discovery
    if options.host_discovery_script is not None:
        return "script"
    if options.hostfile is not None:
        return "hostfile"
    if options.pod_selector is not None:
        return "kubernetes"
    return "dial-in" if options.listen is not None else "list"


def host_source(options: Options) -> HostSource:
    """Return the job's host source. Raises OptionError."""
    return plug_in("--discovery", GROUP, SOURCES, source_name(options), HostSource)(options)


class Discovery:
    """The hosts of a job. Call ``first()`` once, then iterate over ``changes()``.

    ``refuse(host)`` is called in another thread, and returns why a host cannot be used, or "". ``warn`` gets one line
    for each kind of fault.
    """

    def __init__(self, source: HostSource, refuse: Callable[[str], str], warn: Callable[[str], None]) -> None:
        self._source = source
        self._refuse = refuse
        self._warn = warn
        self._last: Hosts = ()
        self._spellings: dict[str, str] = {}  # of the names of hosts, the first ones
        self._empty_in_a_row = 0
        self._warned: set[str] = set()

    def start_from(self, hosts: Hosts) -> None:
        """Start with the last answer that the previous driver received; used instead of ``first``."""
        self._last = self._as_spelled_first(hosts)

    async def first(self) -> Hosts:
        """Return the first answer. Raises DiscoveryError when it is bad."""
        self._last = await self._ask()
        return self._last

    async def changes(self) -> AsyncIterator[Hosts]:
        """Yield each answer that differs from the last good one. Ends at once if the hosts are fixed."""
        is_first = True
        while self._source.can_change or is_first:
            is_first = False
            await asyncio.sleep(self._source.interval_s)
            try:
                answer = await self._ask()
            except DiscoveryFault as fault:
                if fault.kind not in self._warned:
                    self._warned.add(fault.kind)
                    self._warn(f"host discovery failed: {fault}; using the last valid answer")
                continue
            self._empty_in_a_row = 0 if answer else self._empty_in_a_row + 1
            if answer != self._last and (answer or self._empty_in_a_row > 1):
                self._last = answer
                yield answer

    async def close(self) -> None:
        """Close the source, at the end of the job. A fault there is a warning."""
        try:
            await self._source.close()
        except Exception as error:
            self._warn(f"{type(self._source).__name__} could not be closed: {error}")

    async def _ask(self) -> Hosts:
        try:
            hosts = _checked(await self._source.hosts())
        except DiscoveryFault:
            raise
        except DiscoveryError as error:
            raise DiscoveryFault("failed", str(error)) from error
        except Exception as error:  # of a plug-in
            raise DiscoveryFault("failed", f"{type(self._source).__name__} raised {error!r}") from error
        reason = await in_thread(self._check, hosts)
        if reason:
            raise DiscoveryFault("refused", reason)
        return self._as_spelled_first(hosts)

    def _as_spelled_first(self, hosts: Hosts) -> Hosts:
        """Return the hosts by the names that they have had so far: a name in other case is no other host."""
        names = (self._spellings.setdefault(without_case(host.name), host.name) for host in hosts)
        return tuple(host._replace(name=name) for host, name in zip(hosts, names, strict=True))

    def _check(self, hosts: Hosts) -> str:
        """Return why one of the hosts cannot be used, or "". Blocks as long as resolver and file system do."""
        learn_full_name(host.name for host in hosts)
        return next(filter(None, (self._refuse(host.name) for host in hosts)), "")


def _checked(hosts: Hosts) -> Hosts:
    """Return the answer if it is valid; a plug-in may give another one. Raises DiscoveryFault."""
    for host in hosts:
        if not (isinstance(host, HostSlots) and is_host_name(host.name) and isinstance(host.slots, int)):
            raise DiscoveryFault("malformed", f"{host!r} is not a HostSlots with a host name and a number of slots")
        if host.rack and not is_host_name(host.rack):
            raise DiscoveryFault("malformed", f"host {host.name}: rack {host.rack!r}: {RACK_RULE}")
        if host.slots < 0:
            raise DiscoveryFault("malformed", f"host {host.name} has {host.slots} slots")
    names = [host.name for host in hosts]
    if len(set(map(without_case, names))) < len(names):
        raise DiscoveryFault("malformed", f"a host is named twice: {', '.join(names)}")
    return tuple(hosts)


# -------------------------------------------------------------------------------------------------------------- sources
# The project's own sources: agents that dial in, a list, a file, a script, an allocation of Slurm.


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
            text = await in_thread(partial(Path(self._path).read_text, "utf-8-sig", errors="replace"))
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
    except (OSError, ValueError) as error:
        remedy = remedy_for(command if "/" in command else f"./{command}")
        raise DiscoveryFault("failed", f"{command} could not be started: {error}{remedy and '. '}{remedy}") from None
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
