"""Interfaces through which a committer uses its world: ``Session`` and ``Channel``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from elasticstate import present_world
from elasticstate.core.ids import CommitId
from elasticstate.core.types import DigestAnswer, World
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


class Session:
    """The interface through which a state uses its world. ``run`` binds a session.

    This base class serves a function that is called in a world that no other follows: nobody records what it does. Its
    commit ids count the function as a generation of its own. ``worker_key``: unique id of this worker.
    """

    def __init__(self, view: World, worker_key: str) -> None:
        self.view, self.worker_key = view, worker_key
        self._ticks = 0
        self._restore_group: dist.ProcessGroup | None = None

    @property
    def generation(self) -> int:
        """Number of the present generation; 0 before the first world."""
        return self.view.generation

    @property
    def ticks(self) -> int:
        """Ticks completed in this generation."""
        return self._ticks

    @property
    def records_ticks(self) -> bool:
        """True if ticks without a commit are recorded, so that a failure repeats none."""
        return self.view.size > 1 and self.view.options.records_ticks and self.view.follows is None

    @property
    def compares_commits(self) -> bool:
        """True if the driver compares the digests of the commits of all ranks."""
        return False

    @property
    def awaits_verdicts(self) -> bool:
        """True if a commit may be overwritten only when the driver has compared a newer one: see CommitsCompared."""
        return False

    def wait_for_verdict(self, tick: int, meanwhile: Callable[[], object]) -> tuple[int, int] | None:
        """Wait until the driver has compared the commit of this tick, and return ``verdict()``; None if no verdict
        comes. Call ``meanwhile`` now and then. Raises CollectiveError if the generation is over."""
        raise AssertionError("no verdicts are awaited")

    def wait_for_driver(self) -> None:
        """Wait until a driver can send verdicts. Raises CollectiveError if the generation is over."""

    def verdict(self) -> tuple[int, int]:
        """Return the newest tick whose commit is equal on all ranks, and the newest one that was compared."""
        return 0, 0

    @property
    def has_peers(self) -> bool:
        """True inside a world with other ranks: all of them must restore the same commit."""
        return self.view.size > 1

    def check(self) -> None:
        """Raise CollectiveError if the generation is over."""

    def check_collectives(self) -> None:
        """Raise CollectiveError if a collective of this generation has failed, whatever caught its error, and again
        what a tick of this generation has raised. Call it before a commit and before a tick."""

    def has_ended(self, generation: int) -> bool:
        """Return True if ``generation`` is over, so that its collectives may have been cut. Safe on any thread."""
        return False

    def commit_id(self) -> CommitId:
        """Return the id of a commit made at the end of the present tick: (generation, ticks + 1)."""
        return CommitId(self.generation, self.ticks + 1)

    def tick(self) -> None:
        """End the tick. Raises HostsUpdatedInterrupt or CollectiveError when this generation ends here."""
        self._ticks += 1

    def progress(self) -> None:
        """Report progress to the agent without ending a tick."""

    def record_commits(self, held: HeldCommits) -> None:
        """Record which commits this worker holds now."""

    def record_commit_time(self, seconds: float) -> None:
        """Record time that a tick has spent in a commit."""

    def record_sync(self, size_bytes: int, seconds: float) -> None:
        """Record a state that was sent or received."""

    def record_digest(self, start: int, tick: int, digest: int) -> None:
        """Record a digest of the replicated values of this rank's commits: see CommitDigests."""

    def question(self, last: int) -> tuple[int, int, int, int] | None:
        """Return the driver's newest question about such commits, with its number; None: its number is ``last``."""
        return None

    def answer(self, answer: DigestAnswer) -> None:
        """Send the answer."""

    def record_attached(self, digests: tuple[int, ...]) -> None:
        """Record that all ranks have attached values whose shards have these digests, and sealed (generation, 0)."""

    def copy_reader(self) -> CopyReader:
        """Return the reader of the copies in ``sources``."""
        raise AssertionError("this world starts from no copies")

    def restore_group(self) -> dist.ProcessGroup | None:
        """Return a group of all ranks for the restores of the training function; None outside of it."""
        if self._restore_group is None and self.has_peers:
            self._restore_group = self.subgroup(tuple(range(self.view.size)))
        return self._restore_group

    def process_group_for(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return a group of exactly these ranks; None is the default group, of all ranks. Only these ranks call it."""
        return None if len(ranks) == self.view.size else self.subgroup(tuple(sorted(ranks)))

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return a new group of these ranks, ascending, that nobody else uses."""
        raise AssertionError("nothing is sent outside a world")


class SoloSession(Session):
    """Session of a state without ``run``, for plain ``python train.py``. Raises UsageError under elasticrun."""

    def __init__(self) -> None:
        super().__init__(msgspec.structs.replace(present_world.alone(), generation=0), "alone")
        self._saves = 0
        self._is_worker = worker_environment() is not None
        self._refusal = refusal_of_other_launchers()

    def commit_id(self) -> CommitId:
        self._refuse_launchers()
        return CommitId(0, self._saves + 1)

    def tick(self) -> None:
        self._refuse_launchers()
        super().tick()

    def _refuse_launchers(self) -> None:
        """Raise UsageError where several processes would each train a model of their own."""
        if self._is_worker:
            raise UsageError(
                "A state was committed, synced or ticked outside a function decorated with @elasticstate.run, so each "
                "worker of elasticrun would train its own model. Put the training into a function decorated with "
                "@elasticstate.run, and pass this state to the function."
            )
        if self._refusal and not dist.is_initialized():
            raise UsageError(self._refusal)

    def record_commits(self, held: HeldCommits) -> None:
        if held.newest is not None:
            self._saves = held.newest.tick


CHUNK_BYTES = 1 << 30  # size of one broadcast, because the timeout of a process group applies to each collective
FIRST_BYTES = 1 << 15  # of a message travel with its length: a collective costs more than these bytes
_LENGTH_BYTES = 8


class Channel:
    """Broadcasts from one rank of a group, and gathers among all of its ranks.

    ``group``: the process group; None is the default group. ``root``: rank within the group that sends.
    """

    def __init__(self, group: dist.ProcessGroup | None, root: int) -> None:
        chosen = group if group is not None else dist.group.WORLD
        assert chosen is not None, "a generation always has a default process group"
        self._group = chosen
        self._options = dist.BroadcastOptions()
        self._options.rootRank = root

    def broadcast(self, data: torch.Tensor) -> None:
        """Send or receive ``uint8[n]`` in place, one collective for each ``CHUNK_BYTES``."""
        for begin in range(0, data.numel(), CHUNK_BYTES):
            self._broadcast(data[begin : begin + CHUNK_BYTES])

    def send(self, message: bytes) -> None:
        """Broadcast a message: one collective, or more if it is longer than ``FIRST_BYTES``."""
        whole = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        sent = torch.frombuffer(bytearray(whole.ljust(FIRST_BYTES)), dtype=torch.uint8)
        self._broadcast(sent[:FIRST_BYTES])
        self.broadcast(sent[FIRST_BYTES:])

    def receive(self) -> bytes:
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8, device="cpu")
        self._broadcast(first)
        whole = first.numpy().tobytes()
        end = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")
        rest = torch.empty(max(0, end - FIRST_BYTES), dtype=torch.uint8, device="cpu")
        self.broadcast(rest)
        return whole[_LENGTH_BYTES:end] + rest.numpy().tobytes()

    def numbers_of_all(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of each rank, by rank. All ranks pass equally many numbers. One collective."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return [row.tolist() for row in self._gather(mine)]

    def messages_of_all(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank. Two collectives."""
        lengths = [length for (length,) in self.numbers_of_all([len(message)])]
        padded = torch.frombuffer(bytearray(message.ljust(max(lengths))), dtype=torch.uint8)
        rows = self._gather(padded)
        return [row.numpy().tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]

    def _broadcast(self, data: torch.Tensor) -> None:
        self._group.broadcast([data], self._options).wait()

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._group.allgather([rows], [mine]).wait()
        return rows


def channel_of_all(session: Session, root: int = 0) -> Channel:
    """Return a channel between all ranks of the world."""
    return Channel(session.process_group_for(tuple(range(session.view.size))), root)


def channel_between(session: Session, root: int, lacking: Sequence[int]) -> Channel:
    """Return the channel from the root of a sync to the ranks that lack the state."""
    ranks = taking_part(root, lacking)
    return Channel(session.process_group_for(ranks), ranks.index(root))


def taking_part(root: int, lacking: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of a sync, ascending."""
    return tuple(sorted({root, *lacking}))
