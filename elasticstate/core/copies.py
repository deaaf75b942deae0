"""Copies of commits, from which workers read the shards that they do not hold."""

from __future__ import annotations

from dataclasses import dataclass

from elasticstate.core.ids import CommitId, SlotId


@dataclass(frozen=True, slots=True)
class CopyOf:
    """Copy of the commit of a slot, in the memory of a host: the slot's own buffer there, or a kept copy."""

    host: str
    slot: SlotId
    commit: CommitId


@dataclass(frozen=True, slots=True)
class ShardSource:
    """Copy from which a worker may read the shards that belong to a digest."""

    digest: int  # of the shards; equal digests: the same shards
    copy: CopyOf
