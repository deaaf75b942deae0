"""The nodes of a cluster of Ray as hosts. The functions block: call them in a thread."""

from __future__ import annotations

import logging
import threading
from importlib.util import find_spec
from typing import Any, NamedTuple

from elasticstate.core.ids import HostSlots
from elasticstate.discovery import DiscoveryFault, Hosts, HostSource
from elasticstate.errors import OptionError
from elasticstate.options import Options
from elasticstate.threads import in_thread

_PREFIX = "ray-"
_connecting = threading.Lock()


class Node(NamedTuple):
    """A living node of the cluster. ``host``: name of the host in the job."""

    host: str
    id: str
    gpus: int
    cpus: int

    def slots(self, slots_per_host: int | None) -> int:
        """Return ``--slots-per-host``, else one slot for each GPU, else one for each CPU."""
        return slots_per_host or self.gpus or self.cpus


def require_ray() -> None:
    """Raise OptionError if Ray is not installed."""
    if find_spec("ray") is None:  # its import takes 0.2 s, and would hold up the event loop
        raise OptionError("--discovery: 'ray': Ray is not installed. Run: pip install 'elasticstate[ray]'")


def connected() -> Any:
    """Return the module of Ray, connected to the cluster of RAY_ADDRESS or of this machine. Raises ConnectionError."""
    import ray

    with _connecting:
        if not ray.is_initialized():
            ray.init(address="auto", namespace="elasticstate", logging_level=logging.WARNING)
    return ray


def nodes() -> list[Node]:
    """Return the living nodes that nobody drains. Raises ConnectionError."""
    from elasticstate.compat.libraries import draining_nodes

    found = connected().nodes()
    leaving = draining_nodes()
    return [
        Node(host_of(node["NodeID"]), node["NodeID"], *(int(node["Resources"].get(kind, 0)) for kind in ("GPU", "CPU")))
        for node in found
        if node["Alive"] and node["NodeID"] not in leaving
    ]


def host_of(node_id: str) -> str:
    """Return the name of a node in the job. Nodes have no unique name of their own, and may share an address."""
    return _PREFIX + node_id[:12]


def request(workers: int, kind: str) -> None:
    """Ask Ray's autoscaler for so many GPUs or CPUs in all, until the next request. 0: for none."""
    connected()
    from ray.autoscaler.sdk import request_resources  # type: ignore[import-not-found,unused-ignore]

    request_resources(bundles=[{kind: 1}] * workers)


class RayNodes(HostSource):
    """The living nodes of the cluster, without those that are being drained.

    If the cluster has fewer slots than ``-np`` at the start, Ray's autoscaler is asked for the rest.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        require_ray()
        self._np = options.np
        self._slots_per_host = options.slots_per_host
        self._has_asked = False
        self._has_requested = False

    async def hosts(self) -> Hosts:
        try:
            return await in_thread(self._hosts)
        except (ConnectionError, RuntimeError) as error:
            raise DiscoveryFault("failed", f"the cluster of Ray cannot be reached: {error}") from error

    def _hosts(self) -> Hosts:
        found = nodes()
        if not self._has_asked:
            self._has_asked = True
            self._has_requested = sum(node.slots(self._slots_per_host) for node in found) < self._np
            if self._has_requested:
                request(self._np, "GPU" if any(node.gpus for node in found) else "CPU")
        hosts = (HostSlots(node.host, node.slots(self._slots_per_host)) for node in found)
        return tuple(sorted(host for host in hosts if host.slots))

    async def close(self) -> None:
        """Withdraw the request, or the cluster would never become smaller."""
        if self._has_requested:
            await in_thread(request, 0, "CPU")
