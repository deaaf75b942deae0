"""Part of the MPI backend in an agent: gives identities to the workers of this host.

``mpirun`` runs only on the driver's host. Workers on other hosts reach it through a tunnel of their agent. The tunnel
carries only the addresses that the workers exchange when they start.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from elasticstate.backends import AgentBackend, AgentServices
from elasticstate.mpi.broker import open_tunnel, port_of
from elasticstate.mpi.driver import Identity, decode_order
from elasticstate.private import open_directory, write_file

# ---------------------------------------------------------------------------------------------------------------- agent


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
            environment = through_tunnel(environment, await self._tunnel_port(identity.relay_port)) | _FAR
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
        return port_of(self._tunnels[relay_port])

    def close(self) -> None:
        """Close the tunnels."""
        for tunnel in self._tunnels.values():
            tunnel.close()


def through_tunnel(environment: Mapping[str, str], port: int) -> dict[str, str]:
    """Return the environment with the server's address replaced by this port of the loopback interface."""
    return {
        name: f"{value.rpartition(':')[0]}:{port}" if name.startswith(_SERVERS) else value
        for name, value in environment.items()
    }


# ----------------------------------------------------------------------------------------------------------------- pmix
# The part of PMIx (pmix-standard.org, version 4) that starts processes, by Open MPI's library, which mpi4py loads.


_STRING = 3  # PMIX_STRING


class _Proc(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (("string", ctypes.c_char_p), ("padding", ctypes.c_byte * 24))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


class _App(ctypes.Structure):
    _fields_ = (
        ("cmd", ctypes.c_char_p),
        ("argv", ctypes.POINTER(ctypes.c_char_p)),
        ("env", ctypes.POINTER(ctypes.c_char_p)),
        ("cwd", ctypes.c_char_p),
        ("maxprocs", ctypes.c_int),
        ("info", ctypes.POINTER(_Info)),
        ("ninfo", ctypes.c_size_t),
    )


class Pmix:
    """Client of the PMIx server that has started this process. Raises RuntimeError with PMIx's error number."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libpmix.so.2")
        me = _Proc()
        self._check("PMIx_Init", self._library.PMIx_Init(ctypes.byref(me), None, 0))

    def spawn(self, commands: Sequence[tuple[Sequence[str], str]]) -> None:
        """Start a job of one process for each command: (words, working directory).

        The job continues when it loses processes, and PMIx notifies the other processes of each loss.
        """
        job = _infos([("pmix.pers", "ompi5"), ("pmix.runopt", "notifyerrors,recoverable")])
        made = [_app(*command) for command in commands]  # keeps the objects alive that the copies point to
        apps = (_App * len(made))(*made)
        name = ctypes.create_string_buffer(256)
        self._check("PMIx_Spawn", self._library.PMIx_Spawn(job, len(job), apps, len(apps), name))

    def _check(self, name: str, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"{name} failed: PMIx error {ctypes.c_int(status).value}")


def _app(words: Sequence[str], directory: str) -> _App:
    # No infos: the library treats an empty array as one without an end.
    return _App(words[0].encode(), _strings(words), _strings(()), directory.encode(), 1)


def _infos(pairs: Sequence[tuple[str, str]]) -> ctypes.Array[_Info]:
    infos = (_Info * len(pairs))()
    for info, (key, value) in zip(infos, pairs, strict=True):
        info.key = key.encode()
        info.value.type, info.value.data.string = _STRING, value.encode()
    return infos


def _strings(words: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * (len(words) + 1))(*(word.encode() for word in words), None)
