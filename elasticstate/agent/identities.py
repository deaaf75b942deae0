"""Who the workers of this host are for MPI (see elasticstate/mpi): handed on, with the way to ``mpirun``.

A host other than the driver's has no ``mpirun``: its workers reach that of the driver's host through a tunnel, on which
nothing travels but what they tell each other of their addresses when they start.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping

from elasticstate.agent.contact import Contact
from elasticstate.net.messages import AgentWarning, Identity
from elasticstate.net.relay import open_tunnel, port_of

_SERVERS = "PMIX_SERVER_URI"  # and a version: name;tcp4://address:port
# What a server tells the processes of its own host in shared memory, it can tell others in messages.
_FAR = {"PMIX_MCA_gds": "hash"}


class Identities:
    def __init__(self, host: str, timeout_s: float, driver: Contact, complain: Callable[[str], None]) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._driver = driver
        self._complain = complain
        self._tunnels: dict[int, asyncio.Server] = {}  # by the port of their relay
        self._opening = asyncio.Lock()

    async def hand_on(self, identity: Identity) -> None:
        """To the worker that waits for it. Whoever gets none ends by itself, and is started again."""
        environment = dict(identity.environment)
        try:
            if identity.relay_port:
                environment = through(environment, await self._tunnel(identity.relay_port)) | _FAR
            with open(f"{identity.path}.new", "w") as file:
                json.dump(environment, file)
            os.rename(file.name, identity.path)
        except OSError as error:
            self._driver.send(AgentWarning(f"a worker gets no identity for MPI: {error}"))

    async def _tunnel(self, relay_port: int) -> int:
        """Its port here. Raises OSError."""
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
    """This environment, with the server at this port of the loopback interface."""
    return {
        name: f"{value.rpartition(':')[0]}:{port}" if name.startswith(_SERVERS) else value
        for name, value in environment.items()
    }
