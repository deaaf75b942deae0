"""A file with a list of hosts, which may change while the job runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from elasticstate.discovery import DiscoveryFault, Hosts, HostSource
from elasticstate.discovery.host_lines import default_slots, parse_hosts
from elasticstate.options import Options
from elasticstate.threads import in_thread


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
