"""Committer: makes, restores, sends and receives the commits of one state.

``run`` uses a state through this class, and through the public methods of the state that a subclass may extend
(``restore``, ``sync``, ``on_reset``). ``committer_of`` in base.py returns the committer of a state.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Container

import msgspec
import torch

from elasticstate.compat import aliases
from elasticstate.core.types import CommitId
from elasticstate.errors import CollectiveError, StateError
from elasticstate.log import logger
from elasticstate.state import divergence, rng, value_names
from elasticstate.state.channel import Channel, channel_between
from elasticstate.state.live_state import LiveState
from elasticstate.state.peer import Peers
from elasticstate.state.peer_copies import PeerCopies
from elasticstate.state.session import Session, SoloSession
from elasticstate.state.snapshot import Incoming, Snapshot
from elasticstate.state.storage import CommitStorage
from elasticstate.state.tick_record import TickRecords
from elasticstate.state.values import Captured, Values


class Committer:
    """Commits of one state: their storage, their order, and their exchange between the workers of a world.

    Each commit contains what ``capture`` returns, and the random state of this rank. Commit ids ascend, and one id
    never has two contents.
    """

    def __init__(self, live: LiveState) -> None:
        self._live = live
        self.snapshot = Snapshot()
        self.session: Session = SoloSession()
        self.is_behind = False
        """True if this rank ended ticks without training, as it had no inputs left: other ranks have a newer state."""
        self._peers: PeerCopies | None = None  # of commits of the other workers of this host
        self.is_adopted = False
        """True if the only commit is one that was copied from another worker before the first world."""
        self._must_seal = False  # reset callbacks may have changed the live state since the newest commit
        self._synced_generation = 0
        self._ticks = TickRecords(live.capture, live.quick_capture, live.owned)
        self._begun: CommitId | None = None  # the last commit that was begun

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
        return self.commits[0] is not None and not (self.is_adopted and self.session.rank in self.session.lacking)

    @property
    def commit_bytes(self) -> int:
        """Size of the newest commit, in bytes."""
        return self.snapshot.size_bytes

    @property
    def ticks(self) -> int:
        """Ticks completed in this generation."""
        return self.session.ticks

    # ------------------------------------------------------------------------------------------------- making a commit

    def begin(self) -> None:
        """Begin a commit of the present tick. Tensors on a device are copied in the background after the return.

        Raises what ``State.commit`` raises.
        """
        self.settle()
        self._begin(self.session.commit_id())

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
        """End a tick, after recording a commit whose copy is complete. Raises what ``Session.tick`` raises.

        A tick without a commit is recorded, so that ``commit_last_tick`` can make the commit after a failure.
        """
        if self.snapshot.is_copied:
            self.settle()
        if self._peers is not None:
            self._peers.close()  # after the first step: it takes a while to unmap much memory
        if self.session.records_ticks and (commit := self.session.commit_id()) != self._begun:
            self._ticks.record(commit)
        self.session.tick()

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

    def _begin(self, commit: CommitId) -> None:
        newest = self.snapshot.newest
        if newest is not None and commit <= newest:
            raise StateError(
                f"Commit {commit} is not newer than {newest}, which is sealed. Commit again after the next tick."
            )
        self._begun = commit
        self._ticks.drop()
        captured = self._live.capture()
        is_cut = functools.partial(self.session.has_ended, commit.generation)
        try:
            self.snapshot.begin(captured, rng.capture(), commit, self._live.optimizer_owned, is_cut)
        finally:  # a failed write has destroyed the previous commit
            self._record_commits()

    def _record_commits(self) -> None:
        self.session.record_commits(*self.commits, self.commit_bytes)

    # --------------------------------------------------------------------------------------------- restoring a commit

    def restore(self) -> None:
        """Make the newest intact commit the live state, with its random state. All gradients become None.

        Raises StateError if there is no intact commit, or if the commit does not fit the live objects.
        """
        self.settle()
        try:
            values = self.snapshot.load_into(self._targets())
        finally:
            self._record_commits()  # a commit may be damaged
        self._apply(values)

    def resume(self) -> bool:
        """Restore the newest intact commit that fits the live objects. Return False if no commit is left."""
        while self.snapshot.newest is not None:
            if self._restore_or_discard():
                return True
        return False

    @property
    def names(self) -> int:
        """Digest of the names and kinds of the values; 0: this worker does not read commits of other workers."""
        return value_names.number(self._live.value_kinds()) if self._peers and self._peers.can_read else 0

    def adopt(self) -> None:
        """Copy the newest commit of another worker of this host, if there is one, and make it the live state.

        A newcomer calls it before its first READY. At the switch, the root's commit then meets memory that is in use.
        """
        commit = self._peers.copy_newest(self.snapshot, self.session.worker_key) if self._peers is not None else None
        if commit is not None:
            self.snapshot.seal_incoming(commit, self.snapshot.load_incoming(self._targets()))
            self._record_commits()
            self.is_adopted = self.resume()

    def read_ahead(self, near: Container[int], rank: int, root_slot: int, generation: int) -> None:
        """Begin to copy the root's newest commit, if this rank reads the root's state in the world to come.

        Args:
            near: ranks that read it from the memory of their host.
        """
        self.settle()
        if self._peers is not None and rank in near:
            live = self._targets() if self.is_adopted else None  # else a failed world would leave a state of no commit
            self._peers.read_ahead(root_slot, self.snapshot, self.session.worker_key, generation, live)

    def _restore_or_discard(self) -> bool:
        try:
            self._live.restore()
        except Exception as error:  # other shapes, classes that no longer exist, damage
            if self.snapshot.newest is not None:
                logger.warning("discarded commit %s, which cannot be restored: %s", self.snapshot.newest, error)
                self.snapshot.drop_newest()
            return False
        return True

    def receive(self, commit: CommitId, load: Callable[[Callable[[], Captured]], Incoming | None]) -> bool:
        """Make a commit that ``load(targets)`` puts into the snapshot the live state. Return False if there is none."""
        try:
            incoming = load(self._targets)
            values = self.snapshot.seal_incoming(commit, incoming) if incoming is not None else None
        finally:
            self._record_commits()
        if values is not None:
            self._apply(values)
        return values is not None

    def drop_gradients(self) -> None:
        """Set gradients to None. A failure inside ``backward`` leaves partial gradients, different on each rank."""
        self._live.drop_gradients()

    def _targets(self) -> Captured:
        """Return the live values that a load may overwrite. Discard tick records: torch does not count its writes."""
        aliases.note_unseen_write()
        self._ticks.reset()
        return self._live.load_targets()

    def _apply(self, values: Values) -> None:
        """Make the newest commit, whose content is ``values``, the live state: the last step of a restore or sync."""
        commit = self.snapshot.newest
        assert commit is not None, "the values belong to this commit"
        self._live.apply(values)
        if kept := self.snapshot.aliases(self._live.capture()):
            raise StateError(
                f"{self._live.name}.apply() kept {kept[0]!r}, which is memory of the commit. Copy it into a tensor or "
                "array of the state."
            )
        rng.apply(self.snapshot.read_private(commit))
        self._live.drop_gradients()
        self._must_seal = self.is_behind = False

    # -------------------------------------------------------------------------------------------- syncing with a world

    def require_seal(self) -> None:
        """Make the next sync seal the live state, because a reset callback may have changed it."""
        self._must_seal = True

    def sync(self) -> bool:
        """Send the root's state to the ranks that lack it, and seal (generation, 0) on all ranks: see ``State.sync``.

        Return True if a check of all ranks must follow.
        """
        session = self.session
        self.settle()
        if session.records_ticks:
            aliases.install()  # before the first collective of this generation
        if session.generation == 0:
            self.seal(session.commit_id())
            return False
        if session.generation == self._synced_generation:
            return False
        start = CommitId(session.generation, 0)
        channel = None
        far = [rank for rank in session.lacking if rank not in session.near]
        if far and session.rank in (session.root, *far):
            channel = channel_between(session, session.root, far)
            has_commit = self.snapshot.newest is not None
            value_names.compare(channel, session, far, self._live.value_kinds(), has_commit)
        if session.rank not in session.lacking:
            self._seal_start(start)
        if channel is not None and session.rank == session.root:
            self._send(channel)
        elif channel is not None:
            self._receive(channel, start)
        elif session.rank in session.near:
            self._read(start)
        self.is_adopted = False
        self.drop_gradients()
        self._synced_generation = session.generation
        return session.verify_sync

    def check(self, exclusions: divergence.Exclusions) -> None:
        """Compare the newest commits of all ranks: see ``State.check``."""
        session = self.session
        self.settle()
        if session.generation > 0 and session.size > 1:
            group = session.process_group_for(tuple(range(session.size)))
            divergence.check(self.snapshot, Channel(group, 0), session.rank, exclusions)
            return
        try:
            self.snapshot.verify()
        finally:
            self._record_commits()

    def _seal_start(self, start: CommitId) -> None:
        """Seal ``start`` on a worker that holds the job's state, if the state is new or is sent to others."""
        session = self.session
        is_first = self.snapshot.newest is None and session.rank == session.root
        if is_first or self._must_seal:
            self.seal(start)
            self._must_seal = False
        elif session.lacking:
            self.snapshot.restamp(start)
            self._record_commits()

    def _send(self, channel: Channel) -> None:
        started = time.monotonic()
        header, payload = self.snapshot.outgoing()
        channel.send(msgspec.msgpack.encode((torch.initial_seed(), header)))
        channel.broadcast(payload)
        self.session.record_sync(payload.numel(), time.monotonic() - started)

    def _receive(self, channel: Channel, commit: CommitId, keeps_random_state: bool = False) -> None:
        """Receive the root's state, seal it as ``commit``, and make it the live state.

        The live state changes after all data has arrived. Copying the received part while the rest is in transit was
        tried: it is slower where cores are few.

        ``keeps_random_state``: keep this rank's own random state instead of deriving one from the root's seed.
        """
        session = self.session
        started = time.monotonic()
        seed, header = msgspec.msgpack.decode(channel.receive(), type=tuple[int, bytes])
        private = rng.capture() if keeps_random_state else rng.derived(seed, session.worker_key, commit.generation)
        try:
            payload = self.snapshot.incoming(header, private)
            channel.broadcast(payload)
            values = self.snapshot.seal_incoming(commit, self.snapshot.load_incoming(self._targets()))
        finally:
            self._record_commits()
        session.record_sync(payload.numel(), time.monotonic() - started)
        self._apply(values)

    def _read(self, commit: CommitId) -> None:
        """Read the root's state from its memory on this host, seal it as ``commit``, and make it the live state."""
        session = self.session
        assert self._peers is not None, "only a worker that reads commits is in near"
        source = self._peers.wait_for(session.root_slot, commit, session.check)
        peers, started = self._peers, time.monotonic()
        place = self.snapshot, session.worker_key, session.generation
        if source is None or not self.receive(commit, lambda targets: peers.load(source, *place, targets())):
            self._peers = None  # the next sync sends the state
            raise CollectiveError(f"the root's commit {commit} cannot be read from the memory of this host")
        session.record_sync(self.snapshot.size_bytes, time.monotonic() - started + peers.seconds_ahead)

    # ------------------------------------------------------------------------- ranks with different numbers of batches

    def tick_without_inputs(self) -> None:
        """End a tick in which only other ranks trained, because this rank has no inputs left."""
        self.is_behind = True
        self._ticks.drop()
        self.session.tick()

    def follow_last_joiner(self, is_last: bool) -> None:
        """Send the state of the ranks that trained last to all others, as a commit of the next tick.

        All ranks call it when no rank has inputs left. ``is_last``: this rank trained in the last tick.
        """
        session = self.session
        self.settle()
        was_last = [bool(flag) for (flag,) in Channel(None, 0).numbers_of_all([int(is_last)])]
        lacking = [rank for rank, last in enumerate(was_last) if not last]
        if not lacking:
            return
        root, commit = was_last.index(True), session.commit_id()
        if is_last:
            self.seal(commit)
        if session.rank == root:
            self._send(channel_between(session, root, lacking))
        elif not is_last:
            self._receive(channel_between(session, root, lacking), commit, keeps_random_state=True)
        session.tick()
