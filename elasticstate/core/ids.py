"""Identifiers of commits, slots, workers and hosts. No imports from elasticstate, so that the options can use them."""

from __future__ import annotations

from typing import NamedTuple


class CommitId(NamedTuple):
    """Identifier of a commit: the generation and the tick at which the commit was made, compared in this order.

    ``sync()`` seals ``(g, 0)`` when generation ``g`` begins. The user's commits have ``tick >= 1``.
    """

    generation: int
    tick: int

    def __str__(self) -> str:
        return f"({self.generation}, {self.tick})"


class SlotId(NamedTuple):
    """Identifier of one slot on a host: a device index."""

    host: str
    slot: int

    def __str__(self) -> str:
        return f"{self.host}:{self.slot}"


class WorkerId(NamedTuple):
    """Identifier of one process in a slot. ``incarnation`` counts the processes of the slot, from 1."""

    host: str
    slot: int
    incarnation: int

    @property
    def slot_id(self) -> SlotId:
        return SlotId(self.host, self.slot)

    def __str__(self) -> str:
        return f"{self.host}:{self.slot}#{self.incarnation}"


def without_case(host: str) -> str:
    """Return a host name in the form in which names are compared: they have no case."""
    return host.lower()


class HostSlots(NamedTuple):
    """Discovery's entry for a host: its name, its number of slots, and its rack ("": not known).

    Hosts of one rack may be lost together, so replicas are kept in other racks.
    """

    name: str
    slots: int
    rack: str = ""
