"""A simulated device for machines without one: its queue is a thread that copies memory later than requested.

The thread copies the content that the memory has at the time of the copy, as a device does. So a write before that time
is visible in the copy.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable

import torch

from elasticstate.state import committer
from elasticstate.state.snapshot import Snapshot


class SlowDevice:
    """A copy stream (``elasticstate.state.async_commit.CopyStream``) for CPU tensors.

    ``pace_s``: seconds per step of the device. None: the device makes no step by itself, but only on ``advance`` and
    ``finish``, or when the training submits work that has to follow a copy (``hold_back``).
    """

    def __init__(self, pace_s: float | None = None) -> None:
        self.pinned: dict[int, int] = {}  # bytes at each address
        self.copied_back = 0
        self.held_back = 0
        self.error: Exception | None = None  # raised by every later call
        self._pace_s = pace_s
        self._steps: list[Callable[[], object] | None] = []
        self._allowed = self._done = 0
        self._change = threading.Condition()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="slow device", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------------- interface of a copy stream

    def pin(self, memory: torch.Tensor) -> None:
        assert memory.data_ptr() not in self.pinned
        self.pinned[memory.data_ptr()] = memory.numel()

    def unpin(self, memory: torch.Tensor) -> None:
        assert not self.is_busy, "memory is given back while it is written"
        del self.pinned[memory.data_ptr()]

    def begin(self) -> None:
        """Do nothing: a training on the CPU has no work under way."""

    def copy(self, places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._check()
        with self._change:
            for place, source in zip(places, sources, strict=True):
                assert any(p <= place.data_ptr() < p + size for p, size in self.pinned.items())
                assert (place.shape, place.dtype) == (source.shape, source.dtype)
                self._steps.append(functools.partial(self._copy, place, weakref.ref(source)))
            self._change.notify_all()

    def mark(self) -> Mark:
        with self._change:
            return Mark(self, len(self._steps))

    def copy_back(self, targets: list[torch.Tensor], places: list[torch.Tensor]) -> None:
        self._check()
        with torch.no_grad():
            for target, place in zip(targets, places, strict=True):
                target.copy_(place)
        self.copied_back += len(targets)

    # ---------------------------------------------------------------------------------------------- interface for tests

    @property
    def is_busy(self) -> bool:
        return self._done < len(self._steps)

    def advance(self, steps: int = 1) -> None:
        """Make ``steps`` steps, or as many as remain."""
        self.advance_to(min(self._done + steps, len(self._steps)))

    def finish(self) -> None:
        """Make all steps that were requested."""
        self.advance_to(len(self._steps))

    def advance_to(self, step: int) -> None:
        with self._change:
            self._allowed = max(self._allowed, step)
            self._change.notify_all()
        self.wait_for(step)

    def wait_for(self, step: int) -> None:
        with self._change:
            self._change.wait_for(lambda: self._done >= step or self.error is not None or self._is_stopped)
        self._check()

    def fail(self, error: Exception) -> None:
        with self._change:
            self.error = error
            self._change.notify_all()

    def stop(self) -> None:
        with self._change:
            self._is_stopped = True
            self._change.notify_all()
        self._thread.join()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
        if self._is_stopped:
            raise RuntimeError("the device is gone")

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._is_stopped or self._may_step())
                if self._is_stopped:
                    return
                step, self._steps[self._done] = self._steps[self._done], None
            if self._pace_s is not None:
                time.sleep(self._pace_s)
            assert step is not None
            step()
            with self._change:
                self._done += 1
                self._change.notify_all()

    def _copy(self, place: torch.Tensor, source: weakref.ref[torch.Tensor]) -> None:
        memory = source()  # a device holds no reference to it
        if memory is None:
            self.fail(RuntimeError("the memory was given back before it was copied"))
        else:
            place.copy_(memory)

    def _may_step(self) -> bool:
        return self.error is None and self.is_busy and (self._pace_s is not None or self._done < self._allowed)


class Mark:
    def __init__(self, device: SlowDevice, step: int) -> None:
        self._device = device
        self._step = step

    def wait(self) -> None:
        self._device.wait_for(self._step)

    def hold_back(self) -> None:
        self._device.held_back += 1
        self._device.advance_to(self._step)


def use(device: SlowDevice) -> None:
    """Put the tensors of all new states on this device, permanently."""
    committer.Snapshot = functools.partial(Snapshot, copy_stream_of=lambda _: device)
