"""Committer: makes, restores, sends and receives the commits of one state.

``run`` uses a state through this class, and through the public methods of the state that a subclass may extend
(``restore``, ``sync``, ``on_reset``). ``committer_of`` in base.py returns the committer of a state.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed.algorithms.join import JoinHook

from elasticstate.commits import NO_SHARDING, Sharding
from elasticstate.compat import dtensors, torch_tensors
from elasticstate.core.ids import CommitId
from elasticstate.core.types import digests_interval_s
from elasticstate.errors import (
    CollectiveError,
    CommitStorageError,
    CopyError,
    ElasticError,
    HostsUpdatedInterrupt,
    StateError,
    StateLostError,
    StateMisfitError,
    UsageError,
)
from elasticstate.log import logger
from elasticstate.machine import format_bytes
from elasticstate.state import divergence, rng, sampler
from elasticstate.state.attached import AttachedValues
from elasticstate.state.divergence import NOTHING, CommitDigests, Selection, decode_question, select
from elasticstate.state.layout import number_of
from elasticstate.state.optimizer_state import bytes_to_come
from elasticstate.state.peer import PeerOf, PeerReader
from elasticstate.state.reshard import CommitCopies, StoredParts, check_reshard, copies_with_own
from elasticstate.state.session import (
    Channel,
    HeldCommits,
    Session,
    SoloSession,
    channel_between,
    channel_of_all,
    taking_part,
)
from elasticstate.state.snapshot import Buffer, CommitStorage, Incoming, LiveValues, Plan, Snapshot
from elasticstate.state.tick_record import TickRecords
from elasticstate.state.values import Captured, Values

if TYPE_CHECKING:
    from elasticstate.state.base import State

_OF_THE_MACHINE = (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
_NO_VERDICT = "the driver is away, or has not compared the newest commit of all ranks, which may differ"


class Committer:
    """Commits of one state, and their exchange between the workers of a world.

    Each commit contains what ``capture`` returns, the random state of this rank, and its shards of the attached values.
    """

    def __init__(self, state: State) -> None:
        # A reference cycle of state and committer would keep the commits in memory until a garbage collection.
        self._live: State = weakref.proxy(state)
        self.snapshot = Snapshot()
        self.session: Session = SoloSession()
        self.attached: AttachedValues | None = None  # values of the present world
        self.is_behind = False
        """True if this rank ended ticks without training, as it had no inputs left: other ranks have a newer state."""
        self._peers: PeerReader | None = None  # of commits of the other workers of this host
        self.is_prefetched = False
        """True if the only commit is one that was copied from another worker before the first world."""
        self.stored: StoredParts | None = None
        """Durable copy of a sharded state, from which this world starts."""
        self.has_followed = False
        """True if the live state is that of a world in which this worker kept no commits (--one-copy-per-host)."""
        self._compared_generation = 0  # the last world with --one-copy-per-host in which the ranks compared values
        self.begins_world = False
        """True between a sync and the check that follows: this check compares the live values of all ranks."""
        self.must_seal = False
        """True if reset callbacks may have changed the live state since the newest commit: the next sync seals it."""
        self._synced_generation = 0
        self._ticks = TickRecords(self._live)
        self.begun: CommitId | None = None
        """The last commit of a tick that was begun, sealed or not."""
        self.loaded: dict[str, Any] | None = None
        """Between two calls of ``train``: copies of the states that objects with iterators have loaded, by name; None
        while they are not noted."""
        self._digests: CommitDigests | None = None  # of the present world, after its first commit to compare
        self._selected: tuple[Plan, int, Selection | None] | None = None  # with the number of exclusions
        self._announced: CommitId | None = None  # its digest is sent when it is sealed
        self._omitted: CommitId | None = None  # the last commit that was not made
        self._warned_generation = 0  # in which a commit was not made
        self._question = 0  # number of the driver's last question
        self._has_trained = False  # ``train`` was called in this process
        self.after_tick: Callable[[], None] | None = None  # at the begin of a later call: judges its loops
        self.before_commit: Callable[[], None] | None = None  # while a training function runs: judges its optimizers
        self.before_tick: Callable[[], None] | None = None  # the same

    # ----------------------------------------------------------------------------------------------- storage and world

    def use_storage(self, storage: CommitStorage) -> None:
        """Keep the commits in ``storage`` from now on: hold the commits found there, and forget those made before."""
        self.snapshot.close()
        self.snapshot = Snapshot(storage)

    def use_peers(self, peer: PeerOf) -> None:
        """Read the commits of other workers of this host from their memory."""
        self._peers = PeerReader(peer)

    def use_session(self, session: Session) -> None:
        """Use the worlds of ``session``. Forget commits made outside a world: they are not commits of the job."""
        self.settle()
        newest = self.snapshot.newest
        if newest is not None and newest.generation == 0:
            self.snapshot.forget()
        self.session = session

    @property
    def commits(self) -> tuple[CommitId | None, CommitId | None]:
        """The ids of the newest commit and of the previous commit; None where there is none."""
        return self.snapshot.newest, self.snapshot.previous

    @property
    def has_own_commit(self) -> bool:
        """True if this rank holds a commit that decides on the job's state: not one that a sync is about to replace."""
        is_replaced = self.is_prefetched and self.session.view.rank in self.session.view.lacking
        return self.snapshot.newest is not None and not is_replaced

    @property
    def starts_from_shards(self) -> bool:
        """True if the present world starts from the shards of a commit, and no rank sends its state."""
        return self.session.view.line is not None or self.stored is not None

    # ------------------------------------------------------------------------------------------------- making a commit

    def begin(self) -> None:
        """Begin a commit of the present tick. Tensors on a device are copied in the background after the return.

        A follower makes none. With attached values it is complete on return: no rank may overwrite the commit before,
        until all ranks have sealed this one, because each holds other shards. Raises what ``State.commit`` raises.
        """
        self.session.check_collectives()
        self.settle()
        commit = self.session.commit_id()
        if self.before_commit is not None:
            self.before_commit()
        sampler.note_commit()
        if self.session.view.follows is not None:
            return
        if not self._may_overwrite():
            before, self._omitted = self._omitted, commit
            if before is not None and before.generation == commit.generation and before != commit:
                self._digests_of(commit.generation).lack(before.tick)  # the verdict on a rank that has it comes at once
            if self._warned_generation != commit.generation:
                self._warned_generation = commit.generation
                logger.warning(
                    "commit %s is not made, nor those after it until that has changed: %s", commit, _NO_VERDICT
                )
            return
        self._begin(commit, is_compared=self.session.compares_commits)
        if self.attached is not None:
            self.settle()
        if self.snapshot.checksums is not None and self.snapshot.is_settled:
            self._add_digest()

    def settle(self) -> None:
        """Wait until the commit that is being copied from a device, if any, is sealed or discarded."""
        if self._peers is not None and self._peers.wait():
            self._record_commits()
        if not self.snapshot.is_settled:
            self.snapshot.settle()
            self._record_commits()
            if self.snapshot.checksums is not None:
                self._add_digest()

    def seal(self, commit: CommitId) -> None:
        """Save the live state as ``commit``, and wait until the commit is sealed.

        Raises StateError if ``commit`` is not newer than the newest commit, and CollectiveError if the generation ends
        before the commit is copied from a device. Also raises what ``State.commit`` raises.
        """
        self.settle()
        if not self._may_overwrite():
            raise CollectiveError(f"commit {commit} is not made: {_NO_VERDICT}")
        self._begin(commit, is_compared=commit.tick > 0 and self.session.awaits_verdicts)
        if not self.snapshot.is_settled:
            try:
                self.snapshot.finish()
            finally:
                self._record_commits()
        if self.snapshot.checksums is not None:
            self._add_digest()

    def _may_overwrite(self) -> bool:
        """Wait until the commit before the newest one may be overwritten, because the newest is equal on all ranks, as
        that with which a world begins. Return False if the driver does not say so. A newest commit that other ranks
        lack is discarded."""
        newest, session = self.snapshot.newest, self.session
        is_judged = newest is not None and newest.generation == session.generation and newest.tick > 0
        if newest is None or not is_judged or not session.awaits_verdicts:
            return True
        verdict = session.wait_for_verdict(newest.tick, self._answer)
        if verdict is not None and newest.tick > verdict[0]:
            self.snapshot.drop_newest()
            self._record_commits()
        return verdict is not None

    def make_up_commit(self) -> None:
        """Commit the last tick of the training function if that was not done for want of a verdict: the driver compares
        it before the exit gate opens. Wait for a driver, as the gate does.

        Raises CollectiveError if the generation ends before, and what ``State.commit`` raises.
        """
        commit = self._omitted
        if commit is not None and commit == CommitId(self.session.generation, self.session.ticks):
            self.session.wait_for_driver()
            self.settle()
            if self._may_overwrite():
                self.seal(commit)

    def tick(self) -> None:
        """End a tick, after recording a commit whose copy is complete. Raises what ``Session`` raises there.

        A tick without a commit is recorded, so that ``commit_last_tick`` can make the commit after a failure.
        """
        self.session.check_collectives()
        if self.before_tick is not None:
            self.before_tick()
        if self.snapshot.is_copied:
            self.settle()
        if self._peers is not None and self._peers.storage is not None:
            self._peers.close()  # after the first step: it takes a while to unmap much memory
        if self.attached is None:
            self._require_attached()
            if self.session.records_ticks:
                commit = self.session.commit_id()
                if commit != self.begun:
                    self._ticks.record(commit)
        if self._digests is not None:
            self._answer()
        try:
            self.session.tick()
        except HostsUpdatedInterrupt:
            self.settle()  # the script's finally clauses, which run now, may write what is being copied
            raise
        if self.after_tick is not None:
            self.after_tick()

    def commit_last_tick(self) -> None:
        """After a failure, when nothing of the generation can write any more: make the last tick a commit, if the live
        state is proven to be the state of that tick. Restore the newest commit afterwards."""
        self.settle()
        newest, session = self.snapshot.newest, self.session
        taken = self._ticks.take(newest, session.generation)
        if taken is None:
            return
        is_judged = session.awaits_verdicts and newest is not None and newest.generation == session.generation
        if is_judged and newest is not None and newest.tick > session.verdict()[0]:
            return  # the commit before may be the newest one that is equal on all ranks
        commit, values, private = taken
        try:
            self.snapshot.write(values, private, commit, session.awaits_verdicts)
            if self.snapshot.checksums is not None:
                self._add_digest()
        except Exception as error:  # too little storage: the commit before stays whole
            logger.warning("the state of tick %d cannot be committed: %s", commit.tick, error)
        finally:
            self._record_commits()

    def changed_since_commit(self) -> str:
        """Return which value is not that of the newest commit, bit by bit; "" if the live state is the commit."""
        commit = self.snapshot.newest
        assert commit is not None, "this worker holds the commit"
        try:
            if name := self.snapshot.difference(self._live.capture()):
                return f"state.{name}"
        except Exception as error:  # of the state's own methods
            return f"the state, which cannot be captured any more ({type(error).__name__}: {error}),"
        return "" if self.snapshot.read_private(commit) == rng.capture() else "the random state"

    def _begin(self, commit: CommitId, replaces: bool = False, is_compared: bool = False) -> None:
        """Begin a commit. ``replaces``: it may have the id of the newest one. ``is_compared``: with other ranks."""
        newest = self.snapshot.newest
        if newest is not None and commit <= newest and not (replaces and commit == newest):
            raise StateError(
                f"Commit {commit} is not newer than {newest}, which is sealed. Commit again after the next tick."
            )
        if self.attached is None:
            self._require_attached()
        self.begun = commit
        self._ticks.drop()
        captured, sharding = self._capture(self.attached)
        is_cut = functools.partial(self.session.has_ended, commit.generation)
        counted = self.attached.counted() if self.attached is not None else None
        how = self._optimizer_owned, is_cut, sharding, counted, is_compared
        try:
            self.snapshot.begin(captured, rng.capture(), commit, *how)
        except CommitStorageError as error:
            to_come = self._bytes_to_come()
            if not to_come:
                raise
            raise CommitStorageError(
                f"{error}. The first steps of the optimizers will add about {format_bytes(to_come)} to each buffer"
            ) from None
        finally:  # a failed write has destroyed the previous commit
            self._record_commits()
        if self.snapshot.checksums is not None and not self.snapshot.is_settled and self.session.awaits_verdicts:
            self._announce_digest()

    def _capture(self, attached: AttachedValues | None) -> tuple[Captured, Sharding]:
        plain = self._live.capture()
        if attached is None:
            return plain, NO_SHARDING
        shards, sharding = attached.capture()
        if taken := plain.keys() & shards.keys():
            raise StateError(f"state.{min(taken)} and an attached value have the same name. Rename one of them.")
        return {**plain, **shards}, sharding

    def _optimizer_owned(self) -> Container[int]:
        owned = self._live._optimizer_owned()
        return owned if self.attached is None else owned | self.attached.optimizer_owned()

    def _require_attached(self) -> None:
        """Raise UsageError if this world starts from shards. For a world to which nothing is attached."""
        if self.starts_from_shards:
            raise UsageError(
                "This job has committed attached values, and nothing is attached in this world. Call state.attach() in "
                "each world, before the first commit or tick."
            )

    def _record_commits(self) -> None:
        self.session.record_commits(HeldCommits(*self.commits, self.snapshot.size_bytes, self._bytes_to_come))

    def _bytes_to_come(self) -> int | None:
        """Return the bytes that the first steps of optimizers will add to the newest commit; None: not known. A commit
        of a tick is taken to have all that could not be foreseen."""
        newest, plain = self.snapshot.newest, self._live._bytes_to_come()
        if plain is not None and self.attached is not None:
            attached = bytes_to_come(self.attached.values.values())
            plain = None if attached is None else plain + attached
        return 0 if plain is None and newest is not None and newest.tick else plain

    # --------------------------------------------------------------------------------------------- restoring a commit

    def restore(self) -> None:
        """Make the newest intact commit the live state, with its random state. All gradients become None.

        Raises StateError if there is no intact commit; StateMisfitError if the commit does not fit the live objects;
        UsageError if values are attached; CollectiveError in a world with other ranks, if this rank cannot restore what
        they restore.
        """
        if self.attached is not None:
            raise UsageError("restore() cannot restore attached values. They get their content when they are attached.")
        if self.session.view.follows is not None and self.snapshot.newest is None:
            raise UsageError(
                f"restore() needs a commit of this worker's own, but with --one-copy-per-host the worker in slot "
                f"{self.session.view.follows} keeps the commits of this host. Leave the option out."
            )
        self.settle()
        newest, begun = self.snapshot.newest, self.begun
        if begun is not None and begun.generation == self.session.generation and (newest is None or newest < begun):
            self._require_same_commit(f"commit {begun} was discarded on this rank")
        with self._fitting():
            try:
                values = self.snapshot.load_into(self._targets(self.snapshot.objects))
            except StateError:
                if newest is not None and self.snapshot.newest is None:
                    self._require_same_commit("no commit of this rank is intact")
                raise
            finally:
                self._record_commits()  # a commit may be damaged
            commit = self.snapshot.newest
            if commit != newest:
                self._require_same_commit(f"commit {newest} of this rank is damaged")
            assert commit is not None, "the values belong to this commit"
            self._compare_restored(commit)
            self._apply(values, self.snapshot.read_private(commit))

    def _compare_restored(self, commit: CommitId) -> None:
        """Wait until all ranks of the training function restore: a rank that restores alone would train on from older
        values than the others, without any notice. Raises CollectiveError unless it is the same commit."""
        group = self.session.restore_group()
        if group is not None:
            everyone = Channel(group, 0).numbers_of_all([commit.generation, commit.tick])
            if others := {CommitId(*numbers) for numbers in everyone} - {commit}:
                raise CollectiveError(f"restore(): this rank restores commit {commit}, another one {min(others)}")

    def _require_same_commit(self, problem: str) -> None:
        """Raise CollectiveError in a world with other ranks, which restore another commit than this rank: in the next
        world it receives theirs."""
        if self.session.has_peers:
            raise CollectiveError(f"restore(): {problem}, so the other ranks restore another one")

    def resume(self) -> bool:
        """Restore the newest intact commit. Return False if there is none. Raises StateMisfitError if it does not fit
        the live objects, and tries no older one."""
        while self.snapshot.newest is not None:
            with self._fitting():
                try:
                    self._live.restore()
                    return True
                except CollectiveError:  # damaged, in a world that this worker has joined ahead: it fails afterwards
                    continue
                except StateError:
                    if self.snapshot.newest is not None:
                        raise
        return False

    @contextmanager
    def _fitting(self, commit: CommitId | None = None) -> Iterator[None]:
        """Raise StateMisfitError for an error of code that loads a commit into the live objects.

        ``commit``: the id; None: that of the newest commit. Errors of the machine, and of the world, stay as they are.
        """
        try:
            yield
        except (StateMisfitError, UsageError, CollectiveError, CommitStorageError, CopyError, *_OF_THE_MACHINE):
            raise
        except Exception as error:
            commit = commit or self.snapshot.newest
            if commit is None:
                raise
            reason = str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"
            raise StateMisfitError(f"commit {commit} is whole, but cannot be loaded: {reason}") from error

    @property
    def names(self) -> int:
        """Digest of the names and kinds of the values; 0: this worker does not read commits of other workers."""
        return number_of(sorted(self._live._value_kinds().items())) if self._peers and self._peers.can_read else 0

    def prefetch(self) -> bool:
        """Copy the newest commit of another worker of this host, and make it the live state.

        Return False if there is none that is newer than this worker's own.

        A newcomer calls it before its first READY. At the switch, the root's commit then meets memory that is in use.
        If the commit does not fit its objects (StateMisfitError), it ends before the others stop for it.
        """
        if self._peers is None:
            return False
        commit = self._peers.copy_newest(self.snapshot, self.session.worker_key)
        if commit is not None:
            with self._fitting(commit):
                targets = self._targets(self.snapshot.incoming_objects)
            self.snapshot.seal_incoming(commit, self.snapshot.load_incoming(targets))
            self._record_commits()
            self.is_prefetched = self.resume()
        return self.is_prefetched

    def read_ahead(self, near: Container[int], rank: int, root_slot: int, generation: int) -> None:
        """Begin to copy the root's newest commit, if this rank reads the root's state in the world to come.

        ``near``: ranks that read it from the memory of their host.
        """
        self.settle()
        if self._peers is not None and rank in near:
            # Without a commit, a failed world would leave the state of none. Hooks need the objects of a commit first.
            is_ahead = self.is_prefetched and not self._live._restore_pre_hooks
            live = self._targets(lambda: None) if is_ahead else None
            self._peers.read_ahead(root_slot, self.snapshot, self.session.worker_key, generation, live)

    def receive(self, commit: CommitId, load: Callable[[Callable[[], Captured]], Incoming | None]) -> bool:
        """Make a commit that ``load(targets)`` puts into the snapshot the live state. Return False if there is none."""

        def targets() -> Captured:
            with self._fitting(commit):
                return self._targets(self.snapshot.incoming_objects)

        try:
            incoming = load(targets)
            values = self.snapshot.seal_incoming(commit, incoming) if incoming is not None else None
        finally:
            self._record_commits()
        if values is not None:
            with self._fitting(commit):
                self._apply(values, self.snapshot.read_private(commit))
        return values is not None

    def _targets(self, objects: Callable[[], Mapping[str, Any] | None]) -> Captured:
        """Return the live values that a load may overwrite. Discard tick records: torch does not count its writes.

        ``objects``: returns the objects of the commit that is about to be loaded, for the user's hooks.
        """
        torch_tensors.note_unseen_write()
        self._ticks.reset()
        self._live._before_load(objects)
        return self._live._load_targets() or {}

    def _apply(self, values: Values, private: bytes, others: Sequence[Buffer] = ()) -> None:
        """Make the content of a commit the live state: the last step of a restore or sync.

        ``private``: the random state. ``others``: buffers of other workers that have the values.
        """
        self._live.apply(values)
        targets = self._live._load_targets()
        if kept := self.snapshot.aliases(self._live.capture() if targets is None else targets, others):
            raise StateError(
                f"{self._live.__class__.__name__}.apply() kept {kept[0]!r}, which is memory of the commit. Copy it "
                "into a tensor or array of the state."
            )
        rng.apply(private)
        self._live._drop_gradients()
        self.must_seal = self.is_behind = False

    # -------------------------------------------------------------------------------------------- syncing with a world

    def continue_iterators(self) -> None:
        """Make the iterators of the next call of ``train`` begin at the position of the state: see ``State``."""
        loaded, self.loaded = self.loaded or {}, None
        self._live._continue_iterators(loaded, self._has_trained)
        self._has_trained = True

    def sync(self) -> bool:
        """Send the root's state to the ranks that lack it, and seal (generation, 0) on all ranks: see ``State.sync``.

        Return True if a check of all ranks must follow.
        """
        session, view = self.session, self.session.view
        self.settle()
        if session.records_ticks:
            torch_tensors.install()  # before the first collective of this generation
        if session.generation == 0:
            self.seal(session.commit_id())
            return False
        if session.generation == self._synced_generation:
            return False
        if self.starts_from_shards:  # ``start_from_line`` has done it, and ``attach`` seals (generation, 0)
            self._synced_generation = session.generation
            return False
        start = CommitId(session.generation, 0)
        self.has_followed = self.has_followed or view.follows is not None
        channel = None
        far = [rank for rank in view.lacking if rank not in view.near]
        if far and view.rank in (view.root, *far):
            channel = channel_between(session, view.root, far)
            kinds, has_commit = self._live._value_kinds(), self.snapshot.newest is not None
            refused = divergence.find_refused(channel, taking_part(view.root, far), view.root, kinds, has_commit)
            if view.rank in refused:
                raise StateError(refused[view.rank])
        if view.rank not in view.lacking and view.follows is None:
            self._seal_start(start)
        if channel is not None and view.rank == view.root:
            self._send(channel)
        elif channel is not None:
            self._receive(channel, start)
        elif view.rank in view.near and view.follows is not None:
            self._load_from(view.follows, start)
        elif view.rank in view.near:
            self._read(start)
        self.is_prefetched = False
        self.has_followed = view.follows is not None
        self._live._drop_gradients()
        self._synced_generation = session.generation
        self.begins_world = view.options.verify_sync
        return view.options.verify_sync

    def _seal_start(self, start: CommitId) -> None:
        """Seal ``start`` on a worker that holds the job's state, if the state is new or is sent to others."""
        view = self.session.view
        is_first = self.snapshot.newest is None and view.rank == view.root
        if is_first and self.has_followed:
            raise StateLostError(
                "no worker holds a commit any more, and this worker kept none because of --one-copy-per-host, so its "
                "state is that of no tick. The job continues when this worker has been restarted."
            )
        # A commit with shards is none to send: some member died before all had attached their values.
        if is_first or self.must_seal or (view.lacking and self.snapshot.has_attached):
            self.seal(start)
            self.must_seal = False
        elif view.lacking:
            self.snapshot.restamp(start)
            self._record_commits()

    def _send(self, channel: Channel) -> None:
        started = time.monotonic()
        header, payload = self.snapshot.outgoing()
        channel.send(msgspec.msgpack.encode((torch.initial_seed(), header)))
        channel.broadcast(payload)
        self.session.record_sync(payload.numel(), time.monotonic() - started)

    def _receive(self, channel: Channel, commit: CommitId, keeps_random_state: bool = False) -> None:
        """Receive the root's state, seal it as ``commit``, and make it the live state after all data has arrived.

        ``keeps_random_state``: keep this rank's own random state instead of deriving one from the root's seed.
        """
        session = self.session
        started = time.monotonic()
        seed, header = msgspec.msgpack.decode(channel.receive(), type=tuple[int, bytes])
        private = rng.capture() if keeps_random_state else rng.derived(seed, session.worker_key, commit.generation)
        # A follower that cannot read its keeper's commit receives it into memory of its process for a while.
        snapshot = self.snapshot if session.view.follows is None else Snapshot()
        try:
            payload = snapshot.incoming(header, private)
            channel.broadcast(payload)
            with self._fitting(commit):
                targets = self._targets(snapshot.incoming_objects)
            values = snapshot.seal_incoming(commit, snapshot.load_incoming(targets))
        finally:
            self._record_commits()
        session.record_sync(payload.numel(), time.monotonic() - started)
        with self._fitting(commit):
            self._apply(values, snapshot.read_private(commit))

    def _read(self, commit: CommitId) -> None:
        """Read the root's state from its memory on this host, seal it as ``commit``, and make it the live state."""
        session = self.session
        assert self._peers is not None, "only a worker that reads commits is in near"
        source = self._peers.wait_for(session.view.root_slot, commit, session.check)
        peers, started = self._peers, time.monotonic()
        place = self.snapshot, session.worker_key, session.generation
        if source is None or not self.receive(commit, lambda targets: peers.load(source, *place, targets)):
            self._peers = None  # the next sync sends the state
            raise CollectiveError(f"the root's commit {commit} cannot be read from the memory of this host")
        session.record_sync(self.snapshot.size_bytes, time.monotonic() - started + peers.seconds_ahead)

    def _load_from(self, slot: int, commit: CommitId) -> None:
        """Load a commit of this host's keeper into the live state, as soon as it is sealed. Nothing is sealed here.

        The random state is derived from that of the keeper, as in a sync.
        """
        session = self.session
        assert self._peers is not None, "only a worker that reads commits is in near"
        source = self._peers.wait_for(slot, commit, session.check)
        started = time.monotonic()
        with self._fitting(commit):
            found = source.load_into(self._targets(source.objects)) if source is not None else None
        if source is not None and found is not None:
            values, keepers_own = found
            own = rng.derived(rng.initial_seed(keepers_own), session.worker_key, commit.generation)
            with self._fitting(commit):
                self._apply(values, own, [source.buffer])
            if source.is_unchanged():
                session.record_sync(source.buffer.length, time.monotonic() - started)
                return
        raise CollectiveError(f"commit {commit} of the worker in slot {slot} cannot be read from its memory")

    # ------------------------------------------------------------------------------------- values attached to a world

    def start_from_line(self) -> bool:
        """Make the plain values of the commit line, or of a stored copy, the live state. Return False if the world
        starts from neither.

        Unless this worker's own commit is the line, the random state is derived, as in a sync.
        """
        session, line = self.session, self.session.view.line
        if not self.starts_from_shards:
            return False
        self.settle()
        newest, previous = self.commits
        if line is not None and newest != line and previous == line:
            self.snapshot.drop_newest()
            self._record_commits()
            self.resume()
        if line is None or self.snapshot.newest != line:
            with self._copies() as copies:
                values, private = copies.plain()
            derived = rng.derived(rng.initial_seed(private), session.worker_key, session.generation)
            with self._fitting(line or CommitId(session.generation - 1, 1)):
                self._targets(lambda: {name: values[name] for name in values if name not in values.entries})
                self._apply(values, derived)
        return True

    def go_back(self) -> bool:
        """Discard the newest commit, and restore the one before it, if the present world starts from that. Return True
        if it was so.

        Raises CollectiveError if this rank does not hold the commit that it has reported.
        """
        view = self.session.view
        if view.start is None or view.rank in view.lacking:
            return False
        self.settle()
        is_newer = self.snapshot.newest != view.start and self.snapshot.previous == view.start
        if is_newer:
            self.snapshot.drop_newest()
            self._record_commits()
            self.resume()
        if self.snapshot.newest != view.start:
            raise CollectiveError(f"this worker cannot restore commit {view.start}, from which this world starts")
        return is_newer

    def attach(self, values: Mapping[str, Any], init: Callable[[], object] | None) -> bool:
        """Attach values to the present world: see ``TorchState.attach``. Return True if a check must follow."""
        session, view = self.session, self.session.view
        if view.keepers:
            raise UsageError(
                "attach() was called in a job with --one-copy-per-host: each worker holds shards of its own, so no "
                "other worker's commit has them. Leave the option out."
            )
        if self.attached is not None:
            raise UsageError("attach() was called before in this world. Call it once, with all values.")
        if session.commit_id().tick > 1 and session.generation > 0:
            raise UsageError("attach() was called after the first tick of this world. Call it before.")
        if init is None and not self.starts_from_shards:
            raise UsageError(
                "attach() needs init in the first world of a job: init=model.init_weights, or another call."
            )
        self.settle()
        dtensors.clear_mesh_caches()
        attached = AttachedValues(values)
        rows = self._numbers_of_all([number_of(attached.names)])
        if any(row != rows[0] for row in rows):
            raise StateError(
                f"The ranks attach different values; this rank attaches {', '.join(attached.names)}. Attach the same "
                "names, in the same order, on every rank."
            )
        if self.starts_from_shards:
            with self._copies() as copies, self._growing(attached) as grow:
                pieces = attached.restore(copies, grow)
                if view.options.verify_sync:
                    check_reshard(copies, pieces, view.rank, view.size, self._messages_of_all)
        elif init is not None:
            init()
            if view.size > 1:
                attached.spread(session)
        self.attached = attached
        self._seal_attached(CommitId(session.generation, 0) if session.generation > 0 else session.commit_id())
        # No rank may overwrite the line before all have sealed this commit.
        session.record_attached(tuple(found for (found,) in self._numbers_of_all([attached.digest()])))
        return view.options.verify_sync

    def detach(self) -> None:
        """Release the attached values: their world is over. Nothing keeps them alive afterwards."""
        if self.attached is not None:
            self.attached = None
            dtensors.clear_mesh_caches()

    @contextmanager
    def _growing(self, attached: AttachedValues) -> Iterator[Callable[[], None] | None]:
        """Yield what begins to grow the older buffer for the first commit of attached values, while they are restored.

        All ranks call it when all copies that they read are open, and each waits for the others: so a damaged copy is
        found before any older commit is lost. None: the commits of this rank must stay until all is restored.
        """
        growth: threading.Thread | None = None

        def grow() -> None:
            nonlocal growth
            self._numbers_of_all([0])
            assert self.snapshot.previous != self.session.view.line, (
                "the line is the newest commit, or not in these buffers"
            )
            captured, sharding = self._capture(attached)
            growth = self.snapshot.grow(captured, rng.capture(), sharding)

        try:
            yield None if self.session.view.line is None or self.session.view.options.verify_sync else grow
        finally:
            if growth is not None:
                growth.join()
                self._record_commits()

    def _copies(self) -> CommitCopies:
        if self.stored is not None:
            return self.stored.commit_copies(self.session.view.rank)
        session = self.session
        sources, line = list(session.view.sources), session.view.line
        own = self.snapshot.find(line) if line is not None and line in self.commits else None
        return copies_with_own(session.copy_reader(), sources, own, session.worker_key)

    def _seal_attached(self, start: CommitId) -> None:
        """Seal the first commit with shards. A world without a line may have sealed the plain values under this id."""
        is_new = self.snapshot.newest != start
        self._begin(start, replaces=True)
        try:
            self.snapshot.finish()
            if not is_new:
                self.snapshot.drop_previous()
        finally:
            self._record_commits()
        self.must_seal = False

    # ---------------------------------------------------------------------------------------------- comparison of ranks

    def _add_digest(self) -> None:
        """Add the last commit, whose copy is complete, to the digests that the driver compares."""
        assert self.snapshot.checksums is not None, "the caller has asked for it"
        (commit, plan, checksums), self.snapshot.checksums = self.snapshot.checksums, None
        digests = self._digests_of(commit.generation)
        if self.snapshot.newest != commit:
            digests.lack(commit.tick)
        elif commit != self._announced and (selection := self._selection(plan)) is not None:
            digests.add(commit.tick, checksums, selection)

    def _announce_digest(self) -> None:
        """Let the digest of the commit in progress be sent as soon as it is sealed: the driver compares it while this
        rank trains."""
        assert self.snapshot.checksums is not None, "the caller has asked for it"
        commit, plan, checksums = self.snapshot.checksums
        digests, selection = self._digests_of(commit.generation), self._selection(plan)
        if selection is not None:
            self._announced = commit
            self.snapshot.when_sealed(lambda: digests.add(commit.tick, checksums, selection))

    def _digests_of(self, generation: int) -> CommitDigests:
        if self._digests is None or self._digests.generation != generation:
            send, each = self.session.record_digest, self.session.awaits_verdicts
            interval_s = digests_interval_s(self.session.view.size)
            self._digests = CommitDigests(generation, send, sends_each=each, interval_s=interval_s)
        return self._digests

    def _selection(self, plan: Plan) -> Selection | None:
        """Return the values of a commit that are compared; None: there are none, and no digest is awaited."""
        excluded, selected = self._live._exclusions, self._selected
        if selected is None or selected[0] is not plan or selected[1] != excluded.number:
            is_replicated = self._live._replicates()
            selection = select(plan.names, plan.forms.get, lambda n: is_replicated(n) and n not in excluded)
            if selection is None and self.session.awaits_verdicts:
                selection = NOTHING
            self._selected = selected = plan, excluded.number, selection
        return selected[2]

    def _answer(self) -> None:
        """Answer a question of the driver about the commits of this world."""
        asked = self.session.question(self._question)
        if asked is not None:
            self._question, *words = asked
            generation, question = decode_question(*words)
            if self._digests is not None and self._digests.generation == generation == self.session.generation:
                self.session.answer(self._digests.answer(question))

    def send_digest(self) -> None:
        """Send the digest of the last commit of this world: no commit follows."""
        if self._digests is not None and self._digests.generation == self.session.generation:
            self._digests.send()

    def check(self, exclusions: divergence.Exclusions) -> None:
        """Compare the newest commits of all ranks, or the live values if some keep no commits: see ``State.check``."""
        session, view = self.session, self.session.view
        begins, self.begins_world = self.begins_world, False
        self.settle()
        if session.generation > 0 and view.size > 1:
            exclusions.leave_out(self.attached.names if self.attached is not None else ())
            compared: Snapshot | LiveValues = self.snapshot
            difference = None
            if view.keepers or begins:  # followers hold no commits; after a sync, the live values count
                compared = LiveValues(self._live.capture(), session.ticks)
                difference = compared.difference(bool(view.keepers))
            divergence.check(compared, channel_of_all(session), view.rank, exclusions, difference)
            return
        try:
            self.snapshot.verify()
        finally:
            self._record_commits()

    def _numbers_of_all(self, numbers: list[int]) -> list[list[int]]:
        return [numbers] if self.session.view.size == 1 else channel_of_all(self.session).numbers_of_all(numbers)

    def _messages_of_all(self, message: bytes) -> list[bytes]:
        return [message] if self.session.view.size == 1 else channel_of_all(self.session).messages_of_all(message)

    def compare_once(self, exclusions: divergence.Exclusions) -> None:
        """At the first commit of a world with followers, compare the values of all ranks (see ``check``): a restore
        makes them those of the keepers."""
        view = self.session.view
        if not view.keepers or view.size == 1 or self._compared_generation == view.generation:
            return
        self.check(exclusions)
        self._compared_generation = view.generation
        if view.follows is not None and self.snapshot.newest is not None:
            self.snapshot.forget()  # all keepers hold the state of this world now
            self._record_commits()

    # ------------------------------------------------------------------------- ranks with different numbers of batches

    def tick_without_inputs(self) -> None:
        """End a tick in which only other ranks trained, because this rank has no inputs left."""
        self.session.check_collectives()
        was_behind, self.is_behind = self.is_behind, True
        self._ticks.drop()
        if not (self.session.awaits_verdicts and was_behind):
            self._lack_commit()
        self.session.tick()

    def _lack_commit(self) -> None:
        """Note that this rank may lack the commit of the present tick."""
        if self.session.awaits_verdicts:
            self._digests_of(self.session.generation)
        if self._digests is not None:
            self._digests.lack(self.session.ticks + 1, is_out=True)

    def follow_last_joiner(self, is_last: bool) -> None:
        """Send the state of the ranks that trained last to all others, as a commit of the next tick.

        All ranks call it when no rank has inputs left. ``is_last``: this rank trained in the last tick.
        """
        session, view = self.session, self.session.view
        session.check_collectives()
        self.settle()
        was_last = [bool(flag) for (flag,) in Channel(None, 0).numbers_of_all([int(is_last)])]
        lacking = [rank for rank, last in enumerate(was_last) if not last]
        if not lacking:
            return
        root, commit = was_last.index(True), session.commit_id()
        if not session.awaits_verdicts:
            self._lack_commit()
        if is_last:
            self.seal(commit)
        if view.rank == root:
            self._send(channel_between(session, root, lacking))
        elif not is_last:
            self._receive(channel_between(session, root, lacking), commit, keeps_random_state=True)
            self.begun = commit  # an interrupt at this tick finds it here as on the ranks that trained
        session.tick()


class StateJoinHook(JoinHook):
    """Hooks for a rank that has no inputs left while others train.

    It ends its ticks together with the others, and saves nothing: in another world it receives the state from one of
    the others. When no rank has inputs left, all ranks receive the state of the last one.
    """

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    def main_hook(self) -> None:
        self._committer.tick_without_inputs()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._committer.follow_last_joiner(is_last_joiner)
