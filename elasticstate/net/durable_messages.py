"""Messages about durable copies, between driver and agents."""

from __future__ import annotations

from elasticstate.core.types import CommitId, SlotId
from elasticstate.net.worker_messages import Message


class DurablePart(Message, frozen=True):
    """A commit of a slot, of this or another host, that becomes a part of a durable copy."""

    slot: SlotId
    number: int  # of the part, from 1 on
    digest: int  # of its shards; 0: a replicated state


class SaveDurable(Message, frozen=True):
    """Save commits that this host holds as parts of a durable copy. The agent answers with DurableSaved or
    DurableFailed. If these are all parts, the copy is complete then."""

    folder: str  # name of the copy
    parts: tuple[DurablePart, ...]
    total: int  # parts of the copy
    world_size: int
    first: CommitId | None = None  # save the first commit from this one on; None: the newest one of the only part
    earlier: tuple[str, ...] = ()  # the newest copy that this job has saved
    saved: CommitId | None = None  # the commit in that copy: there is nothing to do if it is still the newest


class CompleteDurable(Message, frozen=True):
    """Complete a durable copy whose parts are all saved. The agent answers with DurableSaved or DurableFailed."""

    folder: str
    commit: CommitId
    total: int
    world_size: int
    earlier: tuple[str, ...] = ()


class DropDurable(Message, frozen=True):
    """The durable copy has failed on another host: save no more of it. There is no answer."""

    folder: str


class DurableSaved(Message, frozen=True):
    """The parts of a durable copy on this host are saved, or it is complete. Answer to SaveDurable and
    CompleteDurable."""

    folder: str
    commit: CommitId
    bytes: int
    seconds: float  # since the order arrived
    lost: str = ""  # what is wrong with the newest earlier copy of this job
    warning: str = ""


class DurableFailed(Message, frozen=True):
    """A durable copy could not be saved: another answer to these. ``kind``: see durable/failure.py."""

    folder: str
    kind: str
    reason: str
