"""Copies between a device and the memory of commits, which run while the device trains."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import torch

from elasticstate.compat import tensors
from elasticstate.log import logger

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of this process


class Mark(Protocol):
    """A position in a copy stream. It is passed when all earlier copies are complete."""

    def wait(self) -> None:
        """Block this thread, without the GIL, until the mark is passed. Safe on any thread. Raises device errors."""

    def hold_back(self) -> None:
        """Delay the device work that training submits from now on, on this thread, until the mark is passed."""


class CopyStream(Protocol):
    """Ordered copies from one device. Only the training thread uses it."""

    def pin(self, memory: torch.Tensor) -> None:
        """Register ``memory`` so that the device copies directly to it, at full speed and asynchronously."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo ``pin`` before ``memory`` is released."""

    def begin(self) -> None:
        """Delay the following copies until the device completes all work that training has submitted so far."""

    def copy(self, places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queue copies of device tensors to places of the same shapes and dtypes in pinned memory."""

    def mark(self) -> Mark:
        """Return a mark after all copies queued so far."""

    def copy_back(self, targets: list[torch.Tensor], places: list[torch.Tensor]) -> None:
        """Copy from pinned memory to device tensors, after all submitted training work. Return after the copies."""


CopyStreamOf: TypeAlias = Callable[[torch.device], "CopyStream | None"]


def copy_stream_of(device: torch.device) -> CopyStream | None:
    """Return the copy stream of a device; None if torch or native code copies its tensors synchronously."""
    return _cuda_copy_stream(device) if device.type == "cuda" and tensors.has_versions() else None


def has_copy_stream(copy_stream_of: CopyStreamOf) -> Callable[[torch.Tensor], bool]:
    """Return a predicate for tensors on devices with a copy stream. It is fast enough for 100,000 tensors."""
    of_cpu = copy_stream_of(torch.device("cpu")) is not None
    return lambda tensor: of_cpu if tensor.is_cpu else copy_stream_of(tensor.device) is not None


@functools.cache
def _cuda_copy_stream(device: torch.device) -> CudaCopyStream:
    return CudaCopyStream(device)


class CudaCopyStream:
    """A CUDA stream separate from those of the training."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: set[int] = set()

    def pin(self, memory: torch.Tensor) -> None:
        """Register ``memory`` with CUDA. If that fails, log a warning once, and copy slower while training waits."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            result = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)
        if int(result) == 0:
            self._pinned.add(memory.data_ptr())
        else:
            self._forget_error()
            _warn_once(
                f"commits are slower and stop training, because their memory cannot be pinned: {_error_text(result)}. "
                f"Memory of a tmpfs, such as /dev/shm, can be pinned; that of a file on a disk cannot (--commit-dir)."
            )

    def _forget_error(self) -> None:
        """Clear CUDA's last error, which the next launch of any kernel would raise otherwise.

        torch has no call for it. The check after a launch, which raises the error, also clears it.
        """
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(1)

    def unpin(self, memory: torch.Tensor) -> None:
        if memory.data_ptr() in self._pinned:
            self._pinned.remove(memory.data_ptr())
            result = torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
            if int(result) != 0:
                self._forget_error()

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            tensors.copy_all(places, sources, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # blocking: a waiting thread sleeps
        event.record(self._stream)
        return _CudaMark(self._device, event)

    def copy_back(self, targets: list[torch.Tensor], places: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        with torch.no_grad(), torch.cuda.stream(stream):
            tensors.copy_all(targets, places, non_blocking=True)
        stream.synchronize()


class _CudaMark:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        # A thread that is new to CUDA would take memory on the first device.
        with torch.cuda.device(self._device), _beside_captures():
            self._event.synchronize()

    def hold_back(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """Prevent CUDA calls of this thread from breaking a graph capture on another thread.

    Uses the CUDA driver API, because the same runtime call takes memory on a device.
    """
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


def _error_text(result: object) -> str:
    return str(torch.cuda.cudart().cudaGetErrorString(result))  # type: ignore[no-untyped-call]
