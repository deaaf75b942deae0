"""Layouts of generations: which shards each slot holds. Frozen values; the rules for them are in line.py."""

from __future__ import annotations

from math import inf

from msgspec import Struct

from elasticstate.core.ids import CommitId, SlotId


class ShardLayout(Struct, frozen=True, gc=False):
    """Shards of a generation: the digest of each slot of its world. All members have attached."""

    generation: int
    digests: tuple[tuple[SlotId, int], ...]


class Replication(Struct, frozen=True, gc=False):
    """Replication in progress of one commit."""

    commit: CommitId
    copies: frozenset[tuple[SlotId, str]]  # all of them: slot, and host that keeps the copy
    missing: frozenset[tuple[SlotId, str]]  # those that are not reported yet
    since: float


class Shards(Struct, frozen=True, gc=False):
    """State of a sharded job. Without a layout the job is not sharded."""

    layouts: tuple[ShardLayout, ...] = ()  # of the generations whose commits may be the line, the newest last
    line: CommitId | None = None  # newest commit that all members of the newest world are known to have sealed
    line_at: float = -inf  # when that became known
    replicated: CommitId | None = None  # newest commit whose replication is complete
    replicated_at: float = -inf
    forgotten: CommitId | None = None  # connected agents keep no copies of older commits, except of ``replicated``
    replication: Replication | None = None
    failures: int = 0  # replications in a row that were given up
    trouble: str = ""  # why the last of them was given up
    not_before: float = -inf  # no replication begins before this time
    refusals: tuple[tuple[str, float], ...] = ()  # hosts that refused a copy, and until when others come first
