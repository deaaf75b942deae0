"""CommitWriter: the part of a committer that makes and compares commits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

from elasticstate.commit_header import NO_SHARDING, Sharding
from elasticstate.core.types import CommitId
from elasticstate.errors import CommitStorageError, HostsUpdatedInterrupt, StateError, UsageError
from elasticstate.log import logger
from elasticstate.machine import format_bytes
from elasticstate.state import divergence, order, rng
from elasticstate.state.attached import AttachedValues
from elasticstate.state.channel import Channel
from elasticstate.state.durable_parts import StoredParts
from elasticstate.state.growth import Growth
from elasticstate.state.live_state import LiveState
from elasticstate.state.live_values import LiveValues
from elasticstate.state.peer import Peers
from elasticstate.state.peer_copies import PeerCopies
from elasticstate.state.session import HeldCommits, Session, SoloSession
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.storage import CommitStorage
from elasticstate.state.tick_record import TickRecords
from elasticstate.state.values import Captured


class CommitWriter:
    """Commits of one state: their storage and their order.

    Each commit contains what ``capture`` returns, the random state of this rank, and its shards of the attached values.
    Commit ids ascend, and one id never has two contents.
    """

    def __init__(self, live: LiveState) -> None:
        self._live = live
        self.snapshot = Snapshot()
        self.session: Session = SoloSession()
        self.attached: AttachedValues | None = None  # values of the present world
        self.is_behind = False
        """True if this rank ended ticks without training, as it had no inputs left: other ranks have a newer state."""
        self._peers: PeerCopies | None = None  # of commits of the other workers of this host
        self.is_adopted = False
        """True if the only commit is one that was copied from another worker before the first world."""
        self._stored: StoredParts | None = None  # durable copy of a sharded state, from which this world starts
        self.has_followed = False
        """True if the live state is that of a world in which this worker kept no commits (--one-copy-per-host)."""
        self._compared_generation = 0  # the last world with --one-copy-per-host in which the ranks compared values
        self.begins_world = False
        """True between a sync and the check that follows: this check compares the live values of all ranks."""
        self._must_seal = False  # reset callbacks may have changed the live state since the newest commit
        self._synced_generation = 0
        self._ticks = TickRecords(live.capture, live.quick_capture, live.owned)
        self.begun: CommitId | None = None
        """The last commit of a tick that was begun, sealed or not."""
        self.loaded: dict[str, Any] | None = None
        """Between two calls of ``train``: copies of the states that objects with iterators have loaded, by name."""
        self._has_trained = False  # ``train`` was called in this process
        self.after_tick: Callable[[], None] | None = None  # at the begin of a later call: judges its loops
        self.before_commit: Callable[[], None] | None = None  # while a training function runs: judges its optimizers
        self.before_tick: Callable[[], None] | None = None  # the same

    # ----------------------------------------------------------------------------------------------- storage and world

    def use_storage(self, storage: CommitStorage) -> None:
        """Keep the commits in ``storage`` from now on: hold the commits found there, and forget those made before."""
        self.snapshot.close()
        self.snapshot = Snapshot(storage)

    def use_peers(self, peers: Peers) -> None:
        """Read the commits of other workers of this host from their memory."""
        self._peers = PeerCopies(peers)

    def use_session(self, session: Session) -> None:
        """Use the worlds of ``session``. Forget commits made outside a world: they are not commits of the job."""
        self.settle()
        newest = self.snapshot.newest
        if newest is not None and newest.generation == 0:
            self.snapshot.forget()
        self.session = session

    def reserve(self, size_bytes: int) -> None:
        """Allocate memory for commits of this size now, because fresh memory costs more than the copy into it."""
        self.snapshot.reserve(size_bytes)

    @property
    def commits(self) -> tuple[CommitId | None, CommitId | None]:
        """The ids of the newest commit and of the previous commit; None where there is none."""
        return self.snapshot.newest, self.snapshot.previous

    @property
    def has_own_commit(self) -> bool:
        """True if this rank holds a commit that decides on the job's state: not one that a sync is about to replace."""
        is_replaced = self.is_adopted and self.session.rank in self.session.lacking
        return self.snapshot.newest is not None and not is_replaced

    def use_stored(self, parts: StoredParts | None) -> None:
        """Let the present world start from a durable copy of a sharded state; None: it does not."""
        self._stored = parts

    @property
    def starts_from_shards(self) -> bool:
        """True if the present world starts from the shards of a commit, and no rank sends its state."""
        return self.session.line is not None or self._stored is not None

    @property
    def commit_bytes(self) -> int:
        """Size of the newest commit, in bytes."""
        return self.snapshot.size_bytes

    @property
    def ticks(self) -> int:
        """Ticks completed in this generation."""
        return self.session.ticks

    def progress(self) -> None:
        """Report progress to the agent without ending a tick."""
        self.session.progress()

    # ------------------------------------------------------------------------------------------------- making a commit

    def begin(self) -> None:
        """Begin a commit of the present tick. Tensors on a device are copied in the background after the return.

        A follower makes none (``Session.follows``).

        With attached values it is complete on return: no rank may overwrite the commit before, until all ranks have
        sealed this one, because each holds other shards.

        Raises what ``State.commit`` raises.
        """
        self.session.check_collectives()
        self.settle()
        commit = self.session.commit_id()
        if self.before_commit is not None:
            self.before_commit()
        order.note_commit()
        if self.session.follows is not None:
            return
        self._begin(commit)
        if self.attached is not None:
            self.settle()

    def settle(self) -> None:
        """Wait until the commit that is being copied from a device, if any, is sealed or discarded."""
        if self._peers is not None and self._peers.wait():
            self._record_commits()
        if not self.snapshot.is_settled:
            self.snapshot.settle()
            self._record_commits()

    def seal(self, commit: CommitId) -> None:
        """Save the live state as ``commit``, and wait until the commit is sealed.

        Raises StateError if ``commit`` is not newer than the newest commit, and CollectiveError if the generation ends
        before the commit is copied from a device. Also raises what ``State.commit`` raises.
        """
        self.settle()
        self._begin(commit)
        if not self.snapshot.is_settled:
            try:
                self.snapshot.finish()
            finally:
                self._record_commits()

    def tick(self) -> None:
        """End a tick, after recording a commit whose copy is complete. Raises what ``Session`` raises there.

        A tick without a commit is recorded, so that ``commit_last_tick`` can make the commit after a failure.
        """
        self.session.check_collectives()
        if self.before_tick is not None:
            self.before_tick()
        if self.snapshot.is_copied:
            self.settle()
        if self._peers is not None:
            self._peers.close()  # after the first step: it takes a while to unmap much memory
        self._require_attached()
        if self.attached is None and self.session.records_ticks:
            commit = self.session.commit_id()
            if commit != self.begun:
                self._ticks.record(commit)
        try:
            self.session.tick()
        except HostsUpdatedInterrupt:
            self.settle()  # the script's finally clauses, which run now, may write what is being copied
            raise
        if self.after_tick is not None:
            self.after_tick()

    def commit_last_tick(self) -> None:
        """After a failure: make the last tick a commit, if the live state is proven to be the state of that tick.

        Call it when nothing of the generation can write any more, and restore the newest commit afterwards.
        """
        self.settle()
        taken = self._ticks.take(self.snapshot.newest, self.session.generation)
        if taken is None:
            return
        commit, values, private = taken
        try:
            self.snapshot.write(values, private, commit)
        except Exception as error:  # too little storage: the commit before stays whole
            logger.warning("the state of tick %d cannot be committed: %s", commit.tick, error)
        finally:
            self._record_commits()

    def changed_since_commit(self) -> str:
        """Return which value is not that of the newest commit, bit by bit; "" if the live state is the commit.

        Version counters do not decide it, because torch does not count all writes.
        """
        commit = self.snapshot.newest
        assert commit is not None, "this worker holds the commit"
        try:
            if name := self.snapshot.difference(self._live.capture()):
                return f"state.{name}"
        except Exception as error:  # of the state's own methods
            return f"the state, which cannot be captured any more ({type(error).__name__}: {error}),"
        return "" if self.snapshot.read_private(commit) == rng.capture() else "the random state"

    # ---------------------------------------------------------------------------------------------- comparison of ranks

    def check(self, exclusions: divergence.Exclusions) -> None:
        """Compare the newest commits of all ranks, or the live values if some keep no commits: see ``State.check``."""
        session, begins, self.begins_world = self.session, self.begins_world, False
        self.settle()
        if session.generation > 0 and session.size > 1:
            exclusions.leave_out(self.attached.names if self.attached is not None else ())
            if session.one_copy or begins:  # followers hold no commits; after a sync, the live values count
                live = LiveValues(self._live.capture(), session.ticks)
                divergence.check(live, self._everyone(), session.rank, exclusions, live.difference(session.one_copy))
            else:
                divergence.check(self.snapshot, self._everyone(), session.rank, exclusions)
            return
        try:
            self.snapshot.verify()
        finally:
            self._record_commits()

    def _everyone(self) -> Channel:
        """Return a channel between all ranks."""
        return Channel(self.session.process_group_for(tuple(range(self.session.size))), 0)

    def _numbers_of_all(self, numbers: list[int]) -> list[list[int]]:
        return [numbers] if self.session.size == 1 else self._everyone().numbers_of_all(numbers)

    def _messages_of_all(self, message: bytes) -> list[bytes]:
        return [message] if self.session.size == 1 else self._everyone().messages_of_all(message)

    @property
    def must_compare(self) -> bool:
        """True if the ranks must compare their values at this commit: the first one of a world with followers."""
        session = self.session
        return session.one_copy and session.size > 1 and self._compared_generation != session.generation

    def compare(self, exclusions: divergence.Exclusions) -> None:
        """Compare the values of all ranks, as a restore makes them those of the keepers. See ``check``.

        All keepers hold the state of this world then, so a follower discards older commits of its own.
        """
        self.check(exclusions)
        self._compared_generation = self.session.generation
        if self.session.follows is not None and self.snapshot.newest is not None:
            self.snapshot.forget()
            self._record_commits()

    # -------------------------------------------------------------------------------------------------------- helpers

    @contextmanager
    def _growing(self, attached: AttachedValues) -> Iterator[Callable[[], None] | None]:
        """Yield what begins to grow the older buffer for the first commit of attached values, while they are restored.

        All ranks call it when all copies that they read are open, and each waits for the others: so a damaged copy is
        found before any older commit is lost. None: the commits of this rank must stay until all is restored.
        """
        growth: Growth | None = None

        def grow() -> None:
            nonlocal growth
            self._numbers_of_all([0])
            assert self.snapshot.previous != self.session.line, "the line is the newest commit, or not in these buffers"
            captured, sharding = self._capture(attached)
            growth = self.snapshot.grow(captured, rng.capture(), sharding)

        try:
            yield None if self.session.line is None or self.session.verify_sync else grow
        finally:
            if growth is not None:
                growth.wait()
                self._record_commits()

    def _begin(self, commit: CommitId, replaces: bool = False) -> None:
        """Begin a commit. ``replaces``: it may have the id of the newest one."""
        newest = self.snapshot.newest
        if newest is not None and commit <= newest and not (replaces and commit == newest):
            raise StateError(
                f"Commit {commit} is not newer than {newest}, which is sealed. Commit again after the next tick."
            )
        self._require_attached()
        self.begun = commit
        self._ticks.drop()
        captured, sharding = self._capture(self.attached)
        is_cut = functools.partial(self.session.has_ended, commit.generation)
        counted = self.attached.counted() if self.attached is not None else None
        try:
            self.snapshot.begin(captured, rng.capture(), commit, self._optimizer_owned, is_cut, sharding, counted)
        except CommitStorageError as error:
            to_come = self._bytes_to_come()
            if not to_come:
                raise
            raise CommitStorageError(
                f"{error}. The first steps of the optimizers will add about {format_bytes(to_come)} to each buffer"
            ) from None
        finally:  # a failed write has destroyed the previous commit
            self._record_commits()

    def _capture(self, attached: AttachedValues | None) -> tuple[Captured, Sharding]:
        plain = self._live.capture()
        if attached is None:
            return plain, NO_SHARDING
        shards, sharding = attached.capture()
        if taken := plain.keys() & shards.keys():
            raise StateError(f"state.{min(taken)} and an attached value have the same name. Rename one of them.")
        return {**plain, **shards}, sharding

    def _optimizer_owned(self) -> Container[int]:
        owned = self._live.optimizer_owned()
        return owned if self.attached is None else _Union(owned, self.attached.optimizer_owned())

    def _require_attached(self) -> None:
        """Raise UsageError if this world starts from shards, and nothing is attached to it yet."""
        if self.starts_from_shards and self.attached is None:
            raise UsageError(
                "This job has committed attached values, and nothing is attached in this world. Call state.attach() in "
                "each world, before the first commit or tick."
            )

    def _record_commits(self) -> None:
        self.session.record_commits(HeldCommits(*self.commits, self.commit_bytes, self._bytes_to_come))

    def _bytes_to_come(self) -> int | None:
        """Return the bytes that the first steps of optimizers will add to the newest commit; None: not known.

        A commit of a tick is taken to have all that could not be foreseen.
        """
        newest, plain = self.snapshot.newest, self._live.bytes_to_come()
        if plain is not None and self.attached is not None:
            attached = self.attached.bytes_to_come()
            plain = None if attached is None else plain + attached
        return 0 if plain is None and newest is not None and newest.tick else plain


class _Union:
    """Elements of two containers."""

    def __init__(self, *parts: Container[int]) -> None:
        self._parts = parts

    def __contains__(self, element: object) -> bool:
        return any(element in part for part in self._parts)
