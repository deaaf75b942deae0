"""``elasticrun --check`` as a whole: the searches, the order of the output, and the exit status."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from elasticstate.backends import BACKENDS
from elasticstate.check import BackendFindings, Line, SearchForBackend, render
from elasticstate.check.hosts import host_lines
from elasticstate.check.local import (
    Torch,
    commit_line,
    files_line,
    needed_torch,
    nvidia_driver,
    port_lines,
    probe,
    ssh_line,
    torch_lines,
)
from elasticstate.machine import slots_of_this_machine, version
from elasticstate.options import Options, temporary_directory
from elasticstate.plug_ins import load_part
from elasticstate.terminal import message, printable
from elasticstate.threads import scratch_directory

T = TypeVar("T")

_PLACES = {"hosts", "hostfile", "host_discovery_script"}
_ENDS = {signal.SIGINT: 130, signal.SIGTERM: 143}


def check(options: Options, given: frozenset[str]) -> int:
    """Print what is available on this machine and on the named hosts. ``given``: names of the given options.

    Returns the exit status: 0; 1 if something is missing that a given option asks for; 130 after Ctrl-C, 143 after
    SIGTERM.
    """
    return asyncio.run(_until_a_signal(_Check(options, given).run()))


async def _until_a_signal(checking: Coroutine[Any, Any, int]) -> int:
    """Run the check; return its exit status. After a signal, cancel it and wait for the end of all children."""
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


def searches() -> dict[str, SearchForBackend]:
    """Return the searches of the backends that have one, by name."""
    return {name: load_part(parts.check) for name, parts in BACKENDS.items() if parts.check}


class _Check:
    def __init__(self, options: Options, given: frozenset[str]) -> None:
        self._options = options
        self._given = given
        self._errors: list[str] = []  # one error for each missing part that a given option asks for

    async def run(self) -> int:
        """Run slow searches at the same time; print the results in a fixed order, each as soon as possible."""
        options = self._options
        async with scratch_directory("elasticstate-check-", temporary_directory()) as directory:
            torch = asyncio.ensure_future(probe(options.start_timeout_s))
            found = {
                name: asyncio.ensure_future(search(options.start_timeout_s)) for name, search in searches().items()
            }
            hosts = asyncio.ensure_future(host_lines(options, directory)) if _PLACES & self._given else None
            tasks: list[asyncio.Future[Any]] = [torch, *found.values(), *([hosts] if hosts else [])]
            try:
                print(f"elasticstate {version()}, Python {platform.python_version()} ({sys.executable})", flush=True)
                await self._print("torch", torch, self._torch_lines)
                for name, findings in found.items():
                    await self._print(name.upper(), findings, lambda answer: answer.lines)
                await self._print("This machine", self._local(), list)
                if hosts:
                    await self._print("Hosts", hosts, self._host_lines)
                self._judge_backend(await torch, {name: await findings for name, findings in found.items()})
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        for line in self._errors:
            sys.stderr.write(message("elasticrun", line))
        return 1 if self._errors else 0

    async def _print(self, title: str, answer: Awaitable[T], lines: Callable[[T], list[Line]]) -> None:
        print(f"\n{title}:", flush=True)  # at once, so that the user sees what the check waits for
        print(printable(render(lines(await answer))), end="", flush=True)

    def _torch_lines(self, torch: Torch) -> list[Line]:
        lines = torch_lines(torch, needed_torch(), platform.machine(), nvidia_driver())
        works = torch.has_gloo if torch.auto == "gloo" else not torch.problem_of_nccl("nccl")
        return [*lines, Line(works, f"--backend auto: {torch.auto} here")]

    def _host_lines(self, found: tuple[list[Line], list[Line]]) -> list[Line]:
        hosts, network = found
        absent = sum(not line.is_available for line in hosts)
        places = "/".join(f"--{name.replace('_', '-')}" for name in sorted(_PLACES & self._given))
        if absent:
            self._errors.append(f"{places}: {absent} of {len(hosts)} hosts cannot be used. See the lines above.")
        if not all(line.is_available for line in network):
            self._errors.append(f"{places}: the hosts cannot exchange tensors. See the lines above.")
        return [*hosts, *network]

    async def _local(self) -> list[Line]:
        options = self._options
        commits, ports = commit_line(options.commit_dir), port_lines(options.listen)
        if "commit_dir" in self._given and not commits.is_available:
            self._errors.append(f"--commit-dir: {options.commit_dir!r}: cannot hold commits. Choose another directory.")
        if "listen" in self._given and not ports[-1].is_available:
            self._errors.append(
                f"--listen: {options.listen!r}: cannot listen there. Give an address of this machine and a free port."
            )
        slots = slots_of_this_machine()
        shown = Line(True, f"--slots-per-host auto: {slots} here ({len(os.sched_getaffinity(0))} cores)")
        return [await ssh_line(options.connect_timeout_s), commits, *ports, files_line(), shown]

    def _judge_backend(self, torch: Torch, found: Mapping[str, BackendFindings]) -> None:
        if "backend" not in self._given:
            return
        asked = self._options.backend
        lines = ". See the lines above."
        problem = {
            **{name: findings.problem for name, findings in found.items()},
            **{name: why + lines for name in ("nccl", "nccl2") if (why := torch.problem_of_nccl(name))},
            "gloo": "" if torch.has_gloo else "Gloo does not work here. See the lines above.",
        }.get(asked, "")
        if problem:
            self._errors.append(f"--backend: {asked!r}: {problem}")
