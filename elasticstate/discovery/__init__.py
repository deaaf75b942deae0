"""Where the hosts of a job come from: host sources, and their answers over time.

A host source is a subclass of :class:`HostSource` with a name. ``--discovery`` chooses one by its name; without the
option, :func:`source_name` does. A package adds its own by an entry point in the group ``elasticstate.discovery``::

    [project.entry-points."elasticstate.discovery"]
    mycloud = "mypackage.hosts:MyCloudHosts"

The driver asks a source again and again. A bad answer changes nothing: if a script fails, takes too long or prints
invalid lines, its last answer stays valid, with one warning for each kind of fault. Only the first answer must be good.
An empty answer counts when it is given twice in a row, because files are truncated before they are written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from elasticstate.core.ids import HostSlots, without_case
from elasticstate.errors import DiscoveryError, OptionError
from elasticstate.net.names import learn_full_name
from elasticstate.options import Options
from elasticstate.options.kinds import RACK_RULE, is_host_name
from elasticstate.plug_ins import plug_in
from elasticstate.threads import in_thread

Hosts = tuple[HostSlots, ...]
"""An answer: the hosts with their numbers of slots, each host once."""

GROUP = "elasticstate.discovery"
SOURCES = {
    "list": "elasticstate.discovery.sources:HostList",
    "hostfile": "elasticstate.discovery.sources:Hostfile",
    "script": "elasticstate.discovery.sources:DiscoveryScript",
    "dial-in": "elasticstate.discovery.sources:DialIn",
    "slurm": "elasticstate.discovery.sources:SlurmNodes",
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
    name = source_name(options)
    kind = plug_in("--discovery", GROUP, SOURCES, name)
    if not (isinstance(kind, type) and issubclass(kind, HostSource)):
        raise OptionError(
            f"--discovery: {name!r}: the entry point does not name a subclass of elasticstate.discovery.HostSource. "
            "Mend its package."
        )
    return kind(options)


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
                self._warn_once(fault)
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

    def _warn_once(self, fault: DiscoveryFault) -> None:
        if fault.kind not in self._warned:
            self._warned.add(fault.kind)
            self._warn(f"host discovery failed: {fault}; using the last valid answer")


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
