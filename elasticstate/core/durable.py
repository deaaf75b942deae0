"""Durable copies, as far as the core knows them: where a world without a usable commit gets its state."""

from __future__ import annotations

from dataclasses import dataclass

from elasticstate.core.ids import CommitId
from elasticstate.core.message import Message


@dataclass(frozen=True, slots=True)
class DurableCopySaved:
    """A durable copy of this commit is complete."""

    commit: CommitId


class DurableSource(Message, frozen=True):
    """Storage with durable copies, from which a world starts: from the newest one that is intact.

    ``is_required``: the job has committed, so it must not begin anew. ``is_sharded``: members hold commits with shards
    that are no use, so only a copy of a sharded state will do.
    """

    place: str  # path or URL
    timeout_s: float  # without progress
    is_required: bool
    is_sharded: bool = False
