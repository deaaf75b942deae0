"""Session: a state's view of the present world."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch.distributed as dist

from elasticstate.core.types import CommitId, ShardSource
from elasticstate.errors import UsageError
from elasticstate.options import refusal_of_other_launchers, worker_environment
from elasticstate.state.reshard import CopyReader

FAILED_COLLECTIVE = (
    "a collective of this world has failed, and the script has caught its error, so this step was not trained on all "
    "ranks"
)


class HeldCommits(NamedTuple):
    """The commits that a worker holds."""

    newest: CommitId | None
    previous: CommitId | None
    size_bytes: int
    """Size of the newest one; 0 if there is none."""
    to_come: Callable[[], int | None]
    """Return the bytes that the first steps of optimizers will add to it; None: not known."""


class Session(Protocol):
    """The interface through which a state uses its world. ``run`` binds a session."""

    @property
    def generation(self) -> int:
        """Number of the present generation; 0 before the first world."""

    @property
    def ticks(self) -> int:
        """Ticks completed in this generation."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def root(self) -> int:
        """Rank that sends its state to the ranks that lack it."""

    @property
    def lacking(self) -> tuple[int, ...]:
        """Ranks that need the root's state."""

    @property
    def near(self) -> tuple[int, ...]:
        """Those of ``lacking`` that read a commit from the memory of their host. See state/peer.py."""

    @property
    def root_slot(self) -> int:
        """Slot of the root on its host."""

    @property
    def one_copy(self) -> bool:
        """True if one worker of each host keeps commits, from which the others there restore."""

    @property
    def follows(self) -> int | None:
        """Slot of the worker of this host whose commits this worker restores; None: it keeps commits of its own."""

    def check(self) -> None:
        """Raise CollectiveError if the generation is over."""

    @property
    def verify_sync(self) -> bool:
        """True if each sync ends with a check."""

    @property
    def records_ticks(self) -> bool:
        """True if ticks without a commit are recorded, so that a failure repeats none."""

    @property
    def line(self) -> CommitId | None:
        """The commit from which this world starts. None: no values are attached, or nothing is committed yet."""

    @property
    def sources(self) -> tuple[tuple[ShardSource, str], ...]:
        """Copies of ``line`` in the order in which to try them, each with the "ip:port" of its copy server."""

    def record_attached(self, digests: tuple[int, ...], /) -> None:
        """Record that all ranks have attached values whose shards have these digests, and sealed (generation, 0)."""

    def copy_reader(self) -> CopyReader:
        """Return the reader of the copies in ``sources``."""

    @property
    def worker_key(self) -> str:
        """Unique id of this worker."""

    def commit_id(self) -> CommitId:
        """Return the id of a commit made at the end of the present tick: (generation, ticks + 1)."""

    def has_ended(self, generation: int) -> bool:
        """Return True if ``generation`` is over, so that its collectives may have been cut. Safe on any thread."""

    def tick(self) -> None:
        """End the tick. Raises HostsUpdatedInterrupt or CollectiveError when this generation ends here."""

    def check_collectives(self) -> None:
        """Raise CollectiveError if a collective of this generation has failed, whatever caught its error.

        Also raise again what a tick of this generation has raised. Call it before a commit and before a tick.
        """

    @property
    def has_peers(self) -> bool:
        """True inside a world with other ranks: all of them must restore the same commit."""

    def restore_group(self) -> dist.ProcessGroup | None:
        """Return a group of all ranks for the restores of the training function; None outside of it, where each rank
        restores by itself."""

    def progress(self) -> None:
        """Report progress to the agent without ending a tick."""

    def record_commits(self, held: HeldCommits, /) -> None:
        """Record which commits this worker holds now."""

    def record_commit_time(self, seconds: float, /) -> None:
        """Record time that a tick has spent in a commit."""

    def record_sync(self, size_bytes: int, seconds: float, /) -> None:
        """Record a state that was sent or received."""

    def process_group_for(self, ranks: tuple[int, ...], /) -> dist.ProcessGroup | None:
        """Return a group of exactly these ranks, ascending; None is the default group. Only these ranks call it."""


class SoloSession:
    """Session of a state without ``run``, for plain ``python train.py``. Raises UsageError under elasticrun."""

    generation = 0
    rank = 0
    size = 1
    root = 0
    lacking: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    root_slot = 0
    one_copy = False
    follows: int | None = None
    line: CommitId | None = None
    sources: tuple[tuple[ShardSource, str], ...] = ()
    verify_sync = False
    records_ticks = False  # a failure ends this process, and there are no others
    has_peers = False
    worker_key = "alone"

    def __init__(self) -> None:
        self.ticks = 0
        self._saves = 0
        self._is_worker = worker_environment() is not None
        self._refusal = refusal_of_other_launchers()

    def commit_id(self) -> CommitId:
        self._refuse_launchers()
        return CommitId(0, self._saves + 1)

    def has_ended(self, generation: int) -> bool:
        return False

    def check(self) -> None:
        """Do nothing: there is no generation."""

    def check_collectives(self) -> None:
        """Do nothing: no collective of one process fails."""

    def tick(self) -> None:
        self._refuse_launchers()
        self.ticks += 1

    def _refuse_launchers(self) -> None:
        """Raise UsageError where several processes would each train a model of their own.

        The other processes would not receive the commit or the tick.
        """
        if self._is_worker:
            raise UsageError(
                "A state was committed, synced or ticked outside a function decorated with @elasticstate.run, so each "
                "worker of elasticrun would train its own model. Put the training into a function decorated with "
                "@elasticstate.run, and pass this state to the function."
            )
        if self._refusal and not dist.is_initialized():
            raise UsageError(self._refusal)

    def progress(self) -> None:
        """Do nothing: no agent monitors this process."""

    def record_commits(self, held: HeldCommits) -> None:
        if held.newest is not None:
            self._saves = held.newest.tick

    def record_attached(self, digests: tuple[int, ...]) -> None:
        """Do nothing: there is no other world, so nobody reads the shards."""

    def copy_reader(self) -> CopyReader:
        raise AssertionError("there are no copies outside a job")

    def record_commit_time(self, seconds: float) -> None:
        """Do nothing: there is no driver."""

    def record_sync(self, size_bytes: int, seconds: float) -> None:
        raise AssertionError("nothing is sent outside a world")

    def restore_group(self) -> dist.ProcessGroup | None:
        return None

    def process_group_for(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        raise AssertionError("nothing is sent outside a world")
