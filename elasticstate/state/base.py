"""State: values that a job commits, restores and syncs. Independent of their types and of the session in use."""

from __future__ import annotations

import functools
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable

from elasticstate.core.types import CommitId
from elasticstate.errors import StateError, UsageError
from elasticstate.state import divergence, rng
from elasticstate.state.channel import Channel
from elasticstate.state.join import StateJoinHook
from elasticstate.state.session import Session, SoloSession
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.storage import CommitStorage
from elasticstate.state.values import Captured, Values

logger = logging.getLogger("elasticstate")


class State(Joinable):
    """Values that are committed, restored and synced together.

    The keyword arguments become attributes that may be reassigned freely. A name that was not given to the constructor
    raises AttributeError. To define a state of your own, implement ``capture`` and ``apply``. All other methods use
    these two. Each rank's commit also contains the random state of python, numpy and torch.

    When ranks have different numbers of batches, pass the state to torch's join context, after the model. Each batch
    must end one tick. A rank without inputs ends its ticks together with the others, and receives the last state::

        with Join([ddp_model, state]):
            for batch in batches:
                ...
                state.commit()

    Without ``run``, commits stay in this process as (0, 1), (0, 2), ...; under ``elasticrun`` that raises UsageError.
    """

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name.startswith("_") or not name.isidentifier() or hasattr(type(self), name):
                raise UsageError(f"{name!r} cannot be the name of a value of {type(self).__name__}: choose another")
        super().__init__()
        self._names = tuple(values)
        self._snapshot = Snapshot()
        self._session: Session = SoloSession()
        self._exclusions = divergence.Exclusions()
        self._reset_callbacks: list[Callable[[], object]] = []
        self._changed_by_callbacks = False
        self._synced_generation = 0
        self._is_shadow = False  # this rank has no inputs while others train: its live state is older than theirs
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self._names:
            raise AttributeError(self._unknown(name))
        object.__setattr__(self, name, value)

    # ------------------------------------------------------------------------------- methods that a subclass implements

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """Return the live state as a flat dict of names and values: tensors, numpy arrays, objects that can be pickled.

        This method copies nothing. The caller copies the values immediately afterwards.
        """

    @abstractmethod
    def apply(self, values: Captured) -> None:
        """Make ``values``, with the names that ``capture`` returned, the live state.

        Tensors and arrays are views of the commit: copy them *into* your own (``mine.copy_(value)``). Keeping a view is
        an error, because the next step would overwrite the commit. Objects are new, so you may keep them.
        """

    def _optimizer_owned(self) -> Container[int]:
        """Return the ids of the captured tensors that only an optimizer's ``step`` writes. See async_commit.py."""
        return ()

    def _drop_gradients(self) -> None:
        """Set gradients to None. A failure inside ``backward`` leaves partial gradients, different on each rank."""

    # ---------------------------------------------------------------------------------------- methods that a user calls

    def commit(self, every: int = 1) -> None:
        """Make the present state the restore point, and end the tick.

        Tensors on a GPU are copied while training continues. The commit is complete, and can be restored, when the copy
        is complete. If the world ends by a failure before that, the job restores the previous commit.

        Args:
            every: save only at each ``every``-th tick of the generation: a count, because ticks are equal on all ranks.

        Raises:
            UsageError: ``every`` is less than 1; or, under ``elasticrun``, the call is outside a ``run`` function.
            StateError, CommitStorageError: a value cannot be committed (the message names it); too little storage.
            HostsUpdatedInterrupt, CollectiveError: the generation ends with this tick. ``run`` handles both.
        """
        if every < 1:
            raise UsageError(f"commit(every={every}): must be at least 1 (1 saves at each tick)")
        if (self._session.ticks + 1) % every == 0:
            self._settle()
            self._begin_commit(self._session.commit_id())
        self.check_host_updates()

    def save(self) -> None:
        """Do the same as ``commit()``. A save that did not end the tick would give one commit id two contents."""
        self.commit()

    def check_host_updates(self) -> None:
        """End the tick without saving. Raises like ``commit``, and UsageError for the first joinable of a Join."""
        if self._join_config.is_first_joinable and self._join_config.enable:
            raise UsageError("a state cannot be the first joinable: say Join([ddp_model, state])")
        if self._snapshot.is_copied:
            self._settle()
        self._session.tick()

    def restore(self) -> None:
        """Restore this worker's own last commit, with its random state. All gradients become None.

        If the commit is damaged, a warning is logged and the previous commit is used.

        Raises StateError if there is no intact commit, or if the commit does not fit the live objects.
        """
        self._settle()
        before = self.commits
        if before[0] is None:
            raise StateError("there is nothing to restore: no commit has been made yet")
        try:
            values = self._snapshot.restore(self.capture())
        finally:
            if self.commits != before:  # a commit was damaged
                self._session.sealed(*self.commits)
        self._go_back_to(values)

    def sync(self) -> None:
        """Send the root's state to the ranks that lack it, and seal (generation, 0) on all ranks.

        ``run`` calls it once in each world; later calls do nothing. If no rank lacks the state, no collective runs,
        else only the root and the lacking ranks take part. Outside a world it saves. With ``--verify-sync``, ``check``
        follows. Raises StateError and StateDivergedError, as ``commit``, ``restore`` and ``check`` do.
        """
        session = self._session
        self._settle()
        if session.generation == 0:
            self._seal(session.commit_id())
            return
        if session.generation == self._synced_generation:
            return
        start = CommitId(session.generation, 0)
        if session.rank in session.lacking:
            self._go_back_to(self._receive(self._channel(session.root, session.lacking), start))
        else:
            self._begin(start)
            if session.lacking and session.rank == session.root:
                self._send(self._channel(session.root, session.lacking))
        self._drop_gradients()
        self._synced_generation = session.generation
        if session.verify_sync:
            self.check()

    def check(self) -> None:
        """Compare the newest commits of all ranks with one small collective. All ranks must call it.

        The comparison leaves out objects that are pickled by value (lambdas, local classes), running statistics of
        batch and instance norms, and the names given to ``exclude_from_check``. The log names the last two once.
        Outside a world, and in a world of one, ``check`` verifies the checksum of this worker's commit.

        Raises:
            StateDivergedError: the commits differ. The message names the tensors and objects, and the ranks.
            StateError: there is no commit to compare, or this worker's commit is damaged.
        """
        session = self._session
        self._settle()
        if session.generation > 0 and session.size > 1:
            group = session.process_group_for(tuple(range(session.size)))
            divergence.check(self._snapshot, Channel(group, 0), session.rank, self._exclusions)
            return
        before = self.commits
        try:
            self._snapshot.verify()
        finally:
            if self.commits != before:
                session.sealed(*self.commits)

    def exclude_from_check(self, *names: str) -> None:
        """Leave values that differ by rank by design out of ``check()``. Pass the same names on all ranks.

        A name is one that ``check()`` reports, or its beginning up to a dot: "model.buffers.codebook", "loader".
        """
        self._exclusions.add(names)

    def progress(self) -> None:
        """Report progress to the agent, during work that takes longer than ``--hang-timeout`` without a tick."""
        self._session.progress()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Add functions to call, in order, in each new world before ``sync``, except in the job's first world.

        Each worker that holds a commit calls them, including a restarted worker that resumes from a commit. A worker
        without a commit receives the state of the others, which contains the changes of their callbacks. So the
        functions must depend on the committed state and on the world alone.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks. ``run`` does so in each world that this worker enters with a commit."""
        for callback in self._reset_callbacks:
            self._changed_by_callbacks = True
            callback()

    # ------------------------------------------------------------------------------------------- methods that run calls

    @property
    def commits(self) -> tuple[CommitId | None, CommitId | None]:
        """The ids of the newest commit and of the previous commit; None where there is none."""
        return self._snapshot.newest, self._snapshot.previous

    @property
    def commit_bytes(self) -> int:
        """Size of the newest commit, in bytes."""
        return self._snapshot.size_bytes

    def _reserve(self, size_bytes: int) -> None:
        """Allocate memory for commits of this size now, because fresh memory costs more than the copy into it."""
        self._snapshot.reserve(size_bytes)

    def _attach(self, storage: CommitStorage) -> None:
        """Keep the commits in ``storage`` from now on: hold the commits found there, and forget those made before."""
        self._snapshot.close()
        self._snapshot = Snapshot(storage)

    def _resume(self) -> bool:
        """Make the newest intact commit that fits the live state. Return False if no commit is held any more."""
        return self._resume_from_newest() or self._resume_from_newest()

    def _resume_from_newest(self) -> bool:
        if self._snapshot.newest is None:
            return False
        try:
            self.restore()
        except Exception as error:  # other shapes, classes that no longer exist, damage
            if self._snapshot.newest is not None:
                logger.warning("commit %s cannot be resumed from, it is given up: %s", self._snapshot.newest, error)
                self._snapshot.drop_newest()
            return False
        return True

    def _bind(self, session: Session) -> None:
        """Use the worlds of ``session``. Forget commits made outside a world: they are not commits of the job."""
        self._settle()
        newest = self._snapshot.newest
        if newest is not None and newest.generation == 0:
            self._snapshot.forget()
        self._session = session

    def _settle(self) -> None:
        """Wait until the commit that is being copied from a device, if any, is sealed or given up."""
        if not self._snapshot.is_settled:
            self._snapshot.settle()
            self._session.sealed(*self.commits)

    def _seal(self, commit: CommitId) -> None:
        """Save the live state as ``commit``, which must be newer than the newest commit: one id has one content.

        Raises CollectiveError if the generation ends before the commit is copied from a device.
        """
        self._begin_commit(commit)
        if not self._snapshot.is_settled:
            try:
                self._snapshot.finish()
            finally:
                self._session.sealed(*self.commits)

    def _begin_commit(self, commit: CommitId) -> None:
        """Begin ``_seal``. With tensors on a device, the copy continues in the background after the return."""
        self._settle()
        newest = self._snapshot.newest
        if newest is not None and commit <= newest:
            raise StateError(f"commit {commit} is not newer than {newest}, which is sealed already")
        captured = self.capture()
        is_cut = functools.partial(self._session.ended, commit.generation)
        try:
            self._snapshot.begin(captured, rng.capture(), commit, self._optimizer_owned, is_cut)
        finally:  # a write that failed half-way has destroyed the previous commit
            self._session.sealed(*self.commits)

    # ---------------------------------------------------------------------------------- methods that torch's Join calls

    def join_hook(self, **kwargs: Any) -> StateJoinHook:
        return StateJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def _shadow_tick(self) -> None:
        """End a tick in which only other ranks trained, because this rank has no inputs left."""
        self._is_shadow = True
        self._session.tick()

    def _follow_the_last(self, is_last: bool) -> None:
        """Send the last ranks' state to all other ranks, as a commit of the next tick. No rank has inputs left."""
        session = self._session
        self._settle()
        was_last = [bool(flag) for (flag,) in Channel(None, 0).numbers_of_all([int(is_last)])]
        lacking = [rank for rank, last in enumerate(was_last) if not last]
        if not lacking:
            return
        root, commit = was_last.index(True), session.commit_id()
        if is_last:
            self._seal(commit)
        if session.rank == root:
            self._send(self._channel(root, lacking))
        elif not is_last:
            self._go_back_to(self._receive(self._channel(root, lacking), commit, keeps_stream=True))
        session.tick()

    # ---------------------------------------------------------------------------------------------------------- helpers

    def _begin(self, start: CommitId) -> None:
        """Seal ``start`` on a worker that holds the job's state, if the state is new or is sent to others."""
        session = self._session
        nothing_yet = self._snapshot.newest is None and session.rank == session.root
        if nothing_yet or self._changed_by_callbacks:
            self._seal(start)
            self._changed_by_callbacks = False
        elif session.lacking:
            self._snapshot.restamp(start)
            session.sealed(*self.commits)

    def _go_back_to(self, values: Values) -> None:
        """Make the newest commit, whose content is ``values``, the live state."""
        commit = self._snapshot.newest
        assert commit is not None, "these are its values"
        self.apply(values)
        kept = self._snapshot.aliases(self.capture())
        if kept:
            raise StateError(f"apply() of {type(self).__name__} kept the commit's own memory ({kept[0]}): copy it")
        rng.apply(self._snapshot.read_private(commit))
        self._drop_gradients()
        self._changed_by_callbacks = self._is_shadow = False

    def _channel(self, root: int, lacking: Sequence[int]) -> Channel:
        """Return the channel from the root to the ranks that lack the state."""
        ranks = tuple(sorted({root, *lacking}))
        return Channel(self._session.process_group_for(ranks), ranks.index(root))

    def _send(self, channel: Channel) -> None:
        started = time.monotonic()
        header, payload = self._snapshot.outgoing()
        channel.send(msgspec.msgpack.encode((torch.initial_seed(), header)))
        channel.broadcast(payload)
        self._session.synced(payload.numel(), time.monotonic() - started)

    def _receive(self, channel: Channel, start: CommitId, keeps_stream: bool = False) -> Values:
        """Receive the root's commit as ``start``, and copy its tensors into the live ones after all data has arrived.

        ``keeps_stream``: keep this rank's own random state instead of deriving a new one from the root's seed.

        Copying the received part while the rest is in transit was tried. It is slower where cores are few.
        """
        session = self._session
        started = time.monotonic()
        seed, header = msgspec.msgpack.decode(channel.receive(), type=tuple[int, bytes])
        private = rng.capture() if keeps_stream else rng.derived(seed, session.worker_key, start.generation)
        try:
            payload = self._snapshot.incoming(header, private)
            channel.broadcast(payload)
            values = self._snapshot.seal_incoming(start, self.capture())
        finally:
            session.sealed(*self.commits)
        session.synced(payload.numel(), time.monotonic() - started)
        return values

    def _check_names(self, values: Captured) -> None:
        missing = [name for name in self._names if name not in values]
        if missing:
            raise StateError(f"the commit has no {', '.join(missing)}: were all ranks' states made alike?")

    def _unknown(self, name: str) -> str:
        known = ", ".join(self.__dict__.get("_names", ())) or "none"
        return f"{type(self).__name__} has no value {name!r}; those given to the constructor are: {known}"
