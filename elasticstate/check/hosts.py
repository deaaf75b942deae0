"""The hosts that are named: each is really reached, by the ssh that would start its agent."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from elasticstate import processes
from elasticstate.check.report import Line, last_line
from elasticstate.config import Options
from elasticstate.driver.discovery import Discovery
from elasticstate.driver.launcher import how_ssh_ended, refuse, ssh_command
from elasticstate.errors import DiscoveryError
from elasticstate.machine import version
from elasticstate.net.names import is_this_machine

_AT_ONCE = 64  # connections that are being made
_ASK = """\
import importlib.util as u, json, os, sys
from elasticstate.machine import slots_of_this_machine, version
print(json.dumps(dict(version=version(), python="%d.%d.%d" % sys.version_info[:3], slots=slots_of_this_machine(),
    has_directory=os.path.isdir(sys.argv[1]), has={name: u.find_spec(name) is not None for name in sys.argv[2:]})))
"""


async def host_lines(options: Options, directory: str) -> list[Line]:
    """One for each host that was named, in that order; ``directory`` is for what ssh says."""
    try:
        hosts = await Discovery(options, refuse=lambda _: "", warn=lambda _: None).first()
    except DiscoveryError as error:
        return [Line(False, str(error))]
    if not hosts:
        return [Line(False, "none is named", "see -H, --hostfile, --host-discovery-script")]
    turn = asyncio.Semaphore(_AT_ONCE)

    async def line(number: int, host: str) -> Line:
        async with turn:
            return await _host_line(host, options, Path(directory, str(number)))

    # Not gather: at a cancellation it does not wait for the others' ends.
    asking = [asyncio.ensure_future(line(number, host.name)) for number, host in enumerate(hosts)]
    try:
        await asyncio.wait(asking)
    finally:
        for one in asking:
            one.cancel()
        await asyncio.wait(asking)
    return [one.result() for one in asking]


async def _host_line(host: str, options: Options, log: Path) -> Line:
    if is_this_machine(host):
        return Line(True, f"{host}: this machine")
    if reason := refuse(host):
        return Line(False, reason)
    python = options.remote_python or sys.executable
    needed = {"torch": "torch"} | ({"mpi4py": "'elasticstate[mpi]'"} if options.backend == "mpi" else {})
    command = ssh_command(host, python, options, log, ("-c", _ASK, str(Path.cwd()), *needed))
    limit_s = 2 * options.connect_timeout_s  # ssh has its own for the connection; then Python has to answer
    try:
        answer = await processes.ask(shlex.join(command), limit_s, whole_session=True)
    except TimeoutError:
        return Line(False, f"{host}: has not answered within {limit_s:g} s", "see --connect-timeout")
    except OSError as error:
        return Line(False, f"{host}: ssh cannot be run: {error.strerror}")
    return judge(host, python, answer, version(), needed, lambda code: how_ssh_ended(code, host, python, log))


def judge(
    host: str,
    python: str,
    answer: processes.Answer,
    ours: str,
    needed: Mapping[str, str],
    how: Callable[[int], str],
) -> Line:
    """What a host has answered. ``ours``: the version here; ``needed``: modules, and what to install for them; ``how``
    says in words how ssh has ended."""
    if "No module named 'elasticstate'" in answer.stderr:
        return Line(
            False, f"{host}: {python} there has no elasticstate", "pip install it there, or see --remote-python"
        )
    if answer.exit_code != 0:
        said = last_line(answer.stderr) if answer.exit_code < 126 else ""  # that is the shell, or ssh: see ``how``
        return Line(False, f"{host}: {how(answer.exit_code)}" + (f": {said}" if said else ""))
    try:
        told = json.loads(last_line(answer.stdout))
        text = f"{host}: elasticstate {told['version']}, Python {told['python']}, {told['slots']} slots"
        has_directory, absent = bool(told["has_directory"]), [name for name in needed if not told["has"][name]]
    except (ValueError, KeyError, TypeError):
        return Line(False, f"{host}: {python} there has not answered as Python does", "see --remote-python")
    if told["version"] != ours:
        return Line(False, text, f"it is {ours} here: install the same there")
    if absent:
        remedy = f"pip install {needed[absent[0]]} there, or see --remote-python"
        return Line(False, f"{text}: no {absent[0]}", remedy)
    if not has_directory:
        return Line(False, f"{text}: no {Path.cwd()}", "workers need the same working directory there")
    return Line(True, text)
