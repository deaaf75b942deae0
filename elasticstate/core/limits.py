"""Limits on the slots that discovery may name, so that a mistyped number costs a warning and not the driver.

A step of the core costs time for each slot. The limits leave spare slots and hosts beyond ``--max-np``: those replace
slots and hosts that fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticstate.core.types import HostSlots

MAX_SLOTS_OF_HOST = 1024
MAX_SLOTS = 65_536


def within_limits(hosts: Sequence[HostSlots], max_np: int | None) -> tuple[dict[str, int], str]:
    """Return the slots to use on each host, in discovery's order, and a warning ("" if discovery keeps to the limits).

    The first line of a host counts. A larger ``max_np`` raises both limits.
    """
    most_of_host, vacancies = max(MAX_SLOTS_OF_HOST, max_np or 0), max(MAX_SLOTS, max_np or 0)
    named: dict[str, int] = {}
    for host in hosts:
        named.setdefault(host.name, max(0, host.slots))
    found: dict[str, int] = {}
    for name, slots in named.items():
        if vacancies == 0:
            break
        found[name] = min(slots, most_of_host, vacancies)
        vacancies -= max(1, found[name])
    return found, _warning(named, found)


def _warning(named: dict[str, int], found: dict[str, int]) -> str:
    cut = {name: slots for name, slots in named.items() if slots > found.get(name, 0)}
    if not cut:
        return ""
    where = f"host {next(iter(cut))}" if len(cut) == 1 else f"{len(named)} hosts"
    named_slots = sum((cut if len(cut) == 1 else named).values())
    used = sum(found.get(name, 0) for name in (cut if len(cut) == 1 else named))
    return (
        f"discovery names {named_slots} slots on {where}: the job uses the first {used} of them. "
        "A larger --max-np raises this limit."
    )
