"""A commit that is being copied from devices while they go on with the training.

What is copied must not change before it is copied. Of few tensors it is known when they change: parameters, and the
state of an optimizer, only by the optimizer's ``step``. These are *steady*: they are copied during the forward and
backward passes, and a step begins when that is done. All others (buffers, which a forward pass writes; tensors that a
user keeps) are copied first, and what training does next begins when that is done. It is the device that waits, not
Python.

A tensor that was called steady and is written by something else is noticed by its version, which torch counts.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from elasticstate._native import checksum
from elasticstate.state.queue import Mark, Queue

CHUNK_BYTES = 64 << 20  # between two marks: the checksum of one is made while the next ones are copied


@dataclass(slots=True)
class Item:
    """A tensor of a device, and where it goes in the buffer. ``end``: where that ends, in bytes."""

    tensor: torch.Tensor
    place: torch.Tensor
    end: int
    queue: Queue
    is_steady: bool

    @property
    def size_bytes(self) -> int:
        return self.place.nbytes


class Outcome(Enum):
    """How a copy has ended."""

    SEALED = auto()
    CUT = auto()  # its generation was over before it was done: a cut collective leaves anything on a device
    TORN = auto()  # something that was called steady was written meanwhile
    FAILED = auto()  # the device has raised an error


class Copy:
    """Begins as it is made. A thread of its own waits for the device, makes the checksum, and writes the seal.

    Args:
        items: ascending by ``end``, without overlap.
        content: ``uint8[n]``: all that is sealed, on the CPU; all but the items is there.
        begin, found: from where on a checksum is to be made, and that of what is before it.
        seal: writes the seal, given the checksum of the whole; called on the thread.
        is_cut: whether what is on the devices by now may be rubbish; called on the thread.
        spare_bytes: so much of the device's memory may be taken for copies that are made there at once.

    Raises what a device raises; nothing is on its way then.
    """

    def __init__(
        self,
        items: list[Item],
        content: torch.Tensor,
        begin: int,
        found: int,
        seal: Callable[[int], None],
        is_cut: Callable[[], bool],
        spare_bytes: int,
    ) -> None:
        self._content, self._begin_at, self._found = content, begin, found
        self._seal, self._is_cut = seal, is_cut
        self.outcome = Outcome.FAILED
        self.error: BaseException | None = None
        self.checksum = 0
        self._is_released = self._is_torn = False
        self._steady: list[tuple[torch.Tensor, int]] = []  # and the versions in which they are copied
        self._steady_marks: dict[Queue, Mark] = {}
        self._ends: list[tuple[int, Mark]] = []  # ascending: what is before an end is there when the mark is passed
        self._kept: list[torch.Tensor] = []  # the memory that is copied from, whatever becomes of the tensors
        self._done = threading.Event()
        self._enqueue(items, spare_bytes)
        if self._steady_marks:
            watch_steps()
            _under_way.add(self)
        try:
            threading.Thread(target=self._finish, name="elasticstate-commit", daemon=True).start()
        except RuntimeError:  # no more threads to be had: the training waits
            self._finish()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> Outcome:
        """Until ``outcome`` is there. It takes as long as the device does for what it was given to do before."""
        self._done.wait()
        self._kept.clear()
        self._steady.clear()
        return self.outcome

    def release(self, is_capturing: bool = False) -> None:
        """An optimizer is about to write: what it has the device do begins when all that it may write is copied.

        ``is_capturing``: it does so for a graph, which cannot wait for anything outside: this thread does.
        """
        if is_capturing:
            self._done.wait()
        if self.is_done:
            return
        if not self._is_released:
            self._is_torn = self._is_written()
            self._is_released = True
        for mark in self._steady_marks.values():
            mark.hold_back()

    # ------------------------------------------------------------------------------------------------- on both threads

    def _is_written(self) -> bool:
        return any(tensor._version != version for tensor, version in self._steady)

    # ----------------------------------------------------------------------------------------- on the training's thread

    def _enqueue(self, items: list[Item], spare_bytes: int) -> None:
        spared = set(map(id, _spared(items, spare_bytes)))
        now = [item for item in items if not item.is_steady and id(item) not in spared]
        steady = [item for item in items if item.is_steady and id(item) not in spared]
        last = [item for item in items if id(item) in spared]
        sources = {
            id(item): item.tensor.detach().clone() if id(item) in spared else item.tensor.detach() for item in items
        }
        self._kept += sources.values()
        queues = {item.queue: None for item in items}
        for queue in queues:
            queue.begin()
        marks: list[tuple[int, Mark]] = []
        try:
            marks += self._copy(now, sources)
            for mark in {queue: queue.mark() for queue in {item.queue: None for item in now}}.values():
                mark.hold_back()
            self._steady = [(item.tensor, item.tensor._version) for item in steady]
            marks += self._copy(steady, sources)
            self._steady_marks = {queue: queue.mark() for queue in {item.queue: None for item in steady}}
            marks += self._copy(last, sources)
        except BaseException:
            self._drain(queues)
            raise
        self._ends = sorted(marks, key=lambda pair: pair[0])

    def _copy(self, items: list[Item], sources: dict[int, torch.Tensor]) -> Iterator[tuple[int, Mark]]:
        """The end of each item, and the mark behind it."""
        for queue, chunk in _chunks(items):
            queue.copy([item.place for item in chunk], [sources[id(item)] for item in chunk])
            mark = queue.mark()
            yield from ((item.end, mark) for item in chunk)

    def _drain(self, queues: Iterable[Queue]) -> None:
        """Nothing may come into the buffer any more."""
        for queue in queues:
            with contextlib.suppress(Exception):  # a device that is gone writes nothing
                queue.mark().wait()

    # ---------------------------------------------------------------------------------------------- on the own thread

    def _finish(self) -> None:
        try:
            ready = self._checksum_what_comes()
            self.outcome = self._judge()
            if self.outcome is Outcome.SEALED:
                self.checksum = checksum(self._content, ready, self._content.numel(), self._found)
                self._seal(self.checksum)
        except BaseException as error:
            self.outcome, self.error = Outcome.FAILED, error
        finally:
            self._done.set()

    def _checksum_what_comes(self) -> int:
        """Wait for all marks; returns up to where the checksum is made by then."""
        at = ready = self._begin_at
        passed: set[int] = set()
        for end, mark in self._ends:
            if id(mark) not in passed:
                self._found = checksum(self._content, at, ready, self._found)
                at = ready
                mark.wait()
                passed.add(id(mark))
            ready = end
        return at

    def _judge(self) -> Outcome:
        """All is copied: was it good?"""
        if self._is_cut():
            return Outcome.CUT
        is_written = self._is_written()  # first: who is allowed to write has said so before
        is_torn = self._is_torn if self._is_released else is_written
        return Outcome.TORN if is_torn else Outcome.SEALED


def _spared(items: list[Item], spare_bytes: int) -> Iterator[Item]:
    """Those that are copied on the device at once, so that nobody waits for them: the most urgent ones that fit."""
    for item in sorted(items, key=lambda item: item.is_steady):
        if item.size_bytes <= spare_bytes:
            spare_bytes -= item.size_bytes
            yield item


def _chunks(items: list[Item]) -> Iterator[tuple[Queue, list[Item]]]:
    chunk: list[Item] = []
    size = 0
    for item in items:
        if chunk and (item.queue is not chunk[0].queue or size + item.size_bytes > CHUNK_BYTES):
            yield chunk[0].queue, chunk
            chunk, size = [], 0
        chunk.append(item)
        size += item.size_bytes
    if chunk:
        yield chunk[0].queue, chunk


_under_way: weakref.WeakSet[Copy] = weakref.WeakSet()
_captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_hooks: list[Any] = []


def watch_steps() -> None:
    """From now on, those of all optimizers: whoever writes parameters may not be in the state."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_a_step))


def is_captured(optimizer: Optimizer) -> bool:
    """Whether its step is part of a CUDA graph, which runs without a word to anybody."""
    return optimizer in _captured or any(group.get("capturable") for group in optimizer.param_groups)


def _before_a_step(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():  # what is compiled stays without us: versions tell
        return
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    is_capturing = has_cuda and torch.cuda.is_current_stream_capturing()
    if is_capturing:
        _captured.add(optimizer)
    for copy in list(_under_way):
        copy.release(is_capturing)
