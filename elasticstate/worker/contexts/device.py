"""Calls of CUDA on threads of their own, and checks for a lost device, which this process can never use again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

# cudaError_t after which "the process must be terminated and relaunched", according to the CUDA runtime documentation:
# https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
_LASTING = {
    214,  # cudaErrorECCUncorrectable
    220,  # cudaErrorNvlinkUncorrectable
    226,  # cudaErrorContained
    700,  # cudaErrorIllegalAddress
    702,  # cudaErrorLaunchTimeout
    710,  # cudaErrorAssert
    714,  # cudaErrorHardwareStackError
    715,  # cudaErrorIllegalInstruction
    716,  # cudaErrorMisalignedAddress
    717,  # cudaErrorInvalidAddressSpace
    718,  # cudaErrorInvalidPc
    719,  # cudaErrorLaunchFailure
    721,  # cudaErrorTensorMemoryLeak
}


def is_lost(error: BaseException) -> bool:
    """Return True if ``error`` means that the process which raised it can never use the device again.

    torch stores CUDA's error number in the exception.
    """
    accelerator_error = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    if accelerator_error is None or not isinstance(error, accelerator_error):
        return False
    return getattr(error, "error_code", None) in _LASTING


def answers(scratch: torch.Tensor, device: torch.device, timeout: timedelta) -> bool:
    """Return True if a kernel on ``device`` completes in time, False if it fails or hangs.

    The kernel changes ``scratch``, a tensor there.
    """

    def probe() -> None:
        scratch.add_(1)
        torch.cuda.synchronize(device)

    aside = Aside(probe, device.index)
    return aside.join(timeout.total_seconds()) and aside.error is None


class Aside:
    """A call on a thread of its own. If the call hangs, its caller does not.

    ``device``: index of the CUDA device that the thread uses. A new thread is on device 0, and may take memory there:
    NVIDIA's in-process restart had that fault (https://github.com/NVIDIA/nvidia-resiliency-ext/pull/103).
    """

    def __init__(self, call: Callable[[], object], device: int | None) -> None:
        self._call = call
        self._device = device
        self.error: BaseException | None = None
        self.begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device is not None:
                with suppress(RuntimeError, AssertionError):  # a device that is lost; the call must come all the same
                    torch.cuda.set_device(self._device)
            self._call()
        except BaseException as error:
            self.error = error

    def join(self, timeout_s: float) -> bool:
        """Wait for the call. Return True if it has ended before the timeout."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()
