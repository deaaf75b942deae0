"""``mpirun -n 1 python -m elasticstate.mpi.broker DIRECTORY SECONDS``: start holders of MPI identities on request.

Requests are JSON files in the directory ``requests``. A byte in the FIFO ``bell`` announces them::

    {"hold": [[process id of a worker of this host, or 0, path of its holder's file], ...]}
    {"release": [path with the suffix .released, ...], "host": null, or the name of a lost host}

If the directory has a token, this process also runs a relay, by which workers on other hosts connect to ``mpirun``. A
file has its port. Workers have SECONDS to authenticate.

This process and ``mpirun`` end when the directory has been removed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import ssl
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from elasticstate.log import logger
from elasticstate.mpi import holder
from elasticstate.net.control import reason_of
from elasticstate.net.names import LOCALHOST, any_address, listening_socket, port_of
from elasticstate.net.trust import NAME, Trust, read_token
from elasticstate.options import inherited_environment

# ---------------------------------------------------------------------------------------------------------------- relay
# TCP connections from one host to another, tunnelled through TLS that only processes of the job can speak.
#
# ``mpirun`` listens on the loopback interface of its host, and authenticates no client::
#
#     worker ── loopback ── tunnel (its agent) ══ TLS ══ relay (beside mpirun) ── loopback ── mpirun


_PIECE_BYTES = 1 << 16


class Relay:
    """Connects authenticated clients to a port of the loopback interface of this host."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._clients: dict[str, set[asyncio.StreamWriter]] = {}  # by the host of the client

    async def open(self, trust: Trust, proof_timeout_s: float) -> int:
        """Listen, and return the port. Raises OSError."""
        self.server = await asyncio.start_server(
            self._serve,
            sock=listening_socket(any_address()),
            ssl=trust.server,
            ssl_handshake_timeout=proof_timeout_s,
        )
        return port_of(self.server.sockets[0])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError, ValueError):  # the client has disconnected: close this connection
            host = (await reader.readline()).decode().rstrip()
            self._clients.setdefault(host, set()).add(writer)
            try:
                await _connect(reader, writer, *await asyncio.open_connection(LOCALHOST, self._to_port))
            finally:
                self._clients[host].discard(writer)
        writer.close()

    def drop(self, host: str) -> None:
        """Abort all connections from this host: data that has not arrived here yet never reaches the port."""
        for writer in self._clients.get(host, ()):
            writer.transport.abort()


async def open_tunnel(
    trust: Trust, own_host: str, address: tuple[str, int], timeout_s: float, log: Callable[[str], None]
) -> asyncio.Server:
    """Listen on the loopback interface, and tunnel each connection to a relay. Raises ConnectionError: no relay.

    ``own_host``: the name by which the relay identifies connections from this host.
    """
    _, writer = await _dial(trust, address, timeout_s)
    writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await _dial(trust, address, timeout_s)
            far_writer.write(f"{own_host}\n".encode())
            await _connect(reader, writer, far_reader, far_writer)
        except ConnectionError as error:
            log(f"lost a connection to mpirun: {error}")
        writer.close()

    return await asyncio.start_server(serve, LOCALHOST, 0)


async def _dial(
    trust: Trust, address: tuple[str, int], timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the relay. Raises ConnectionError with the reason."""
    dialling = asyncio.ensure_future(asyncio.open_connection(*address, ssl=trust.client, server_hostname=NAME))
    try:  # not asyncio.wait_for: see net/control.py
        await asyncio.wait({dialling}, timeout=timeout_s)
        if not dialling.done():
            raise asyncio.TimeoutError
        return dialling.result()
    except (OSError, ssl.SSLError, asyncio.TimeoutError) as error:
        raise ConnectionError(f"{address[0]}:{address[1]}: {reason_of(error)}") from None
    finally:
        dialling.cancel()


async def _connect(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Pass data in both directions until one of them has ended; then end the other."""
    directions = {asyncio.ensure_future(_copy(*ends)) for ends in ((reader, far_writer), (far_reader, writer))}
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        far_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, ssl.SSLError):
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()


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
    """Client of the PMIx server that has started this process. Raises RuntimeError with PMIx's error number.

    It is the part of PMIx (pmix-standard.org, version 4) that starts processes, by Open MPI's library, which mpi4py
    loads.
    """

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


REQUESTS = "requests"
BELL = "bell"
TOKEN = "token"
RELAY_PORT = "relay"
RELEASED = ".released"
PMIX_SERVER = "PMIX_SERVER_URI41"
_LOOK_INTERVAL_S = 1.0
_MOST_RINGS = 1 << 16


def main() -> None:
    holder.end_with_mpirun()
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI  # noqa: F401 (loads the library that PMIx comes with)

    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2]), Pmix()))
    os.kill(os.getppid(), signal.SIGKILL)


async def _serve(directory: Path, proof_timeout_s: float, pmix: Pmix) -> None:
    # of mpirun's PMIx server, whose address is ``name;tcp4://127.0.0.1:port``
    relay = Relay(int(inherited_environment()[PMIX_SERVER].rpartition(":")[2]))
    if (directory / TOKEN).exists():
        port = await relay.open(Trust(read_token(str(directory / TOKEN))), proof_timeout_s)
        unnamed = directory / f"{RELAY_PORT}.new"
        unnamed.write_text(str(port))
        unnamed.rename(directory / RELAY_PORT)
    bell = asyncio.StreamReader()
    fifo = os.open(directory / BELL, os.O_RDWR | os.O_NONBLOCK)  # also open for writing, so that no end of file comes
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(bell), os.fdopen(fifo, "rb", buffering=0)
    )
    with ThreadPoolExecutor(1) as spawning:  # one spawn at a time; this loop does not wait for it
        while directory.exists():
            for file in sorted(path for path in (directory / REQUESTS).iterdir() if not path.suffix):
                request = json.loads(file.read_text())
                file.unlink()
                if "hold" in request:
                    spawning.submit(_hold, pmix, request["hold"])
                else:
                    _release(relay, request["release"], request["host"])
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(bell.read(_MOST_RINGS), _LOOK_INTERVAL_S)


def _hold(pmix: Pmix, members: list[tuple[int, str]]) -> None:
    try:
        pmix.spawn([([sys.executable, "-I", "-S", holder.__file__, str(pid), path], "/") for pid, path in members])
    except RuntimeError as error:  # the requesting worker times out; an exception here would end all workers
        logger.error("mpirun could not start holders for %s: %s", members, error)


def _release(relay: Relay, paths: list[str], host: str | None) -> None:
    """Kill the holders of ended workers, so that MPI reports the end to all other workers.

    The released processes themselves must not receive that report: a process that does ends the MPI job.
    """
    if host is not None:
        relay.drop(host)
    for path in paths:
        with suppress(FileNotFoundError):  # the worker has requested another holder
            _kill(json.loads(Path(path).read_text())["pid"], path.removesuffix(RELEASED))


def _kill(pid: int, path: str) -> None:
    """Kill the holder of this file if it lives, and no other process that has got its process id."""
    with suppress(ProcessLookupError, FileNotFoundError):
        living = os.pidfd_open(pid)
        try:
            if os.fsencode(path) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(living, signal.SIGKILL)
        finally:
            os.close(living)


if __name__ == "__main__":
    main()
