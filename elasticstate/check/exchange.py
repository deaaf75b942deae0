"""Report lines for the network between the hosts: an all-reduce over Gloo, in processes that are started as agents are.

See worker/probe_hosts.py.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elasticstate import processes
from elasticstate.check.report import Line, last_line
from elasticstate.launchers import HostLaunchers
from elasticstate.launchers.command import CommandLauncher
from elasticstate.net.names import address_towards, free_port, outward_address, own_addresses
from elasticstate.options import Options, passed_on
from elasticstate.threads import in_thread

_PROGRAM = "elasticstate.worker.probe_hosts"
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
        arguments = ("-m", _PROGRAM, json.dumps(told))
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
