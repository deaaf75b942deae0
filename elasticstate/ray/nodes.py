"""The nodes of a cluster of Ray as hosts."""

from __future__ import annotations

from elasticstate.core.types import HostSlots
from elasticstate.discovery import DiscoveryFault, Hosts, HostSource
from elasticstate.options import Options
from elasticstate.ray.cluster import nodes, request, require_ray
from elasticstate.threads import in_thread


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
