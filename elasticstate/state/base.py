"""State: what a job commits, restores and syncs. Independent of what it consists of, and of who runs it."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
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
from elasticstate.state.session import Alone, Session
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.space import Space
from elasticstate.state.values import Captured, Values

logger = logging.getLogger("elasticstate")


class State(Joinable):
    """Values that are committed, restored and synced together.

    The keyword arguments become attributes that may be reassigned freely; a name that was not given to the constructor
    raises AttributeError. For a kind of state of your own, say ``capture`` and ``apply``: all else follows from these
    two, and so does the random state of python, numpy and torch, which belongs to each rank's commit.

    When ranks have different numbers of batches, a state goes into torch's join context, behind the model. Each batch
    has to end one tick. A rank that has run out ends its ticks with the others, and gets the state of the last one::

        with Join([ddp_model, state]):
            for batch in batches:
                ...
                state.commit()

    Used without ``run``, commits are kept in this process under the ids (0, 1), (0, 2), ...
    """

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name.startswith("_") or not name.isidentifier() or hasattr(type(self), name):
                raise UsageError(f"{name!r} cannot be the name of a value of {type(self).__name__}: choose another")
        super().__init__()
        self._names = tuple(values)
        self._snapshot = Snapshot()
        self._session: Session = Alone()
        self._reset_callbacks: list[Callable[[], object]] = []
        self._changed_by_callbacks = False
        self._synced_generation = 0
        self._is_shadow = False  # out of inputs, while others train: the live state is behind theirs
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self._names:
            raise AttributeError(self._unknown(name))
        object.__setattr__(self, name, value)

    # ------------------------------------------------------------------------------------- what a subclass defines

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """The live state as a flat dict of names and values: tensors, numpy arrays, objects that can be pickled.

        Nothing is copied here; what is captured is copied at once after it.
        """

    @abstractmethod
    def apply(self, values: Captured) -> None:
        """Make ``values``, of the form that ``capture`` gave, the live state.

        Tensors and arrays are views of the commit: copy them *into* your own (``mine.copy_(value)``). To keep one is an
        error, since the next step would overwrite the commit. Objects are new ones, yours to keep.
        """

    def _drop_gradients(self) -> None:
        """Set gradients to None. A failure inside ``backward`` leaves partial ones, different on each rank."""

    # ---------------------------------------------------------------------------------------------- what a user calls

    def commit(self, every: int = 1) -> None:
        """Make the present state the restore point, and end the tick.

        Args:
            every: save only at each ``every``-th tick of the generation, and merely end the tick at the others. By
                count, because ticks must be equal on all ranks.

        Raises:
            UsageError: ``every`` is less than 1.
            StateError: something in the state cannot be committed (the message names it).
        """
        if every < 1:
            raise UsageError(f"commit(every={every}): must be at least 1 (1 saves at each tick)")
        if (self._session.ticks + 1) % every == 0:
            self._seal(self._session.commit_id())
        self.check_host_updates()

    def save(self) -> None:
        """The same as ``commit()``: a save that ended no tick would give one id two contents."""
        self.commit()

    def check_host_updates(self) -> None:
        """End the tick without saving."""
        if self._join_config.is_first_joinable and self._join_config.enable:
            raise UsageError("a state cannot be the first joinable: say Join([ddp_model, state])")
        self._session.tick()

    def restore(self) -> None:
        """Back to this worker's own last commit, its random state included; all gradients become None.

        A commit that is found to be damaged is given up with a warning, for the one before it.

        Raises StateError if there is no whole commit, or it does not fit the live objects.
        """
        before = self.commits
        if before[0] is None:
            raise StateError("there is nothing to restore: no commit has been made yet")
        try:
            values = self._snapshot.restore(self.capture())
        finally:
            if self.commits != before:  # one was damaged
                self._session.sealed(*self.commits)
        self._go_back_to(values)

    def sync(self) -> None:
        """Bring the root's state to those who lack it, and seal (generation, 0) on all. ``run`` calls it once a world.

        Nothing moves, and no collective runs, if nobody lacks it; only the root and those who do take part otherwise.
        Later calls in the same generation do nothing. Outside a world it is a save. With ``--verify-sync`` a ``check``
        follows.
        """
        session = self._session
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
        """Compare the newest commits of all ranks: one small collective, in which all have to take part.

        Objects that are pickled by value (lambdas, local classes) are not compared. Outside a world, and in a world of
        one, the checksum of the own commit is verified.

        Raises:
            StateDivergedError: they differ; the message names the tensors and objects, and the ranks.
            StateError: there is no commit to compare, or the own one is damaged.
        """
        session = self._session
        if session.generation > 0 and session.size > 1:
            group = session.process_group_for(tuple(range(session.size)))
            divergence.check(self._snapshot, Channel(group, 0), session.rank)
            return
        before = self.commits
        try:
            self._snapshot.verify()
        finally:
            if self.commits != before:
                session.sealed(*self.commits)

    def progress(self) -> None:
        """Say that the script gets on: for what takes longer than ``--hang-timeout`` without a tick."""
        self._session.progress()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Add functions to be called, in order, in each new world before ``sync``; not in a worker's first one.

        They must depend on the committed state and the world alone, for they run on each rank.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks. ``run`` does it in each world but the worker's first."""
        for callback in self._reset_callbacks:
            self._changed_by_callbacks = True
            callback()

    # ------------------------------------------------------------------------------------------------ what run calls

    @property
    def commits(self) -> tuple[CommitId | None, CommitId | None]:
        """The ids of the newest commit and of the one before it."""
        return self._snapshot.newest, self._snapshot.previous

    @property
    def commit_bytes(self) -> int:
        """What the newest commit takes."""
        return self._snapshot.size_bytes

    def _reserve(self, size_bytes: int) -> None:
        """Make room for commits of this size now, as fresh memory costs more than the copy into it."""
        self._snapshot.reserve(size_bytes)

    def _attach(self, space: Space) -> None:
        """Keep the commits in ``space`` from now on. Those that it has are held; those made before are forgotten."""
        self._snapshot = Snapshot(space)

    def _resume(self) -> bool:
        """Make the newest whole commit, if there is one that fits, the live state. False: none is held any more."""
        return self._resume_from_newest() or self._resume_from_newest()

    def _resume_from_newest(self) -> bool:
        if self._snapshot.newest is None:
            return False
        try:
            self.restore()
        except Exception as error:  # other shapes, classes that are gone, damage
            if self._snapshot.newest is not None:
                logger.warning("commit %s cannot be resumed from, it is given up: %s", self._snapshot.newest, error)
                self._snapshot.drop_newest()
            return False
        return True

    def _bind(self, session: Session) -> None:
        """Live in the worlds of ``session``. Commits made outside a world are no commits of the job: forgotten."""
        newest = self._snapshot.newest
        if newest is not None and newest.generation == 0:
            self._snapshot.forget()
        self._session = session

    def _seal(self, commit: CommitId) -> None:
        """Save the live state as ``commit``, which must be newer than the newest one: one id, one content."""
        newest = self._snapshot.newest
        if newest is not None and commit <= newest:
            raise StateError(f"commit {commit} is not newer than {newest}, which is sealed already")
        captured = self.capture()
        try:
            self._snapshot.write(captured, rng.capture(), commit)
        finally:  # a write that failed half-way has cost the previous commit
            self._session.sealed(*self.commits)

    # ---------------------------------------------------------------------------------- what torch's Join calls

    def join_hook(self, **kwargs: Any) -> StateJoinHook:
        return StateJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def _shadow_tick(self) -> None:
        """The others have trained a step more than this rank has inputs for."""
        self._is_shadow = True
        self._session.tick()

    def _follow_the_last(self, is_last: bool) -> None:
        """All are out of inputs: whoever was not among the last gets their state, as a commit of the next tick."""
        session = self._session
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
            self._go_back_to(self._receive(self._channel(root, lacking), commit))
        session.tick()

    # ------------------------------------------------------------------------------------------------------ the parts

    def _begin(self, start: CommitId) -> None:
        """Seal ``start`` on a worker that holds the job's state, if the state is new or goes to others."""
        session = self._session
        nothing_yet = self._snapshot.newest is None and session.rank == session.root
        if nothing_yet or self._changed_by_callbacks:
            self._seal(start)
            self._changed_by_callbacks = False
        elif session.lacking:
            self._snapshot.restamp(start)
            session.sealed(*self.commits)

    def _go_back_to(self, values: Values) -> None:
        """Make the newest commit, with these values, the live state."""
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
        """From the root to those who lack the state."""
        ranks = tuple(sorted({root, *lacking}))
        return Channel(self._session.process_group_for(ranks), ranks.index(root))

    def _send(self, channel: Channel) -> None:
        started = time.monotonic()
        header, payload = self._snapshot.outgoing()
        channel.send(msgspec.msgpack.encode((torch.initial_seed(), header)))
        channel.broadcast(payload)
        self._session.synced(payload.numel(), time.monotonic() - started)

    def _receive(self, channel: Channel, start: CommitId) -> Values:
        """Get the root's commit, as ``start``. Its tensors are in the live ones by then; until all is there these stay.

        To copy what has come in while the rest is on its way was tried, and is slower where cores are few.
        """
        session = self._session
        started = time.monotonic()
        seed, header = msgspec.msgpack.decode(channel.receive(), type=tuple[int, bytes])
        private = rng.derived(seed, session.worker_key, start.generation)
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
