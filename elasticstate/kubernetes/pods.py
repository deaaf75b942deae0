"""The pods of a label selector as hosts. Their agents dial in, and bring their own numbers of slots."""

from __future__ import annotations

from importlib.util import find_spec

from elasticstate.core.types import HostSlots
from elasticstate.discovery import DiscoveryFault, Hosts, HostSource
from elasticstate.errors import OptionError
from elasticstate.kubernetes.pod_watch import PodWatch
from elasticstate.options import Options
from elasticstate.threads import in_thread


class Pods(HostSource):
    """The agents' pods. A pod that is being deleted, evicted or preempted, or has ended, has no slots."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if find_spec("kubernetes") is None:  # its import takes 0.3 s, and would hold up the event loop
            raise OptionError(
                "--pod-selector: the client of Kubernetes is not installed. Run: pip install 'elasticstate[kubernetes]'"
            )
        self._watch = PodWatch(options.pod_selector or "")
        self._timeout_s = options.discovery_timeout_s

    async def hosts(self) -> Hosts:
        self._watch.start()
        if not await in_thread(self._watch.has_begun.wait, self._timeout_s):
            raise DiscoveryFault(
                "timeout", f"the API server did not answer within {self._timeout_s:g} s (see --discovery-interval)"
            )
        if fault := self._watch.fault:
            raise DiscoveryFault("failed", fault)
        return tuple(HostSlots(name, int(works)) for name, works in sorted(self._watch.pods.items()))

    async def close(self) -> None:
        await in_thread(self._watch.stop)
