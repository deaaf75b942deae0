"""What a state knows of the world it lives in."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from elasticstate.core.types import CommitId


class Session(Protocol):
    """What a state needs to know of the world it lives in. ``run`` binds one."""

    @property
    def generation(self) -> int:
        """0: no world yet."""

    @property
    def ticks(self) -> int:
        """Ticks completed in this generation."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def root(self) -> int:
        """The rank that sends its state to those who lack it."""

    @property
    def lacking(self) -> tuple[int, ...]:
        """Ranks that need the root's state."""

    @property
    def verify_sync(self) -> bool:
        """Whether each sync ends with a check."""

    @property
    def worker_key(self) -> str:
        """This worker's own id, unlike any other's."""

    def commit_id(self) -> CommitId:
        """The id of a commit made at the end of the present tick: (generation, ticks + 1)."""

    def tick(self) -> None:
        """End the tick. Raises HostsUpdatedInterrupt or CollectiveError when this generation ends here."""

    def progress(self) -> None:
        """Let the agent know that this worker gets on, though it ends no tick."""

    def sealed(self, commit: CommitId | None, previous: CommitId | None, /) -> None:
        """Take note of the ids of both buffers."""

    def synced(self, size_bytes: int, seconds: float, /) -> None:
        """Take note of a state that was sent or received."""

    def process_group_for(self, ranks: tuple[int, ...], /) -> dist.ProcessGroup | None:
        """A group of exactly these ranks, ascending; None: the default group. Called by these ranks only."""


class Alone:
    """The session of a state without ``run``."""

    generation = 0
    rank = 0
    size = 1
    root = 0
    lacking: tuple[int, ...] = ()
    verify_sync = False
    worker_key = "alone"

    def __init__(self) -> None:
        self.ticks = 0
        self._saves = 0

    def commit_id(self) -> CommitId:
        return CommitId(0, self._saves + 1)

    def tick(self) -> None:
        self.ticks += 1

    def progress(self) -> None:
        """Nobody watches."""

    def sealed(self, commit: CommitId | None, previous: CommitId | None) -> None:
        if commit is not None:
            self._saves = commit.tick

    def synced(self, size_bytes: int, seconds: float) -> None:
        raise AssertionError("nothing is sent outside a world")

    def process_group_for(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        raise AssertionError("nothing is sent outside a world")
