"""Lists of hosts as text: one ``host`` or ``host:slots`` on each line, perhaps followed by ``rack=NAME``."""

from __future__ import annotations

from elasticstate.core.ids import HostSlots, without_case
from elasticstate.discovery import DiscoveryFault, Hosts
from elasticstate.machine import slots_of_this_machine
from elasticstate.options import Options
from elasticstate.options.kinds import parse_host


def default_slots(options: Options) -> int:
    """Return the slots of a host that is named without slots (``--slots-per-host``)."""
    return 1 if options.slots_per_host is None else options.slots_per_host or slots_of_this_machine()


def parse_hosts(text: str, default_slots: int) -> Hosts:
    """Read one host per line; ``#`` begins a comment. Raises DiscoveryFault.

    The slots of repeated names are added. Names have no case; the first spelling counts.
    """
    found: dict[str, HostSlots] = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line:
            try:
                name, slots, rack = parse_host(line, default_slots)
            except ValueError as error:
                raise DiscoveryFault("malformed", f"{error}. Name one host on each line") from None
            name, earlier, known = found.get(without_case(name), HostSlots(name, 0))
            if rack and known and rack != known:
                raise DiscoveryFault("malformed", f"host {name} is in rack {known} and in rack {rack}. Name one rack")
            found[without_case(name)] = HostSlots(name, earlier + slots, known or rack)
    return tuple(found.values())
