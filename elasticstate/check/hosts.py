"""Report lines for the named hosts. The check connects to each host by the command that would start its agent."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from elasticstate import processes
from elasticstate.backends import driver_part
from elasticstate.check import Line, last_line
from elasticstate.discovery import Discovery, host_source
from elasticstate.errors import DiscoveryError
from elasticstate.launchers import HostLaunchers, LocalLauncher
from elasticstate.launchers.command import SAME_PYTHON, CommandLauncher
from elasticstate.machine import version
from elasticstate.net.names import address_towards, free_port, outward_address, own_addresses
from elasticstate.options import Options, passed_on
from elasticstate.threads import in_thread

_PROGRAM = ("-m", "elasticstate.worker.probe", "hosts")
_TIMEOUT_S = 60.0  # a probe ends earlier; this includes the import of torch
_RESOLVER_TIMEOUT_S = 2.0
_LATER_S = 3.0  # from one error to the next one that may name the cause
_VARIABLE = "GLOO_SOCKET_IFNAME"


async def exchange_lines(hosts: Sequence[str], launchers: HostLaunchers, options: Options, log: Path) -> list[Line]:
    """Let these hosts run an all-reduce. Return one line if it works, else one for each host with an error.

    ``log``: beginning of the paths for log files of launchers.
    """
    here = outward_address()
    with suppress(TimeoutError):  # of a resolver that does not answer
        here = await asyncio.wait_for(in_thread(address_towards, tuple(hosts)), _RESOLVER_TIMEOUT_S)
    servers = list(dict.fromkeys(filter(None, [here, *own_addresses()])))
    port = free_port()
    variables = {name: value for name, value in passed_on(options.env) if name == _VARIABLE}

    async def probe(rank: int, host: str) -> tuple[str, bool]:
        """Return the error of a probe, and True if it may be the cause of the others' errors."""
        launcher = launchers.of(host) if host else None
        is_here = launcher is None or launcher.is_local
        told: dict[str, object] = {"rank": rank, "size": len(hosts), "port": port}
        if rank >= 0:
            told |= {"host": host, "servers": servers, "address": here if is_here else "", "variables": variables}
            told["interfaces"] = options.network_interface
        arguments = (*_PROGRAM, json.dumps(told))
        if isinstance(launcher, CommandLauncher) and not is_here:
            command = launcher.command(host, arguments, log.with_name(f"{log.name}-{rank}"), f"exchange-{rank}")
        else:
            command = [sys.executable, *arguments]
        try:
            answer = await processes.ask(shlex.join(command), _TIMEOUT_S, whole_session=True)
            found = json.loads(last_line(answer.stdout))
            return found["error"], found["is_cause"]
        except TimeoutError:
            return f"no answer within {_TIMEOUT_S:g} s", True
        except OSError as error:
            return f"{command[0]} cannot be run: {error.strerror}", True
        except (ValueError, KeyError, TypeError):
            return last_line(answer.stderr) or "the process ended without an answer", True

    probes = [asyncio.ensure_future(probe(rank, host)) for rank, host in enumerate(("", *hosts), start=-1)]
    try:
        running, has_failed = set(probes), False
        while running:
            limit_s = _LATER_S if has_failed else None  # the others wait for the one that has failed
            ended, running = await asyncio.wait(running, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                break
            has_failed = has_failed or any(one.result()[0] for one in ended)
    finally:
        for one in probes:
            one.cancel()
        await asyncio.wait(probes)
    (server, _), *answers = [("", False) if one.cancelled() else one.result() for one in probes]
    failed = [(host, *answer) for host, answer in zip(hosts, answers, strict=True) if answer[0]]
    if not failed:
        return [Line(True, f"Gloo: an all-reduce between these {len(hosts)} hosts")]
    if server:
        return [Line(False, f"Gloo between the hosts: the store on this machine failed: {server}")]
    causes = [(host, error) for host, error, is_cause in failed if is_cause]
    shown = causes or [(host, error) for host, error, _ in failed]
    return [Line(False, f"Gloo between the hosts: {host}: {error}") for host, error in shown]


_MOST_CONNECTIONS = 64  # connections at the same time
_ASK = """\
import importlib.util as u, json, os, sys
from elasticstate.machine import slots_of_this_machine, version
print(json.dumps(dict(version=version(), python="%d.%d.%d" % sys.version_info[:3], slots=slots_of_this_machine(),
    has_directory=os.path.isdir(sys.argv[1]), has={name: u.find_spec(name) is not None for name in sys.argv[2:]})))
"""


async def host_lines(options: Options, directory: str) -> tuple[list[Line], list[Line]]:
    """Return a line for each named host, in that order, and the lines for the network between them.

    ``directory``: for the log files of launchers.

    Raises OptionError.
    """
    launchers = HostLaunchers(options)
    try:
        hosts = await Discovery(host_source(options), refuse=lambda _: "", warn=lambda _: None).first()
    except DiscoveryError as error:
        return [Line(False, str(error))], []
    if not hosts:
        return [Line(False, "no host is named", "use -H, --hostfile or --host-discovery-script")], []
    limit = asyncio.Semaphore(_MOST_CONNECTIONS)

    async def line(number: int, host: str) -> Line:
        async with limit:
            return await _host_line(host, launchers, options, Path(directory, str(number)))

    # Not asyncio.gather: after a cancellation it does not wait for the end of the other tasks.
    asking = [asyncio.ensure_future(line(number, host.name)) for number, host in enumerate(hosts)]
    try:
        await asyncio.wait(asking)
    finally:
        for one in asking:
            one.cancel()
        await asyncio.wait(asking)
    lines = [one.result() for one in asking]
    usable = [host.name for host, line in zip(hosts, lines, strict=True) if line.is_available]
    usable = [host for host in usable if isinstance(launchers.of(host), LocalLauncher | CommandLauncher)]
    if options.backend == "mpi" or len(usable) < 2 or all(launchers.of(host).is_local for host in usable):
        return lines, []
    return lines, await exchange_lines(usable[:_MOST_CONNECTIONS], launchers, options, Path(directory, "exchange"))


async def _host_line(host: str, launchers: HostLaunchers, options: Options, log: Path) -> Line:
    launcher = launchers.of(host)
    if reason := launcher.refuse(host):
        return Line(False, reason)
    if launcher.is_local:
        return Line(True, f"{host}: this machine")
    if not isinstance(launcher, CommandLauncher):
        return Line(True, f"{host}: agents are started by {type(launcher).__name__}; not checked")
    needed = {"torch": "torch"} | driver_part(options.backend).packages
    command = launcher.command(host, ("-c", _ASK, str(Path.cwd()), *needed), log, "check")
    limit_s = 2 * options.connect_timeout_s  # ssh has a limit of its own for the connection; then Python has to answer
    try:
        answer = await processes.ask(shlex.join(command), limit_s, whole_session=True)
    except TimeoutError:
        return Line(False, f"{host}: no answer within {limit_s:g} s", "check the network, or raise --heartbeat-timeout")
    except OSError as error:
        return Line(False, f"{host}: {command[0]} cannot be run: {error.strerror}")
    return judge(host, launcher.python, answer, version(), needed, lambda code: launcher.how_ended(host, code, log))


def judge(
    host: str,
    python: str,
    answer: processes.Answer,
    version_here: str,
    needed: Mapping[str, str],
    how: Callable[[int], str],
) -> Line:
    """Return the line for a host's answer.

    ``version_here``: the version of elasticstate here. ``needed``: required modules, and what to install for them.
    ``how``: returns the description of an exit code of the command that connects.
    """
    if "No module named 'elasticstate'" in answer.stderr:
        return Line(
            False,
            f"{host}: {python} on that host has no elasticstate",
            "pip install elasticstate there",
        )
    if answer.exit_code != 0:
        # Exit codes from 126 on come from the shell or ssh: ``how`` explains them.
        error = last_line(answer.stderr) if answer.exit_code < 126 else ""
        return Line(False, f"{host}: {how(answer.exit_code)}" + (f": {error}" if error else ""))
    try:
        facts = json.loads(last_line(answer.stdout))
        text = f"{host}: elasticstate {facts['version']}, Python {facts['python']}, {facts['slots']} slots"
        has_directory, absent = bool(facts["has_directory"]), [name for name in needed if not facts["has"][name]]
    except (ValueError, KeyError, TypeError):
        return Line(False, f"{host}: {python} on that host is not a working Python", SAME_PYTHON)
    if facts["version"] != version_here:
        return Line(False, text, f"the version here is {version_here}: install the same version there")
    if absent:
        remedy = f"pip install {needed[absent[0]]} there"
        return Line(False, f"{text}: no {absent[0]}", remedy)
    if not has_directory:
        return Line(False, f"{text}: no {Path.cwd()}", "workers need the same working directory there")
    return Line(True, text)
