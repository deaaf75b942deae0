"""Host discovery: a fixed list, a hostfile that is read again, or a script that is run again.

A bad answer changes nothing: if a script fails, takes too long or prints invalid lines, its last answer stays valid,
with one warning for each kind of fault. Only the first answer must be good. An empty answer counts when it is given
twice in a row, because files are truncated before they are written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from elasticstate.config import Options
from elasticstate.core.types import HostSlots
from elasticstate.errors import DiscoveryError
from elasticstate.exit_status import how_it_ended
from elasticstate.kinds import parse_host
from elasticstate.machine import slots_of_this_machine
from elasticstate.net.names import learn_full_name
from elasticstate.processes import as_command, ask
from elasticstate.threads import in_thread

Hosts = tuple[HostSlots, ...]


class DiscoveryFault(DiscoveryError):
    """A call of discovery without a valid answer. There is one warning for each ``kind``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def parse_hosts(text: str, default_slots: int) -> Hosts:
    """Read one host per line; ``#`` begins a comment. The slots of repeated names are added. Raises DiscoveryFault."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line:
            try:
                name, slots = parse_host(line, default_slots)
            except ValueError as error:
                raise DiscoveryFault("malformed", f"{error}. Name one host on each line") from None
            found[name] = found.get(name, 0) + slots
    return tuple(HostSlots(name, slots) for name, slots in found.items())


async def run_script(command: str, timeout_s: float) -> str:
    """Return the output of a shell command. It runs in a session of its own, and is killed with its children.

    Raises DiscoveryFault.
    """
    try:
        answer = await ask(as_command(command), timeout_s)
    except TimeoutError:
        raise DiscoveryFault(
            "timeout", f"{command} did not end within --discovery-timeout of {timeout_s:g} s"
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


class Discovery:
    """Source of the hosts. Call ``first()`` once, then iterate over ``changes()``.

    ``refuse(host)`` is called in another thread, and returns why a host cannot be used, or "". ``warn`` gets one line
    for each kind of fault.
    """

    def __init__(self, options: Options, refuse: Callable[[str], str], warn: Callable[[str], None]) -> None:
        self._options = options
        self._refuse = refuse
        self._warn = warn
        self._default_slots = options.slots_per_host or slots_of_this_machine()
        self._last: Hosts = ()
        self._empty_in_a_row = 0
        self._warned: set[str] = set()

    def start_from(self, hosts: Hosts) -> None:
        """Start with the last answer that the previous driver received; used instead of ``first``."""
        self._last = hosts

    async def first(self) -> Hosts:
        """Return the first answer. Raises DiscoveryError when it is bad."""
        self._last = await self._ask()
        return self._last

    async def changes(self) -> AsyncIterator[Hosts]:
        """Yield each answer that differs from the last good one. Ends at once if the hosts are fixed."""
        can_change = bool(self._options.host_discovery_script or self._options.hostfile)
        is_first = True
        while can_change or is_first:
            is_first = False
            await asyncio.sleep(self._options.discovery_interval_s)
            try:
                answer = await self._ask()
            except DiscoveryFault as fault:
                self._warn_once(fault)
                continue
            self._empty_in_a_row = 0 if answer else self._empty_in_a_row + 1
            if answer != self._last and (answer or self._empty_in_a_row > 1):
                self._last = answer
                yield answer

    async def _ask(self) -> Hosts:
        hosts = parse_hosts(await self._text(), self._default_slots)
        reason = await in_thread(self._check, hosts)
        if reason:
            raise DiscoveryFault("refused", reason)
        return hosts

    def _check(self, hosts: Hosts) -> str:
        """Return why one of the hosts cannot be used, or "". Blocks as long as resolver and file system do."""
        learn_full_name(host.name for host in hosts)
        return next(filter(None, (self._refuse(host.name) for host in hosts)), "")

    async def _text(self) -> str:
        options = self._options
        if options.listen:
            return ""  # the agents that dial in are the hosts
        if options.host_discovery_script:
            return await run_script(options.host_discovery_script, options.discovery_timeout_s)
        if options.hostfile:
            try:
                return await in_thread(partial(Path(options.hostfile).read_text, errors="replace"))
            except OSError as error:
                raise DiscoveryFault(
                    "failed", f"hostfile {options.hostfile} could not be read: {error.strerror}"
                ) from None
        return "\n".join(options.hosts) or f"localhost:{options.np + options.spares}"

    def _warn_once(self, fault: DiscoveryFault) -> None:
        if fault.kind not in self._warned:
            self._warned.add(fault.kind)
            self._warn(f"host discovery failed: {fault}; using the last valid answer")
