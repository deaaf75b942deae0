"""Hosts whose agents dial in (``--listen``)."""

from __future__ import annotations

from elasticstate.discovery import Hosts, HostSource


class DialIn(HostSource):
    """No hosts: the agents that dial in are the hosts, and the driver knows them from their connections."""

    can_change = False

    async def hosts(self) -> Hosts:
        return ()
