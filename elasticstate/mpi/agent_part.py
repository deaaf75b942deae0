"""Part of the MPI backend in an agent: gives identities to the workers of this host.

``mpirun`` runs only on the driver's host. Workers on other hosts reach it through a tunnel of their agent. The tunnel
carries only the addresses that the workers exchange when they start.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import msgspec

from elasticstate.backends import AgentBackend, AgentServices
from elasticstate.mpi.broker import open_tunnel
from elasticstate.mpi.driver_part import Identity, decode_order
from elasticstate.net.names import port_of
from elasticstate.private import open_directory, write_file

_SERVERS = "PMIX_SERVER_URI"  # plus a version suffix; value: name;tcp4://address:port
# A PMIx server shares data with processes of its own host in shared memory, and with others in messages.
_FAR = {"PMIX_MCA_gds": "hash"}


class MpiAgent(AgentBackend):
    """Writer of identity files, and owner of the tunnels to ``mpirun``."""

    def __init__(self, services: AgentServices) -> None:
        self._services = services
        self._tunnels: dict[int, asyncio.Server] = {}  # by the port of their relay
        self._opening = asyncio.Lock()

    async def order(self, data: bytes) -> None:
        """Write an identity for the worker that waits for it. A worker that gets none exits and is restarted."""
        try:
            await self._write(decode_order(data))
        except (OSError, msgspec.DecodeError) as error:
            self._services.warn(f"a worker received no identity for MPI: {error}")

    async def _write(self, identity: Identity) -> None:
        environment = dict(identity.environment)
        if identity.relay_port:
            port = await self._tunnel_port(identity.relay_port)
            servers = {name: uri for name, uri in environment.items() if name.startswith(_SERVERS)}
            environment |= {name: f"{uri.rpartition(':')[0]}:{port}" for name, uri in servers.items()} | _FAR
        path = Path(identity.path)
        directory = open_directory(path.parent)
        try:
            write_file(directory, path.name, json.dumps(environment).encode())
        finally:
            os.close(directory)

    async def _tunnel_port(self, relay_port: int) -> int:
        """Return the local port of the tunnel to this relay; open the tunnel if needed. Raises OSError."""
        services = self._services
        async with self._opening:
            if relay_port not in self._tunnels:
                relay = (services.driver_address(), relay_port)
                self._tunnels[relay_port] = await open_tunnel(
                    services.trust, services.host, relay, services.connect_timeout_s, services.log
                )
        return port_of(self._tunnels[relay_port].sockets[0])

    def close(self) -> None:
        """Close the tunnels."""
        for tunnel in self._tunnels.values():
            tunnel.close()
