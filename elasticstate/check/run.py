"""The whole of ``elasticrun --check``: what is asked, the order in which it is told, and the exit status."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from elasticstate.check.hosts import host_lines
from elasticstate.check.local import commit_line, files_line, port_lines, ssh_line
from elasticstate.check.mpi_lines import mpi_lines
from elasticstate.check.report import Line, render
from elasticstate.check.torch_build import Torch, machine_type, needed_torch, nvidia_driver, probe, torch_lines
from elasticstate.config import Options
from elasticstate.machine import slots_of_this_machine, version
from elasticstate.mpi_build import Mpi, look_for_mpi

T = TypeVar("T")

_PLACES = {"hosts", "hostfile", "host_discovery_script"}
_ENDS = {signal.SIGINT: 130, signal.SIGTERM: 143}


def check(options: Options, given: frozenset[str]) -> int:
    """Print what is available. ``given``: the options that were given: what they ask for has to be there.

    Returns the exit status: 0; 1 if something that was asked for is missing; 130 after Ctrl-C, 143 after SIGTERM.
    """
    return asyncio.run(_until_a_signal(_Check(options, given).run()))


async def _until_a_signal(checking: Coroutine[Any, Any, int]) -> int:
    """Cancelled by a signal, it still waits for the ends of all children."""
    received: list[signal.Signals] = []
    task = asyncio.ensure_future(checking)
    loop = asyncio.get_running_loop()

    def give_up(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in _ENDS:
        loop.add_signal_handler(number, give_up, number)
    await asyncio.wait({task})
    if task.cancelled():
        return _ENDS[received[0]]
    return task.result()


class _Check:
    def __init__(self, options: Options, given: frozenset[str]) -> None:
        self._options = options
        self._given = given
        self._missing: list[str] = []  # of what was asked for

    async def run(self) -> int:
        """What takes long is asked at the same time, and told in order as it comes."""
        options = self._options
        with tempfile.TemporaryDirectory(prefix="elasticstate-check-") as directory:
            torch = asyncio.ensure_future(probe(options.start_timeout_s))
            mpi = asyncio.ensure_future(look_for_mpi(options.start_timeout_s))
            hosts = asyncio.ensure_future(host_lines(options, directory)) if _PLACES & self._given else None
            tasks: list[asyncio.Future[Any]] = [torch, mpi, *([hosts] if hosts else [])]
            try:
                print(f"elasticstate {version()}, Python {platform.python_version()} ({sys.executable})", flush=True)
                await self._tell("torch", torch, self._of_torch)
                await self._tell("MPI", mpi, mpi_lines)
                await self._tell("This machine", self._local(), list)
                if hosts:
                    await self._tell("Hosts", hosts, self._of_hosts)
                self._judge_backend(await torch, await mpi)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        for line in self._missing:
            print(f"elasticrun: {line}", file=sys.stderr)
        return 1 if self._missing else 0

    async def _tell(self, title: str, asked: Awaitable[T], lines: Callable[[T], list[Line]]) -> None:
        print(f"\n{title}:", flush=True)  # now: who waits sees for what
        print(render(lines(await asked)), end="", flush=True)

    def _of_torch(self, torch: Torch) -> list[Line]:
        lines = torch_lines(torch, needed_torch(), machine_type(), nvidia_driver())
        return [*lines, Line(torch.has_gloo or torch.has_nccl, f"--backend auto: {torch.auto} here")]

    def _of_hosts(self, lines: list[Line]) -> list[Line]:
        absent = sum(not line.is_there for line in lines)
        if absent:
            places = "/".join(f"--{name.replace('_', '-')}" for name in sorted(_PLACES & self._given))
            self._missing.append(f"{places}: {absent} of {len(lines)} cannot be used")
        return lines

    async def _local(self) -> list[Line]:
        options = self._options
        commits, ports = commit_line(options.commit_dir), port_lines(options.listen)
        if "commit_dir" in self._given and not commits.is_there:
            self._missing.append(f"--commit-dir: {options.commit_dir!r}: takes a directory to keep commits in")
        if "listen" in self._given and not ports[-1].is_there:
            self._missing.append(f"--listen: {options.listen!r}: takes an address of this machine with a free port")
        slots = slots_of_this_machine()
        shown = Line(True, f"--slots-per-host auto: {slots} here ({len(os.sched_getaffinity(0))} cores)")
        return [await ssh_line(options.connect_timeout_s), commits, *ports, files_line(), shown]

    def _judge_backend(self, torch: Torch, mpi: Mpi) -> None:
        if "backend" not in self._given:
            return
        asked = self._options.backend
        needs = {
            "mpi": mpi.problem,
            "nccl": "" if torch.has_nccl else "torch with NCCL, and CUDA devices that it sees",
            "gloo": "" if torch.has_gloo else "torch with a Gloo that works",
        }.get(asked, "")
        if needs:
            self._missing.append(f"--backend: {asked!r}: takes {needs}")
