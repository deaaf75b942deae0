"""A program that prints a list of hosts."""

from __future__ import annotations

from elasticstate.discovery import DiscoveryFault, Hosts, HostSource
from elasticstate.discovery.host_lines import default_slots, parse_hosts
from elasticstate.exit_status import how_it_ended
from elasticstate.options import Options
from elasticstate.processes import as_command, ask


class DiscoveryScript(HostSource):
    """The hosts that ``--host-discovery-script`` prints. It runs at each call."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._command = options.host_discovery_script or ""
        self._timeout_s = options.discovery_timeout_s
        self._default_slots = default_slots(options)

    async def hosts(self) -> Hosts:
        return parse_hosts(await run_script(self._command, self._timeout_s), self._default_slots)


async def run_script(command: str, timeout_s: float) -> str:
    """Return the output of a shell command. It runs in a session of its own, and is killed with its children.

    Raises DiscoveryFault.
    """
    try:
        answer = await ask(as_command(command), timeout_s)
    except TimeoutError:
        raise DiscoveryFault(
            "timeout", f"{command} did not end within {timeout_s:g} s (see --discovery-interval)"
        ) from None
    except PermissionError as error:
        raise DiscoveryFault(
            "failed", f"{command} could not be started: {error}. Make the file executable: chmod +x {command}"
        ) from None
    except (OSError, ValueError) as error:
        raise DiscoveryFault("failed", f"{command} could not be started: {error}") from None
    if answer.exit_code != 0:
        output = answer.stderr.strip() or "no output on stderr"
        raise DiscoveryFault("failed", f"{command} {how_it_ended(answer.exit_code)}: {output}")
    return answer.stdout
