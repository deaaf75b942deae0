"""Host sources: where the hosts of a job come from.

A host source is a subclass of :class:`HostSource` with a name. ``--discovery`` chooses one by its name; without the
option, :func:`source_name` does. A package adds its own by an entry point in the group ``elasticstate.discovery``::

    [project.entry-points."elasticstate.discovery"]
    mycloud = "mypackage.hosts:MyCloudHosts"

The driver asks a source again and again, and keeps the last valid answer (driver/discovery.py).
"""

from __future__ import annotations

from elasticstate.core.ids import HostSlots
from elasticstate.errors import DiscoveryError, OptionError
from elasticstate.options import Options
from elasticstate.plug_ins import plug_in

Hosts = tuple[HostSlots, ...]
"""An answer: the hosts with their numbers of slots, each host once."""

GROUP = "elasticstate.discovery"
SOURCES = {
    "list": "elasticstate.discovery.sources:HostList",
    "hostfile": "elasticstate.discovery.sources:Hostfile",
    "script": "elasticstate.discovery.sources:DiscoveryScript",
    "dial-in": "elasticstate.discovery.sources:DialIn",
    "slurm": "elasticstate.discovery.sources:SlurmNodes",
    "ray": "elasticstate.ray.nodes:RayNodes",
    "kubernetes": "elasticstate.kubernetes.pods:Pods",
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
