"""Which hosts there are: a fixed list, a hostfile that is read again, or a script that is asked again.

A bad answer changes nothing: a script that fails, takes too long or prints rubbish is believed what it said last, with
one warning for each kind of fault. Only the very first answer has to be good. An empty answer counts when it is given
twice in a row, for files are truncated before they are written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from elasticstate.config import Options
from elasticstate.core.types import HostSlots
from elasticstate.errors import DiscoveryError
from elasticstate.kinds import parse_host
from elasticstate.machine import slots_of_this_machine
from elasticstate.processes import ask

Hosts = tuple[HostSlots, ...]


class Fault(DiscoveryError):
    """One call of discovery gave no answer. ``kind``: what is warned about once."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def parse_hosts(text: str, default_slots: int) -> Hosts:
    """Read one host per line; ``#`` begins a comment. A host named twice has all its slots. Raises Fault."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line:
            try:
                name, slots = parse_host(line, default_slots)
            except ValueError as error:
                raise Fault("rubbish", str(error)) from None
            found[name] = found.get(name, 0) + slots
    return tuple(HostSlots(name, slots) for name, slots in found.items())


async def run_script(command: str, timeout_s: float) -> str:
    """What the script prints. Raises Fault. It runs in a session of its own, and is killed with its children."""
    try:
        answer = await ask(command, timeout_s)
    except TimeoutError:
        raise Fault("timeout", f"{command} took longer than --discovery-timeout of {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        raise Fault("failed", f"{command} cannot be run: {error}") from None
    if answer.exit_code != 0:
        said = answer.stderr.strip() or "and said nothing on stderr"
        raise Fault("failed", f"{command} exited with {answer.exit_code}: {said}")
    return answer.stdout


class Discovery:
    """``first()`` once, then ``changes()`` for ever.

    ``refuse(host)`` says why a host cannot be used, or ""; ``warn`` gets one line for each kind of fault.
    """

    def __init__(self, options: Options, refuse: Callable[[str], str], warn: Callable[[str], None]) -> None:
        self._options = options
        self._refuse = refuse
        self._warn = warn
        self._default_slots = options.slots_per_host or slots_of_this_machine()
        self._last: Hosts = ()
        self._empty_in_a_row = 0
        self._warned: set[str] = set()

    def believe(self, hosts: Hosts) -> None:
        """What another driver was told last; instead of ``first``."""
        self._last = hosts

    async def first(self) -> Hosts:
        """Raises DiscoveryError when there is no good answer."""
        self._last = await self._ask()
        return self._last

    async def changes(self) -> AsyncIterator[Hosts]:
        """Each answer that differs from the last good one. Ends at once where nothing can change any more."""
        can_change = bool(self._options.host_discovery_script or self._options.hostfile)
        is_first = True
        while can_change or is_first:
            is_first = False
            await asyncio.sleep(self._options.discovery_interval_s)
            try:
                answer = await self._ask()
            except Fault as fault:
                self._warn_once(fault)
                continue
            self._empty_in_a_row = 0 if answer else self._empty_in_a_row + 1
            if answer != self._last and (answer or self._empty_in_a_row > 1):
                self._last = answer
                yield answer

    async def _ask(self) -> Hosts:
        hosts = parse_hosts(await self._text(), self._default_slots)
        for host in hosts:
            reason = self._refuse(host.name)
            if reason:
                raise Fault("refused", reason)
        return hosts

    async def _text(self) -> str:
        options = self._options
        if options.listen:
            return ""  # the agents that dial in are the hosts
        if options.host_discovery_script:
            return await run_script(options.host_discovery_script, options.discovery_timeout_s)
        if options.hostfile:
            try:
                return Path(options.hostfile).read_text(errors="replace")
            except OSError as error:
                raise Fault("failed", f"hostfile {options.hostfile}: {error.strerror}") from None
        return "\n".join(options.hosts) or f"localhost:{options.np}"

    def _warn_once(self, fault: Fault) -> None:
        if fault.kind not in self._warned:
            self._warned.add(fault.kind)
            self._warn(f"host discovery: {fault}; the last good answer stands")
