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
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from elasticstate.log import logger
from elasticstate.mpi import holder
from elasticstate.mpi.relay import Relay
from elasticstate.net.trust import Trust, read_token
from elasticstate.options import inherited_environment

if TYPE_CHECKING:
    from elasticstate.mpi.pmix import Pmix

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

    from elasticstate.mpi.pmix import Pmix

    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2]), Pmix()))
    os.kill(os.getppid(), signal.SIGKILL)


async def _serve(directory: Path, proof_timeout_s: float, pmix: Pmix) -> None:
    relay = Relay(_port_of_mpirun())
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


def _port_of_mpirun() -> int:
    """Return the port of mpirun's PMIx server, from its environment variable: ``name;tcp4://127.0.0.1:port``."""
    return int(inherited_environment()[PMIX_SERVER].rpartition(":")[2])


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
