"""Copies of commits of sharded jobs: where workers read shards, and which copies agents keep. See core/line.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from elasticstate.core.ids import CommitId, SlotId, WorkerId


class CopyFigures(NamedTuple):
    """Copies of one host, or of several. The bytes for replication count since the agent has started."""

    memory_bytes: int = 0  # of complete and incomplete copies, and of files for the next ones
    sent_bytes: int = 0
    received_bytes: int = 0


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


@dataclass(frozen=True, slots=True)
class ShardsAttached:
    """All members of the worker's world have attached their shards, and have sealed them as ``(generation, 0)``.

    ``digests``: of the shards of each member, by rank.
    """

    worker: WorkerId
    generation: int
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyKept:
    """The agent of ``host`` keeps a copy of the commit of ``slot``, complete and verified."""

    host: str
    slot: SlotId
    commit: CommitId


@dataclass(frozen=True, slots=True)
class CopyDropped:
    """The agent of ``host`` has no such copy: the copy is damaged, could not be made, or was refused."""

    host: str
    slot: SlotId
    commit: CommitId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CommitDamaged:
    """The commit in a buffer of ``slot`` has a wrong checksum: the agent of its host has read it."""

    slot: SlotId
    commit: CommitId


@dataclass(frozen=True, slots=True)
class Replicate:
    """Make the copies of a commit that are missing: of each of these slots, on this host. A slot's own host copies its
    buffer."""

    commit: CommitId
    copies: tuple[tuple[SlotId, str], ...]


@dataclass(frozen=True, slots=True)
class StopReplication:
    """All agents cancel their last order to replicate a commit, and keep the copies that exist."""


@dataclass(frozen=True, slots=True)
class ForgetCopies:
    """Agents remove the kept copies of commits older than ``before``, except those of ``besides``, and accept no more
    copies of commits older than ``before``.

    ``host``: only the agent of this host; "": all.
    """

    before: CommitId
    besides: CommitId | None = None
    host: str = ""


CopyEvent = ShardsAttached | CopyKept | CopyDropped | CommitDamaged
CopyEffect = Replicate | StopReplication | ForgetCopies
