"""Copies between a device and the memory of commits, which go on while the device trains."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of this process

logger = logging.getLogger("elasticstate")


class Mark(Protocol):
    """A place in a queue: it is passed when all copies before it are done."""

    def wait(self) -> None:
        """Block this thread until it is passed, without the GIL. From any thread. Raises what the device has raised."""

    def hold_back(self) -> None:
        """What training gives the device to do from now on, on this thread, begins when it is passed."""


class Queue(Protocol):
    """Copies from one device, done in their order. Used by one thread, that of the training."""

    def pin(self, memory: torch.Tensor) -> None:
        """Let the device copy straight into ``memory``, at full speed and without this process's waiting for it."""

    def unpin(self, memory: torch.Tensor) -> None:
        """The reverse, before ``memory`` is given back."""

    def begin(self) -> None:
        """Copies that follow begin when all is done that training has given the device to do so far."""

    def copy(self, places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy tensors of the device to places of the same shapes and dtypes in pinned memory, later."""

    def mark(self) -> Mark:
        """The place behind all copies so far."""

    def bring(self, targets: list[torch.Tensor], places: list[torch.Tensor]) -> None:
        """The reverse of ``copy``, after all that training has given to do; returns when all of it is there."""


QueueOf: TypeAlias = Callable[[torch.device], "Queue | None"]


def queue_of(device: torch.device) -> Queue | None:
    """The queue of a device; None: its tensors are copied at once, by torch or by native code."""
    return _cuda_queue(device) if device.type == "cuda" else None


def has_queue(queue_of: QueueOf) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor's device has one: to be asked for a hundred thousand tensors."""
    of_cpu = queue_of(torch.device("cpu")) is not None
    return lambda tensor: of_cpu if tensor.is_cpu else queue_of(tensor.device) is not None


@functools.cache
def _cuda_queue(device: torch.device) -> CudaQueue:
    return CudaQueue(device)


class CudaQueue:
    """A stream beside those of the training."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: set[int] = set()

    def pin(self, memory: torch.Tensor) -> None:
        """If it cannot be, copies are slower, and the training waits for them; said once."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            result = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)
        if int(result) == 0:
            self._pinned.add(memory.data_ptr())
        else:
            _say_once(f"the memory of commits cannot be pinned ({_words(result)}): they take longer, and stop training")

    def unpin(self, memory: torch.Tensor) -> None:
        if memory.data_ptr() in self._pinned:
            self._pinned.remove(memory.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            torch._foreach_copy_(places, sources, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits, sleeps
        event.record(self._stream)
        return _CudaMark(self._device, event)

    def bring(self, targets: list[torch.Tensor], places: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        with torch.no_grad(), torch.cuda.stream(stream):
            torch._foreach_copy_(targets, places, non_blocking=True)
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
    """What this thread asks CUDA does not break off the capture of a graph on another one.

    By the driver: in the runtime the same call takes memory on a device.
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
def _say_once(warning: str) -> None:
    logger.warning("%s", warning)


def _words(result: object) -> str:
    return str(torch.cuda.cudart().cudaGetErrorString(result))  # type: ignore[no-untyped-call]
