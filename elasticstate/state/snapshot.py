"""Snapshot: the last two commits of one worker, in buffers that may outlive the worker.

A buffer is a safetensors file (see layout.py), and holds a commit if it has a matching seal (``ControlPage``). A new
commit overwrites the older buffer: its seal is removed before the first byte changes, and the new seal is written last.
If the process or the machine fails in between, the newest commit stays intact.

Buffers are kept as long as they are large enough: the first touch of fresh memory costs several times the copy itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from elasticstate._native import checksum, checksums, equal, fill, gather, scatter
from elasticstate.commits import NO_SHARDING, Sharding
from elasticstate.core.ids import CommitId
from elasticstate.errors import CollectiveError, StateError
from elasticstate.log import logger
from elasticstate.options import commit_device_memory
from elasticstate.state.async_commit import Copy, CopyOutcome, CopyStreamOf, Item, copy_stream_of
from elasticstate.state.buffer import (
    Buffer,
    CommitStorage,
    Growth,
    Incoming,
    Plan,
    PrivateStorage,
    Targets,
    address,
    check_dense,
    copy_odd,
    dtype_name,
    find_targets,
    random_capacity,
)
from elasticstate.state.divergence import canonical
from elasticstate.state.layout import Entry, Header, Layout, number_of
from elasticstate.state.values import (
    Array,
    Captured,
    Values,
    dumps,
    flat_bytes,
    is_array,
    split_by_kind,
)


class LiveValues:
    """The live values of one rank (see ``divergence.Comparable``). Tensors of a device are copied one by one.

    The values must not change while this object is used.
    """

    def __init__(self, captured: Captured, ticks: int) -> None:
        tensors, arrays, self._objects = split_by_kind(captured)
        for name, tensor in tensors.items():
            check_dense(name, tensor)
        self._arrays: dict[str, Array] = {**tensors, **arrays}
        self._ticks = ticks
        self._checksums: dict[str, int] = {}

    @property
    def newest(self) -> CommitId:
        """The number of completed ticks, in place of the commit that ranks must have in common."""
        return CommitId(0, self._ticks)

    def difference(self, one_copy: bool) -> str:
        """Text for the error if the ranks have different values."""
        if not one_copy:
            return f"Ranks have different values after {self._ticks} ticks of this world"
        return (
            f"Ranks have different values after {self._ticks} ticks of this world, and with --one-copy-per-host a "
            "restore would replace them by those of one worker of each host"
        )

    def summary(self, left_out: Container[str] = ()) -> tuple[int, int, int]:
        """Return what ``Snapshot.summary`` returns for a commit, with other numbers."""
        included = {name: value for name, value in self._arrays.items() if name not in left_out}
        forms = [(name, *_form(value)) for name, value in included.items()]
        found = [self._checksum(name) for name in included]
        blob = np.frombuffer(dumps(self._objects), dtype=np.uint8)
        return number_of(forms), number_of(found), checksum(blob, 0, len(blob))

    def details(self) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, Any]]:
        """Return what ``Snapshot.details`` returns for a commit."""
        objects: dict[str, Any] = pickle.loads(dumps(self._objects))  # as a newcomer has them
        return {name: (*_form(value), self._checksum(name)) for name, value in self._arrays.items()}, objects

    def _checksum(self, name: str) -> int:
        known = self._checksums.get(name)
        if known is None:
            content = _bytes(self._arrays[name])
            known = self._checksums[name] = checksum(content, 0, len(content))
        return known


def _form(value: Array) -> tuple[str, tuple[int, ...]]:
    is_tensor = isinstance(value, torch.Tensor)
    return dtype_name(value.dtype) if is_tensor else value.dtype.str, tuple(value.shape)  # type: ignore[union-attr]


def _bytes(value: Array) -> Any:
    """Return the bytes of a value in C order, as ``uint8[n]`` on the CPU."""
    if isinstance(value, torch.Tensor):
        return flat_bytes(value.detach().cpu())
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def has_same_bytes(live: Array, stored: Array) -> bool:
    """Return True if both have the same dtype, shape and bytes. The comparison runs on the device of ``live``."""
    if _form(live) != _form(stored):
        return False
    if isinstance(live, torch.Tensor) and isinstance(stored, torch.Tensor):
        return torch.equal(flat_bytes(live), flat_bytes(stored).to(live.device))
    return bool(np.array_equal(_bytes(live), _bytes(stored)))


class Snapshot:
    """Reader and writer of the commits in a commit storage. Not thread-safe: one thread writes and reads.

    A new snapshot holds the commits of the storage's owner that the storage contains, except damaged ones.

    A commit of tensors on devices may still be in progress (see async_commit.py). Until it is settled, the snapshot
    holds neither this commit nor the one whose buffer it overwrites. Every method that reads a buffer settles it first.
    """

    def __init__(self, storage: CommitStorage | None = None, copy_stream_of: CopyStreamOf = copy_stream_of) -> None:
        self._storage: CommitStorage = storage if storage is not None else PrivateStorage()
        self._copy_stream_of = copy_stream_of
        self._copy: tuple[Copy, CommitId] | None = None  # in progress, into the older buffer
        self._trusts_steps = True
        self._last_error: BaseException | None = None
        self._older, self._newer = self._open()
        self._plan: Plan | None = None

    def _open(self) -> list[Buffer]:
        """Return the buffers of the storage, the older commit first."""
        buffers = [Buffer(index, self._storage) for index in (0, 1)]
        return sorted(buffers, key=lambda buffer: buffer.commit or CommitId(-1, -1))

    def _prepare(self) -> None:
        """Settle the commit in progress, and replace a stale storage, before the older buffer or a seal is written."""
        self.settle()
        if self._storage.page.is_stale:
            self.close()
            self._storage.renew()
            self._older, self._newer = self._open()

    @property
    def newest(self) -> CommitId | None:
        """The id of the newest sealed commit; None: there is none."""
        return self._newer.commit

    @property
    def previous(self) -> CommitId | None:
        """The id of the commit before the newest. None also while its buffer is overwritten, or after that failed."""
        return self._older.commit

    @property
    def size_bytes(self) -> int:
        """Size of the newest commit, in bytes; 0: there is none."""
        return self._newer.length if self._newer.commit is not None else 0

    @property
    def has_attached(self) -> bool:
        """True if the newest commit has values attached to a world, of which each worker holds its own shards."""
        return self._newer.commit is not None and bool(self._newer.frame.sharding.names)

    def reserve(self, size_bytes: int) -> None:
        """Allocate and touch memory for two commits of ``size_bytes`` bytes. Commits already held do not change.

        Raises CommitStorageError when there is too little memory.
        """
        self.settle()
        for buffer in (self._newer, self._older):
            if buffer.commit is None:
                buffer.ensure_size(size_bytes)
                buffer.touch()

    # ------------------------------------------------------------------------------------------------- writing a commit

    def write(self, captured: Captured, private: bytes, commit: CommitId) -> None:
        """Copy ``captured`` into the older buffer and seal it as ``commit``. ``private`` is never sent to other ranks.

        Raises:
            StateError: a value cannot be pickled, or is not a dense tensor (the message names it). Both earlier commits
                stay intact then. After any later error the newest one stays intact.
            CommitStorageError: the commit storage has too little space.
        """
        self.begin(captured, private, commit)
        self.finish()

    def begin(
        self,
        captured: Captured,
        private: bytes,
        commit: CommitId,
        optimizer_owned: Callable[[], Container[int]] = lambda: (),
        is_cut: Callable[[], bool] = lambda: False,
        sharding: Sharding = NO_SHARDING,
        counted: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """Begin ``write``. With tensors on a device, the copy continues in the background; the commit is not held yet.

        Args:
            optimizer_owned: returns the ids of tensors that only an optimizer's ``step`` writes; called only if needed.
            is_cut: returns True if device data may be undefined by now. A commit whose copy ends after that is
                discarded.
            sharding: of the tensors in ``captured`` that belong to attached values.
            counted: by the id of a captured tensor, the tensor whose version counts the writes to both.

        Raises what ``write`` raises.
        """
        self._prepare()
        tensors, arrays, objects = split_by_kind(captured)
        blob = dumps(objects)
        plan, buffer = self._planned(tensors, arrays, len(private), sharding), self._older
        found = buffer.begin(plan.header, private, len(blob))
        if plan.odd:
            copy_odd(buffer.memory, {**tensors, **arrays}, plan.odd, buffer.frame.tensors)
        buffer.memory.numpy()[buffer.frame.objects : buffer.length] = np.frombuffer(blob, dtype=np.uint8)
        start = buffer.frame.random
        if not plan.queued:
            self._seal_older(gather(buffer.memory, plan.pieces, start, buffer.length, found), commit)
            return
        fill(buffer.memory, plan.pieces, start, buffer.length)
        items = self._items(plan, tensors, optimizer_owned() if self._trusts_steps else (), counted or {})
        content = buffer.memory[: buffer.length]
        seal = partial(buffer.write_seal, commit)
        self._copy = Copy(items, content, start, found, seal, is_cut, commit_device_memory()), commit

    def grow(self, captured: Captured, private: bytes, sharding: Sharding) -> Growth | None:
        """Begin to grow the older buffer for a commit of these values; its commit is lost. None: it need not grow."""
        tensors, arrays, objects = split_by_kind(captured)
        plan = self._planned(tensors, arrays, len(private), sharding)
        size = plan.header.frame.objects + len(dumps(objects))
        must_grow = self._older.memory.numel() < size and not plan.queued and not self._storage.page.is_stale
        return Growth(self._older, size) if must_grow else None

    def _planned(self, tensors: dict[str, torch.Tensor], arrays: Any, private: int, places: Sharding) -> Plan:
        if self._plan is None or not self._plan.fits(tensors, arrays, private, places):
            self._plan = Plan(tensors, arrays, private, self._plan, self._copy_stream_of, places)
        return self._plan

    def _items(
        self,
        plan: Plan,
        tensors: dict[str, torch.Tensor],
        optimizer_owned: Container[int],
        counted: Mapping[int, torch.Tensor],
    ) -> list[Item]:
        """Return the device tensors that copy streams copy into the older buffer."""
        buffer, items = self._older, []
        for (name, entry), place in zip(plan.queued, buffer.places(plan), strict=True):
            tensor = tensors[name]
            copy_stream = self._copy_stream_of(tensor.device)
            assert copy_stream is not None, "the plan has asked for it"
            buffer.pin(copy_stream)
            is_optimizer_owned = id(tensor) in optimizer_owned and not tensor.is_inference()
            end = buffer.frame.tensors + entry.offset + entry.size_bytes
            counting = counted.get(id(tensor), tensor)
            items.append(Item(tensor, place, end, copy_stream, is_optimizer_owned, counting))
        return items

    @property
    def is_settled(self) -> bool:
        """True if no commit is in progress."""
        return self._copy is None

    @property
    def is_copied(self) -> bool:
        """True if a commit is in progress and ``settle`` would not have to wait for it."""
        return self._copy is not None and self._copy[0].is_done

    def settle(self) -> CopyOutcome | None:
        """Wait for the commit in progress, if any. If it failed, log a warning with the reason."""
        if self._copy is None:
            return None
        copy, commit = self._copy
        outcome = copy.wait()
        self._copy = None
        if outcome is CopyOutcome.SEALED:
            self._older.record_seal(commit, copy.checksum)
            self._newer, self._older = self._older, self._newer
        elif outcome is CopyOutcome.TORN:
            self._trusts_steps = False
            logger.warning(
                "discarded commit %s: code other than an optimizer's step() wrote a parameter or the state of an "
                "optimizer while the commit was copied. From now on, training waits until each commit is copied.",
                commit,
            )
        elif outcome is CopyOutcome.FAILED:
            logger.warning("discarded commit %s: the copy from the device failed: %s", commit, copy.error)
        self._last_error = copy.error
        return outcome

    def finish(self) -> None:
        """Call ``settle``, and raise if the commit failed.

        Raises CollectiveError if the commit's generation ended before the copy did, or the device's error.
        """
        outcome = self.settle()
        if outcome is CopyOutcome.CUT:
            raise CollectiveError("the generation ended before its commit was copied from the device")
        if outcome is not None and outcome is not CopyOutcome.SEALED:
            raise self._last_error or StateError(
                "Code other than an optimizer's step() wrote a tensor of the commit while it was copied. Commit again."
            )

    def close(self) -> None:
        """Settle and unpin, before the memory is released."""
        self.settle()
        for buffer in (self._newer, self._older):
            buffer.unpin()

    def restamp(self, commit: CommitId) -> None:
        """Give the newest commit another id. Raises StateError if there is none."""
        self._prepare()
        if self._newer.commit is None:
            raise StateError(f"This worker holds no commit that can become {commit}. Commit first.")
        self._newer.seal(commit, self._newer.checksum)

    def forget(self) -> None:
        """Discard all commits, and keep the memory."""
        self.settle()
        for buffer in (self._newer, self._older):
            buffer.unseal()

    def drop_newest(self) -> None:
        """Discard the newest commit. The commit before it becomes the newest."""
        self.settle()
        self._newer.unseal()
        self._newer, self._older = self._older, self._newer

    def drop_previous(self) -> None:
        """Discard the commit before the newest."""
        self._older.unseal()

    # ------------------------------------------------------------------------------------------------- reading a commit

    def load_into(self, live: Captured) -> Values:
        """Return the content of the newest intact commit, after copying it into the values of ``live`` that it fits.

        One pass over the memory verifies and copies, so the content of ``live`` is undefined if this raises. Values
        that the pass cannot copy (other strides in memory) are left to the caller: see ``load_value``. A damaged
        commit is discarded with a warning. The returned values are views of the buffer: copy them, never keep them.

        Raises StateError if there is no intact commit.
        """
        self.settle()
        if self._newer.commit is None:
            raise StateError("This worker holds no commit to restore. Call commit() before restore().")
        while self._newer.commit is not None:
            buffer = self._newer
            found = self._find_targets(buffer, live)
            if buffer.load(found.pieces(buffer.frame)):
                return self._loaded(buffer, found)
            self._discard_damaged(buffer)
        raise StateError("Both commits of this worker are damaged, so none can be restored. Restart the worker.")

    def objects(self) -> dict[str, Any] | None:
        """Return the objects of the newest intact commit, which ``load_into`` is about to load; None: there is none."""
        self.settle()
        while self._newer.commit is not None and not self._newer.is_intact():
            self._discard_damaged(self._newer)
        return self._newer.objects() if self._newer.commit is not None else None

    def read(self, commit: CommitId) -> Values:
        """Return the values captured for ``commit``.

        Tensors and arrays are views of the buffer: copy them, never keep them.

        Raises StateError if that commit is not held, or is damaged.
        """
        self.settle()
        buffer = self.find(commit)
        if not buffer.is_intact():
            self._discard_damaged(buffer)
            raise StateError(f"Commit {commit} is damaged. Restore the previous commit.")
        return Values(buffer.memory, buffer.frame, buffer.objects(), {})

    def read_private(self, commit: CommitId) -> bytes:
        """Return the part of ``commit`` that belongs to this worker alone. Call it after ``load_into`` or ``read``."""
        buffer = self.find(commit)
        return buffer.private()

    def aliases(self, captured: Captured, others: Sequence[Buffer] = ()) -> list[str]:
        """Return the names of the captured tensors and arrays that lie in one of the buffers, or in ``others``."""
        ranges = [buffer.addresses for buffer in (self._newer, self._older, *others)]
        lowest, highest = min(begin for begin, _ in ranges), max(end for _, end in ranges)
        found = {name: address(value) for name, value in captured.items() if is_array(value)}
        near = [(name, at) for name, at in found.items() if at is not None and lowest <= at < highest]
        return [name for name, at in near if any(begin <= at < end for begin, end in ranges)]

    def difference(self, captured: Captured) -> str:
        """Return a name of ``captured`` whose value is not that of the newest commit, bit by bit; "" if all are.

        Attached values are left out.
        """
        self.settle()
        buffer = self._newer
        values = Values(buffer.memory, buffer.frame, buffer.objects(), {})
        tensors, arrays, objects = split_by_kind(captured)
        live: dict[str, Array] = {**tensors, **arrays}
        if other := (values.entries.keys() ^ live.keys()) | {name for name in objects if name not in values}:
            return min(other)
        if changed := self._changed_object(objects, values):
            return changed
        found = self._find_targets(buffer, live)
        if not equal(buffer.memory, found.pieces(buffer.frame)):
            found = Targets({}, {}, {})  # compare one by one, for the name
        done = found.by_name.keys() - {entry.name for _, entry in found.queued.values()}
        for name in live.keys() - done:
            if not has_same_bytes(live[name], values[name]):
                return name
        return ""

    def _changed_object(self, objects: dict[str, Any], values: Values) -> str:
        """Return the first name of an object that differs from the newest commit; "" if all are equal."""
        buffer = self._newer
        if buffer.memory[buffer.frame.objects : buffer.length].numpy().tobytes() == dumps(objects):
            return ""
        return next((name for name, value in objects.items() if not _is_same(value, values[name])), "")

    # -------------------------------------------------------------------------------------------- from worker to worker

    def outgoing(self) -> tuple[bytes, torch.Tensor]:
        """Return the newest commit for ranks that lack it, without the private part: (header, ``uint8[n]``)."""
        self.settle()
        buffer = self._newer
        return (
            buffer.transfer_header(),
            buffer.memory[buffer.frame.tensors : buffer.length],
        )

    def incoming(self, header: bytes, private: bytes) -> torch.Tensor:
        """Begin to receive a commit: return the ``uint8[n]`` of the older buffer to fill before ``load_incoming``."""
        self._prepare()
        layout, objects_bytes, sharding = msgspec.msgpack.decode(header, type=tuple[Layout, int, Sharding])
        buffer = self._older
        random_bytes = random_capacity(len(private))
        buffer.begin(Header(layout, random_bytes, sharding), private, objects_bytes)
        return buffer.memory[buffer.frame.tensors : buffer.length]

    def incoming_objects(self) -> dict[str, Any]:
        """Return the objects of the received commit."""
        return self._older.objects()

    def load_incoming(self, live: Captured) -> Incoming:
        """Copy the received commit into the values of ``live`` that it fits: one pass computes its checksum, too."""
        buffer = self._older
        found = self._find_targets(buffer, live)
        return Incoming(found, scatter(buffer.memory, found.pieces(buffer.frame), 0, buffer.length))

    def seal_incoming(self, commit: CommitId, incoming: Incoming) -> Values:
        """Seal the received commit as the only one: a worker that lacked the job's state has no other useful commit.

        Returns what ``load_into`` would return.
        """
        buffer = self._older
        self._seal_older(incoming.checksum, commit)
        self._older.unseal()
        return self._loaded(buffer, incoming.targets)

    # ------------------------------------------------------------------------------------------------------- comparison

    def verify(self) -> None:
        """Verify the newest commit. Raises StateError if there is none, or if it is damaged, after dropping it."""
        self.settle()
        commit = self._newer.commit
        if commit is None:
            raise StateError("This worker holds no commit to check. Call commit() before check().")
        if not self._newer.is_intact():
            self._discard_damaged(self._newer)
            remedy = f"Restore commit {self.newest}" if self.newest is not None else "Commit again"
            raise StateError(f"Commit {commit} is damaged: its checksum is wrong. {remedy}.")

    def summary(self, left_out: Container[str] = ()) -> tuple[int, int, int]:
        """Return three numbers that summarize the newest commit.

        The numbers are 63 bits for the names and shapes of its tensors and arrays, 63 bits for their checksums, and the
        checksum of all objects. Tensors and arrays whose names are in ``left_out`` are excluded.
        """
        self.settle()
        buffer, frame = self._newer, self._newer.frame
        entries = [entry for entry in frame.layout.entries if entry.name not in left_out]
        forms = [(entry.name, entry.dtype, entry.shape) for entry in entries]
        objects = checksum(buffer.memory, frame.objects, buffer.length)
        return number_of(forms), number_of(self._checksums(entries)), objects

    def details(self) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, Any]]:
        """Return (dtype, shape, checksum) of each tensor and array of the newest commit, and its objects."""
        self.settle()
        entries = self._newer.frame.layout.entries
        found = self._checksums(entries)
        return {e.name: (e.dtype, e.shape, f) for e, f in zip(entries, found, strict=True)}, self._newer.objects()

    def _checksums(self, entries: Sequence[Entry]) -> list[int]:
        buffer, begin = self._newer, self._newer.frame.tensors
        return checksums(buffer.memory, [begin + e.offset for e in entries], [e.size_bytes for e in entries])

    # ---------------------------------------------------------------------------------------------------------- helpers

    def _find_targets(self, buffer: Buffer, live: Captured) -> Targets:
        buffers = [self._newer.memory, self._older.memory]
        return find_targets(buffer.frame.layout, live, buffers, self._copy_stream_of)

    def _loaded(self, buffer: Buffer, found: Targets) -> Values:
        """Return the content of an intact buffer, after copying to devices."""
        found.copy_to_devices(buffer, self._copy_stream_of)
        return Values(buffer.memory, buffer.frame, buffer.objects(), found.by_name)

    def _seal_older(self, found: int, commit: CommitId) -> None:
        self._older.seal(commit, found)
        self._newer, self._older = self._older, self._newer

    def _discard_damaged(self, buffer: Buffer) -> None:
        logger.warning("discarded damaged commit %s (buffer %d): its checksum is wrong", buffer.commit, buffer.index)
        self.drop_newest() if buffer is self._newer else buffer.unseal()

    def find(self, commit: CommitId) -> Buffer:
        if buffer := next((buffer for buffer in (self._newer, self._older) if buffer.commit == commit), None):
            return buffer
        raise StateError(f"commit {commit} is not held, only {self.newest} and {self.previous}")


def _is_same(live: object, stored: object) -> bool:
    """Return True if two objects are equal for sure."""
    if dumps({"": live}) == dumps({"": stored}):
        return True
    found = canonical(live)  # parts of equal objects need not be the same objects
    return found is not None and found == canonical(stored)
