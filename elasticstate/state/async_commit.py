"""Async commit: a commit that is copied from devices while training continues.

Tensors that only an optimizer's ``step`` writes are *optimizer-owned*: they are copied during the forward and backward
passes, and a step begins when the copy is complete. All others are copied first, and the next training work on the
device begins when that copy is complete. The device waits, not Python. See docs/decisions/gpu-commits.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from elasticstate._native import Pieces, checksum, gather_each
from elasticstate.compat import torch_tensors
from elasticstate.compat.torch_tensors import version_of
from elasticstate.log import logger
from elasticstate.state.layout import Checksums

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of this process


CopyStreamOf: TypeAlias = Callable[[torch.device], "CopyStream | None"]


@functools.cache
def copy_stream_of(device: torch.device) -> CopyStream | None:
    """Return the copy stream of a device; None if torch or native code copies its tensors synchronously."""
    return CopyStream(device) if device.type == "cuda" and torch_tensors.has_versions() else None


def has_copy_stream(copy_stream_of: CopyStreamOf) -> Callable[[torch.Tensor], bool]:
    """Return a predicate for tensors on devices with a copy stream. It is fast enough for 100,000 tensors."""
    of_cpu = copy_stream_of(torch.device("cpu")) is not None
    return lambda tensor: of_cpu if tensor.is_cpu else copy_stream_of(tensor.device) is not None


class CopyStream:
    """Ordered copies from one device, on a CUDA stream of their own. Only the training thread uses this object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: set[int] = set()

    def pin(self, memory: torch.Tensor) -> None:
        """Register ``memory`` so that the device copies directly to it, at full speed and asynchronously. If that
        fails, log a warning once."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            result = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)
        if int(result) == 0:
            self._pinned.add(memory.data_ptr())
        else:
            self._forget_error()
            reason = runtime.cudaGetErrorString(result)
            _warn_once(
                f"commits are slower and stop training, because their memory cannot be pinned: {reason}. "
                f"Memory of a tmpfs, such as /dev/shm, can be pinned; that of a file on a disk cannot (--commit-dir)."
            )

    def _forget_error(self) -> None:
        """Clear CUDA's last error, which the next launch of any kernel would raise otherwise: torch has no other call
        for it than a launch, which raises it."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(1)

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo ``pin`` before ``memory`` is released."""
        if memory.data_ptr() in self._pinned:
            self._pinned.remove(memory.data_ptr())
            result = torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
            if int(result) != 0:
                self._forget_error()

    def begin(self) -> None:
        """Delay the following copies until the device completes all work that training has submitted so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queue copies of device tensors to places of the same shapes and dtypes in pinned memory."""
        with torch.no_grad(), torch.cuda.stream(self._stream):
            torch_tensors.copy_all(places, sources, non_blocking=True)

    def mark(self) -> Mark:
        """Return a mark after all copies queued so far."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # blocking: a waiting thread sleeps
        event.record(self._stream)
        return Mark(self._device, event)

    def copy_back(self, targets: list[torch.Tensor], places: list[torch.Tensor]) -> None:
        """Copy from pinned memory to device tensors, after all submitted training work. Return after the copies."""
        stream = torch.cuda.current_stream(self._device)
        with torch.no_grad(), torch.cuda.stream(stream):
            torch_tensors.copy_all(targets, places, non_blocking=True)
        stream.synchronize()


class Mark:
    """A position in a copy stream. It is passed when all earlier copies are complete."""

    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        """Block this thread, without the GIL, until the mark is passed. Safe on any thread. Raises device errors."""
        # A thread that is new to CUDA would take memory on the first device.
        with torch.cuda.device(self._device), _beside_captures():
            self._event.synchronize()

    def hold_back(self) -> None:
        """Delay the device work that training submits from now on, on this thread, until the mark is passed."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """Prevent CUDA calls of this thread from breaking a graph capture on another thread. The same call of the runtime
    API would take memory on a device."""
    mode = ctypes.c_int(_RELAXED)
    exchange = _driver_call("cuThreadExchangeStreamCaptureMode")
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _driver_call(name: str) -> Callable[..., object]:
    try:
        found: Callable[..., object] = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):  # another maker's device
        return lambda *_: None
    return found


@functools.cache
def _warn_once(warning: str) -> None:
    logger.warning("%s", warning)


CHUNK_BYTES = 64 << 20  # size between two marks: the checksum of one chunk is computed while the next chunks are copied


@dataclass(slots=True)
class Item:
    """A device tensor and its place in the buffer. ``end``: where the place ends in the buffer, in bytes.

    ``counted``: the tensor whose version counts the writes. torch counts those through a DTensor there alone.
    """

    tensor: torch.Tensor
    place: torch.Tensor
    end: int
    copy_stream: CopyStream
    is_optimizer_owned: bool
    counted: torch.Tensor


class CopyOutcome(Enum):
    """Result of a copy."""

    SEALED = auto()
    CUT = auto()  # its generation ended before the copy did: a cut collective leaves undefined data on a device
    TORN = auto()  # other code wrote an optimizer-owned tensor during the copy
    FAILED = auto()  # the device raised an error


@dataclass(slots=True)
class Content:
    """The bytes of a commit to seal, and their checksum up to some offset."""

    memory: torch.Tensor  # uint8[n], on the CPU
    at: int  # offset where the checksum continues
    checksum: int  # CRC-32C of the bytes before
    places: tuple[Pieces, Checksums] | None  # of the values, and the array for their checksums

    def add(self, end: int) -> None:
        """Continue the checksum by the bytes before ``end``."""
        if self.places is None:
            self.checksum = checksum(self.memory, self.at, end, self.checksum)
        else:
            self.checksum = gather_each(self.memory, self.places[0], self.at, end, self.places[1], self.checksum)
        self.at = end


class Copy:
    """A running copy. A separate thread waits for the device, computes the checksum, and writes the seal.

    The constructor starts the copy.

    Args:
        items: ascending by ``end``, without overlap.
        content: all bytes to seal. All parts except the items are already in it.
        seal: writes the seal, given the checksum of all bytes; called on the thread.
        is_cut: returns True if data on the devices may be undefined by now; called on the thread.
        spare_bytes: device memory, in bytes, that may hold copies made on the device immediately.

    Raises the device's errors. No copy is running then.
    """

    def __init__(
        self,
        items: list[Item],
        content: Content,
        seal: Callable[[int], None],
        is_cut: Callable[[], bool],
        spare_bytes: int,
    ) -> None:
        self._content = content
        self._seal, self._is_cut = seal, is_cut
        self.outcome = CopyOutcome.FAILED
        self.error: BaseException | None = None
        self.checksum = 0
        self._is_released = self._is_torn = False
        self._optimizer_owned: list[tuple[torch.Tensor, int]] = []  # with the versions in which they are copied
        self._optimizer_owned_marks: dict[CopyStream, Mark] = {}
        self._ends: list[tuple[int, Mark]] = []  # ascending; each mark passes after the bytes before its end
        self._kept: list[torch.Tensor] = []  # keeps the source memory alive, whatever happens to the tensors
        self._done = threading.Event()
        self._ending = threading.Lock()
        self._when_sealed: Callable[[], object] | None = None
        self._enqueue(items, spare_bytes)
        if self._optimizer_owned_marks:
            watch_steps()
            _under_way.add(self)
        try:
            threading.Thread(target=self._finish, name="elasticstate-commit", daemon=True).start()
        except RuntimeError:  # no more threads available: training waits
            self._finish()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> CopyOutcome:
        """Wait until the copy ends, and return the outcome. The device first completes the work submitted before."""
        self._done.wait()
        self._kept.clear()
        self._optimizer_owned.clear()
        return self.outcome

    def when_sealed(self, call: Callable[[], object]) -> None:
        """Call a function after the seal is written: on the copy's own thread, or now. It must raise nothing."""
        with self._ending:
            if not self.is_done:
                self._when_sealed = call
                return
        if self.outcome is CopyOutcome.SEALED:
            call()

    def release(self, is_capturing: bool = False) -> None:
        """Delay the device work of an optimizer that is about to write, until the tensors that it may write are copied.
        ``is_capturing``: the optimizer's work is captured for a graph."""
        if is_capturing:  # a graph cannot wait for outside work, so this thread waits
            self._done.wait()
        if self.is_done:
            return
        if not self._is_released:
            self._is_torn = self._is_written()
            self._is_released = True
        for mark in self._optimizer_owned_marks.values():
            mark.hold_back()

    # ----------------------------------------------------------------------------------------------------- both threads

    def _is_written(self) -> bool:
        return any(version_of(tensor) != version for tensor, version in self._optimizer_owned)

    # ---------------------------------------------------------------------------------------------- the training thread

    def _enqueue(self, items: list[Item], spare_bytes: int) -> None:
        spared = set(map(id, _spared(items, spare_bytes)))
        now = [item for item in items if not item.is_optimizer_owned and id(item) not in spared]
        optimizer_owned = [item for item in items if item.is_optimizer_owned and id(item) not in spared]
        last = [item for item in items if id(item) in spared]
        sources = {
            id(item): item.tensor.detach().clone() if id(item) in spared else item.tensor.detach() for item in items
        }
        self._kept += sources.values()
        for copy_stream in _streams(items):
            copy_stream.begin()
        marks: list[tuple[int, Mark]] = []
        try:
            marks += self._copy(now, sources)
            for copy_stream in _streams(now):
                copy_stream.mark().hold_back()
            self._optimizer_owned = [(item.counted, version_of(item.counted)) for item in optimizer_owned]
            marks += self._copy(optimizer_owned, sources)
            self._optimizer_owned_marks = {stream: stream.mark() for stream in _streams(optimizer_owned)}
            marks += self._copy(last, sources)
        except BaseException:
            for copy_stream in _streams(items):  # wait until no copy can write into the buffer any more
                with contextlib.suppress(Exception):  # a lost device writes nothing
                    copy_stream.mark().wait()
            raise
        self._ends = sorted(marks, key=lambda pair: pair[0])

    def _copy(self, items: list[Item], sources: dict[int, torch.Tensor]) -> Iterator[tuple[int, Mark]]:
        """Queue the copies, and yield the end of each item with the mark after it."""
        for copy_stream, chunk in _chunks(items):
            copy_stream.copy([item.place for item in chunk], [sources[id(item)] for item in chunk])
            mark = copy_stream.mark()
            yield from ((item.end, mark) for item in chunk)

    # -------------------------------------------------------------------------------------------- the copy's own thread

    def _finish(self) -> None:
        try:
            self._checksum_copied_bytes()
            self.outcome = self._judge()
            if self.outcome is CopyOutcome.SEALED:
                self._content.add(self._content.memory.numel())
                self.checksum = self._content.checksum
                self._seal(self.checksum)
        except BaseException as error:
            self.outcome, self.error = CopyOutcome.FAILED, error
        finally:
            with self._ending:
                if self._when_sealed is not None and self.outcome is CopyOutcome.SEALED:
                    self._when_sealed()
                self._done.set()

    def _checksum_copied_bytes(self) -> None:
        """Wait for all marks. Compute the checksum of the bytes that are copied before the last one."""
        ready = self._content.at
        passed: set[int] = set()
        for end, mark in self._ends:
            if id(mark) not in passed:
                self._content.add(ready)
                mark.wait()
                passed.add(id(mark))
            ready = end

    def _judge(self) -> CopyOutcome:
        """Return the outcome after all bytes are copied."""
        if self._is_cut():
            return CopyOutcome.CUT
        is_written = self._is_written()  # read it first: an optimizer that may write calls release() before it writes
        is_torn = self._is_torn if self._is_released else is_written
        return CopyOutcome.TORN if is_torn else CopyOutcome.SEALED


def _streams(items: list[Item]) -> Iterable[CopyStream]:
    return dict.fromkeys(item.copy_stream for item in items)


def _spared(items: list[Item], spare_bytes: int) -> Iterator[Item]:
    """Yield the items to copy on the device immediately, most urgent first, as many as fit. Nothing waits for these."""
    for item in sorted(items, key=lambda item: item.is_optimizer_owned):
        if item.place.nbytes <= spare_bytes:
            spare_bytes -= item.place.nbytes
            yield item


def _chunks(items: list[Item]) -> Iterator[tuple[CopyStream, list[Item]]]:
    chunk: list[Item] = []
    size = 0
    for item in items:
        if chunk and (item.copy_stream is not chunk[0].copy_stream or size + item.place.nbytes > CHUNK_BYTES):
            yield chunk[0].copy_stream, chunk
            chunk, size = [], 0
        chunk.append(item)
        size += item.place.nbytes
    if chunk:
        yield chunk[0].copy_stream, chunk


_under_way: weakref.WeakSet[Copy] = weakref.WeakSet()
_captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@functools.cache
def watch_steps() -> None:
    """Watch the steps of all optimizers from now on, because an optimizer outside the state may write parameters."""
    register_optimizer_step_pre_hook(_before_a_step)


def is_captured(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's step may be part of a CUDA graph, which runs without calling hooks."""
    return optimizer in _captured or any(group.get("capturable") for group in optimizer.param_groups)


def _before_a_step(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():  # compiled code does not contain this hook: versions detect the writes
        return
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    is_capturing = has_cuda and torch.cuda.is_current_stream_capturing()
    if is_capturing:
        _captured.add(optimizer)
    for copy in list(_under_way):
        copy.release(is_capturing)
