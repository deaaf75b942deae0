"""What things are called: commits, slots, workers, hosts. Without any import, so that the options can name them."""

from __future__ import annotations

from typing import NamedTuple


class CommitId(NamedTuple):
    """Names a commit: the generation and the tick it was made at. Compared in that order.

    ``(g, 0)`` is what ``sync()`` seals when generation ``g`` begins; the user's commits have ``tick >= 1``.
    """

    generation: int
    tick: int

    def __str__(self) -> str:
        return f"({self.generation}, {self.tick})"


class SlotId(NamedTuple):
    """One seat on a host: a device index."""

    host: str
    slot: int

    def __str__(self) -> str:
        return f"{self.host}:{self.slot}"


class WorkerId(NamedTuple):
    """One process in a slot. ``incarnation`` counts the processes that the slot has had, from 1."""

    host: str
    slot: int
    incarnation: int

    @property
    def seat(self) -> SlotId:
        return SlotId(self.host, self.slot)

    def __str__(self) -> str:
        return f"{self.host}:{self.slot}#{self.incarnation}"


class HostSlots(NamedTuple):
    """What discovery says of a host: its name and how many workers it takes."""

    name: str
    slots: int
