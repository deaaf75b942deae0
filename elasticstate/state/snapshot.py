"""The two last commits of one worker, in buffers that may outlive it.

A buffer is a safetensors file (see layout.py), and holds a commit if there is a seal that fits (``ControlPage``). The
older buffer is the one that is overwritten: its seal is taken away before its first byte changes, and the new one is
written last. Whatever happens in between, to this process or to the machine's power, the newest commit stays whole.

Buffers are kept as long as they are big enough: the first touch of fresh memory costs several times the copy itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from elasticstate._native import Pieces, checksum, checksums, fill, gather, scatter
from elasticstate.config import commit_device_memory
from elasticstate.core.types import CommitId
from elasticstate.errors import CollectiveError, StateError
from elasticstate.state.buffer import Buffer
from elasticstate.state.layout import Frame, Header, Layout, digest, view
from elasticstate.state.overlap import Copy, Item, Outcome
from elasticstate.state.plan import Plan, Targets, address, copy_odd, random_room, targets
from elasticstate.state.queue import Queue, QueueOf, queue_of
from elasticstate.state.space import PrivateSpace, Space
from elasticstate.state.values import Captured, Values, dumps, is_array

NOTHING = Pieces([], [], [])

logger = logging.getLogger("elasticstate")


class Snapshot:
    """Writes and reads the commits in a space. Not thread-safe: one thread writes and reads.

    Made over a space that has commits of its owner, it holds them; what is damaged there is none.

    A commit of tensors on devices may be on its way (see overlap.py). Until it is settled it is not held, and nor is
    the one whose buffer it goes into. Whatever looks into a buffer settles it first.
    """

    def __init__(self, space: Space | None = None, queue_of: QueueOf = queue_of) -> None:
        self._space: Space = space if space is not None else PrivateSpace()
        self._queue_of = queue_of
        self._copy: tuple[Copy, CommitId] | None = None  # on its way into the older buffer
        self._trusts_steps = True
        self._last_error: BaseException | None = None
        buffers = [Buffer(index, self._space) for index in (0, 1)]
        buffers.sort(key=lambda buffer: buffer.commit or CommitId(-1, -1))
        self._older, self._newer = buffers
        self._plan: Plan | None = None

    @property
    def newest(self) -> CommitId | None:
        """The id of the last sealed commit."""
        return self._newer.commit

    @property
    def previous(self) -> CommitId | None:
        """The id of the commit before it; None also while, and if, its buffer could not be overwritten."""
        return self._older.commit

    @property
    def size_bytes(self) -> int:
        """What a commit like the newest one takes; 0: there is none."""
        return self._newer.length if self._newer.commit is not None else 0

    def reserve(self, size_bytes: int) -> None:
        """Take memory for two commits of this size, and touch it: what is held already stays as it is.

        Raises CommitSpaceError when there is not enough.
        """
        self.settle()
        for buffer in (self._newer, self._older):
            if buffer.commit is None:
                buffer.make_room(size_bytes)
                buffer.touch()

    # ---------------------------------------------------------------------------------------------------- a commit

    def write(self, captured: Captured, private: bytes, commit: CommitId) -> None:
        """Copy ``captured`` into the older buffer and seal it as ``commit``. ``private`` is never sent to others.

        Raises:
            StateError: something cannot be pickled, or is no dense tensor (the message names it). Both earlier commits
                are whole then; after any later error the newest one is.
            CommitSpaceError: there is no room for it.
        """
        self.begin(captured, private, commit)
        self.finish()

    def begin(
        self,
        captured: Captured,
        private: bytes,
        commit: CommitId,
        steady: Callable[[], Container[int]] = lambda: (),
        is_cut: Callable[[], bool] = lambda: False,
    ) -> None:
        """``write``, which goes on behind the caller's back if there are tensors on a device; then it is not held yet.

        Args:
            steady: gives the ids of tensors that nothing but the ``step`` of an optimizer writes; asked only if needed.
            is_cut: whether what devices hold by now may be rubbish: a commit that is copied later than this is none.

        Raises what ``write`` raises.
        """
        self.settle()
        tensors, arrays, objects = _sort_out(captured)
        blob = dumps(objects)
        plan = self._plan
        if plan is None or not plan.fits(tensors, arrays, len(private)):
            plan = self._plan = Plan(tensors, arrays, len(private), plan, self._queue_of)
        buffer = self._older
        found = buffer.begin(plan.header, private, len(blob))
        if plan.odd:
            copy_odd(buffer.memory, {**tensors, **arrays}, plan.odd, buffer.frame.tensors)
        buffer.memory.numpy()[buffer.frame.objects : buffer.length] = np.frombuffer(blob, dtype=np.uint8)
        start = buffer.frame.random
        if not plan.queued:
            self._seal_older(gather(buffer.memory, plan.pieces, start, buffer.length, found), commit)
            return
        fill(buffer.memory, plan.pieces, start, buffer.length)
        items = self._items(plan, tensors, steady() if self._trusts_steps else ())
        content = buffer.memory[: buffer.length]
        seal = partial(buffer.write_seal, commit)
        self._copy = Copy(items, content, start, found, seal, is_cut, commit_device_memory()), commit

    def _items(self, plan: Plan, tensors: dict[str, torch.Tensor], steady: Container[int]) -> list[Item]:
        """What goes by queues, into the older buffer."""
        buffer, items = self._older, []
        for (name, entry), place in zip(plan.queued, buffer.places(plan), strict=True):
            tensor = tensors[name]
            queue = self._queue_of(tensor.device)
            assert queue is not None, "the plan has asked for it"
            buffer.pin(queue)
            is_steady = id(tensor) in steady and not tensor.is_inference()
            items.append(Item(tensor, place, buffer.frame.tensors + entry.offset + entry.size_bytes, queue, is_steady))
        return items

    @property
    def is_settled(self) -> bool:
        """Whether no commit is on its way."""
        return self._copy is None

    @property
    def is_copied(self) -> bool:
        """Whether there is one that ``settle`` would not have to wait for."""
        return self._copy is not None and self._copy[0].is_done

    def settle(self) -> Outcome | None:
        """Wait for the commit on its way, if there is one. If it has come to nothing, a warning says why."""
        if self._copy is None:
            return None
        copy, commit = self._copy
        outcome = copy.wait()
        self._copy = None
        if outcome is Outcome.SEALED:
            self._older.take_note(commit, copy.checksum)
            self._newer, self._older = self._older, self._newer
        elif outcome is Outcome.TORN:
            self._trusts_steps = False
            logger.warning(
                "commit %s is given up: while it was copied, something else than an optimizer's step() wrote a "
                "parameter or the state of an optimizer; from now on training waits until commits are copied",
                commit,
            )
        elif outcome is Outcome.FAILED:
            logger.warning("commit %s could not be copied from the device: %s", commit, copy.error)
        self._last_error = copy.error
        return outcome

    def finish(self) -> None:
        """``settle``, for who cannot go on without that commit.

        Raises CollectiveError if its generation was over before it was copied, and what the device has raised.
        """
        outcome = self.settle()
        if outcome is Outcome.CUT:
            raise CollectiveError("the generation was over before its commit was copied from the device")
        if outcome is not None and outcome is not Outcome.SEALED:
            raise self._last_error or StateError("the commit was written while it was copied")

    def close(self) -> None:
        """The memory is about to be given back."""
        self.settle()
        for buffer in (self._newer, self._older):
            buffer.unpin()

    def restamp(self, commit: CommitId) -> None:
        """Give the newest commit another id. Raises StateError if there is none."""
        self.settle()
        if self._newer.commit is None:
            raise StateError(f"there is no commit that could become {commit}")
        self._newer.seal(commit, self._newer.checksum)

    def forget(self) -> None:
        """No commit is held any more; the memory is kept."""
        self.settle()
        for buffer in (self._newer, self._older):
            buffer.unseal()

    def drop_newest(self) -> None:
        """The commit before the newest one is the newest one now."""
        self.settle()
        self._newer.unseal()
        self._newer, self._older = self._older, self._newer

    # --------------------------------------------------------------------------------------------------- and back

    def restore(self, live: Captured) -> Values:
        """The content of the newest commit that is whole, already written into what is like it among ``live``.

        One pass over the memory verifies and copies: so what is in ``live`` is to be given up when this raises. A
        damaged commit is dropped with a warning. The values are views of the buffer: copy them, never keep them.

        Raises StateError if there is no whole commit.
        """
        self.settle()
        damaged = False
        while self._newer.commit is not None:
            buffer = self._newer
            found = targets(buffer.frame.layout, live, [self._newer.memory, self._older.memory], self._queue_of)
            if buffer.is_whole(_pieces(buffer.frame, found.addresses)):
                return self._brought(buffer, found)
            self._give_up(buffer)
            damaged = True
        raise StateError(
            "both commits are damaged: nothing is left to restore"
            if damaged
            else "there is nothing to restore: no commit has been made yet"
        )

    def read(self, commit: CommitId) -> Values:
        """What was captured for ``commit``. Tensors and arrays are views of the buffer: copy them, never keep them.

        Raises StateError if that commit is not held, or is found to be damaged.
        """
        self.settle()
        buffer = self._find(commit)
        if not buffer.is_whole(NOTHING):
            self._give_up(buffer)
            raise StateError(f"commit {commit} is damaged")
        return Values(buffer.memory, buffer.frame, buffer.objects(), {})

    def read_private(self, commit: CommitId) -> bytes:
        """The part of ``commit`` that is this worker's alone. To be called after ``restore`` or ``read``."""
        buffer = self._find(commit)
        return buffer.private()

    def aliases(self, captured: Captured) -> list[str]:
        """Names of the captured tensors and arrays that lie in one of the buffers."""
        addresses = {name: address(value) for name, value in captured.items() if is_array(value)}
        return [name for name, at in addresses.items() if self._newer.contains(at) or self._older.contains(at)]

    # ---------------------------------------------------------------------------------------- from worker to worker

    def outgoing(self) -> tuple[bytes, torch.Tensor]:
        """The newest commit as (what it consists of, flat bytes) for those who lack it; without the private part."""
        self.settle()
        buffer = self._newer
        return (
            msgspec.msgpack.encode((buffer.frame.layout, buffer.length - buffer.frame.objects)),
            buffer.memory[buffer.frame.tensors : buffer.length],
        )

    def incoming(self, header: bytes, private: bytes) -> torch.Tensor:
        """Begin to receive a commit: ``uint8[n]`` of the older buffer, to be filled and then sealed."""
        self.settle()
        layout, objects_bytes = msgspec.msgpack.decode(header, type=tuple[Layout, int])
        buffer = self._older
        random_bytes = random_room(len(private))
        buffer.begin(Header(layout, random_bytes), private, objects_bytes)
        return buffer.memory[buffer.frame.tensors : buffer.length]

    def seal_incoming(self, commit: CommitId, live: Captured) -> Values:
        """Seal what was received as the only commit: whoever lacked the job's state holds nothing else of worth.

        Returns what ``restore`` would: one pass over the memory makes the checksum and copies.
        """
        buffer = self._older
        found = targets(buffer.frame.layout, live, [self._newer.memory, buffer.memory], self._queue_of)
        self._seal_older(scatter(buffer.memory, _pieces(buffer.frame, found.addresses), 0, buffer.length), commit)
        self._older.unseal()
        return self._brought(buffer, found)

    # ------------------------------------------------------------------------------------------------- to compare

    def verify(self) -> None:
        """Read the newest commit. Raises StateError if there is none, or if it is damaged: then it is dropped."""
        self.settle()
        commit = self._newer.commit
        if commit is None:
            raise StateError("there is no commit to check: none has been made yet")
        if not self._newer.is_whole(NOTHING):
            self._give_up(self._newer)
            rest = f"commit {self.newest} is left" if self.newest is not None else "no commit is left"
            raise StateError(f"commit {commit} is damaged: its checksum is wrong; {rest}")

    def summary(self) -> tuple[int, int, int]:
        """The newest commit in three numbers: 63 bits of the layout, checksum of all tensors, that of all objects."""
        self.settle()
        buffer, frame = self._newer, self._newer.frame
        layout = digest(msgspec.msgpack.encode(frame.layout)) >> 1
        tensors = checksum(buffer.memory, frame.tensors, frame.objects)
        return layout, tensors, checksum(buffer.memory, frame.objects, buffer.length)

    def details(self) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, Any]]:
        """(dtype, shape, checksum) of each tensor and array of the newest commit, and its objects."""
        self.settle()
        buffer, frame = self._newer, self._newer.frame
        entries = frame.layout.entries
        found = checksums(
            buffer.memory, [frame.tensors + entry.offset for entry in entries], [entry.size_bytes for entry in entries]
        )
        tensors = {e.name: (e.dtype, e.shape, value) for e, value in zip(entries, found, strict=True)}
        return tensors, buffer.objects()

    # ----------------------------------------------------------------------------------------------------- the parts

    def _brought(self, buffer: Buffer, found: Targets) -> Values:
        """The content of a buffer that is whole, all of it on its way to devices at once; returns when it is there."""
        by_queue: dict[Queue, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for tensor, entry in found.queued.values():
            queue = self._queue_of(tensor.device)
            assert queue is not None, "targets() has asked for it"
            live, places = by_queue.setdefault(queue, ([], []))
            live.append(tensor)
            places.append(view(buffer.memory, entry, buffer.frame.tensors))
        for queue, (live, places) in by_queue.items():
            buffer.pin(queue)
            queue.bring(live, places)
        return Values(buffer.memory, buffer.frame, buffer.objects(), found.found)

    def _seal_older(self, found: int, commit: CommitId) -> None:
        self._older.seal(commit, found)
        self._newer, self._older = self._older, self._newer

    def _give_up(self, buffer: Buffer) -> None:
        logger.warning(
            "commit %s (buffer %d) is damaged: its checksum is wrong; it is given up", buffer.commit, buffer.index
        )
        if buffer is self._newer:
            self.drop_newest()
        else:
            buffer.unseal()

    def _find(self, commit: CommitId) -> Buffer:
        for buffer in (self._newer, self._older):
            if buffer.commit == commit:
                return buffer
        raise StateError(f"commit {commit} is not held, only {self.newest} and {self.previous}")


def _sort_out(
    captured: Captured,
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Tensors, arrays, and objects."""
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    objects: dict[str, Any] = {}
    for name, value in captured.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif is_array(value):
            arrays[name] = value
        else:
            objects[name] = value
    return tensors, arrays, objects


def _pieces(frame: Frame, addresses: dict[int, int]) -> Pieces:
    sizes = {entry.offset: entry.size_bytes for entry in frame.layout.entries if entry.size_bytes}
    offsets = sorted(addresses)
    return Pieces(
        [addresses[offset] for offset in offsets],
        [sizes[offset] for offset in offsets],
        [frame.tensors + offset for offset in offsets],
    )
