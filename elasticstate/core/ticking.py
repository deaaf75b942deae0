"""Record of the ticks of the present world, for the detection of standstills (standstill.py)."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from msgspec import Struct

from elasticstate.core.collectives import CollectivesReport


class Standstill(Struct, frozen=True, gc=False):
    """A time in which no member completes a tick, and that is far longer than a usual tick."""

    since: float  # when the last member moved: ended a tick, began to train, or reported progress
    ticks: int  # completed before it
    asked_at: float  # when the members were asked where they are
    reports: Mapping[int, CollectivesReport] = {}  # by rank, until the report is complete
    text: str = ""  # where the members are; "": not reported yet


class Ticking(Struct, frozen=True, gc=False):
    """Ticks of the present world, as far as reported."""

    completed: int = 0  # the most of any member
    at: float = -inf  # when ``completed`` was first reported; before that, when the world began
    times: tuple[float, ...] = ()  # mean times of the last ticks between two reports, over all worlds
    standstill: Standstill | None = None
