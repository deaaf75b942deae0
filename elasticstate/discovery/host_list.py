"""A list of hosts that does not change: ``--hosts``, or this machine."""

from __future__ import annotations

from elasticstate.discovery import Hosts, HostSource
from elasticstate.discovery.host_lines import default_slots, parse_hosts
from elasticstate.options import Options


class HostList(HostSource):
    """The hosts of ``--hosts``; without the option, this machine with a slot for each worker and spare."""

    can_change = False

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._text = "\n".join(options.hosts) or f"localhost:{options.np + options.spares}"
        self._default_slots = default_slots(options)

    async def hosts(self) -> Hosts:
        return parse_hosts(self._text, self._default_slots)
