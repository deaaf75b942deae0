"""MPI identities of this host's workers (see elasticstate/mpi), passed on with an address of ``mpirun``.

``mpirun`` runs only on the driver's host. Workers on other hosts reach it through a tunnel. The tunnel carries only the
addresses that the workers exchange when they start.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from elasticstate.agent.driver_connection import DriverConnection
from elasticstate.net.messages import AgentWarning, Identity
from elasticstate.net.relay import open_tunnel, port_of
from elasticstate.private import open_directory, write_file

_SERVERS = "PMIX_SERVER_URI"  # plus a version suffix; value: name;tcp4://address:port
# A PMIx server shares data with processes of its own host in shared memory, and with others in messages.
_FAR = {"PMIX_MCA_gds": "hash"}


class IdentityFiles:
    def __init__(self, host: str, timeout_s: float, driver: DriverConnection, complain: Callable[[str], None]) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._driver = driver
        self._complain = complain
        self._tunnels: dict[int, asyncio.Server] = {}  # by the port of their relay
        self._opening = asyncio.Lock()

    async def hand_on(self, identity: Identity) -> None:
        """Write the identity for the worker that waits for it. A worker that gets none exits and is restarted."""
        environment = dict(identity.environment)
        try:
            if identity.relay_port:
                environment = through(environment, await self._tunnel(identity.relay_port)) | _FAR
            path = Path(identity.path)
            directory = open_directory(path.parent)
            try:
                write_file(directory, path.name, json.dumps(environment).encode())
            finally:
                os.close(directory)
        except OSError as error:
            self._driver.send(AgentWarning(f"a worker gets no identity for MPI: {error}"))

    async def _tunnel(self, relay_port: int) -> int:
        """Return the local port of the tunnel to this relay; open the tunnel if needed. Raises OSError."""
        async with self._opening:
            if relay_port not in self._tunnels:
                relay = (self._driver.driver_address, relay_port)
                self._tunnels[relay_port] = await open_tunnel(
                    self._driver.trust, self._host, relay, self._timeout_s, self._complain
                )
        return port_of(self._tunnels[relay_port])

    def close(self) -> None:
        for tunnel in self._tunnels.values():
            tunnel.close()


def through(environment: Mapping[str, str], port: int) -> dict[str, str]:
    """Return the environment with the server's address replaced by this port of the loopback interface."""
    return {
        name: f"{value.rpartition(':')[0]}:{port}" if name.startswith(_SERVERS) else value
        for name, value in environment.items()
    }
