"""Interface between the run loop and a backend: one :class:`Backend` per process, one :class:`Context` per generation.

No backend depends on the loop. The table in elasticstate.backends names the backends. Also here: the choice of the
backend, and what they find out about lost devices.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticstate._native import GlooSockets
from elasticstate.backends import BACKENDS
from elasticstate.compat import process_groups
from elasticstate.compat.process_groups import Store
from elasticstate.net.messages import FromWorkerBody
from elasticstate.options import WorkerEnvironment
from elasticstate.plug_ins import load_part


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Data with which a worker meets the other members of a generation."""

    store: Store  # store of this generation alone
    name: str  # unique name of the generation: "job/number"
    worker: str  # name of this worker, the same in all generations
    rank: int
    size: int
    init_timeout: timedelta  # maximum time until all members have arrived
    collective_timeout: timedelta  # timeout of the collectives of every group, including those of user code
    check: Callable[[], None]  # raises CollectiveError after the generation has ended
    address: str = ""  # at which the other members reach this host; empty: not known


class Fault(Enum):
    """Meaning of an exception for its generation."""

    UNKNOWN = auto()  # may also be the worker's own error: Gloo's errors are all plain RuntimeErrors
    GENERATION = auto()  # a member died, or the generation's communication broke
    DEVICE = auto()  # nothing in this process can use its device again: another process must replace it


class Context(ABC):
    """All process groups of one generation. Used on the main thread only. Any thread may call ``sever``."""

    severs_in_python = False  # ``sever`` cuts more than ``sockets``
    raises_when_cut = True  # a collective that is cut raises an error; otherwise it may leave garbage in its tensors

    def __init__(self) -> None:
        self.sockets = GlooSockets()
        """The sockets that the sentinel cuts without Python."""

    @abstractmethod
    def create(self, rendezvous: Rendezvous) -> None:
        """Create the default process group of the generation.

        Raises the backend's errors when a member is missing, or when the generation is severed during the call.
        """

    @abstractmethod
    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """Return a group of these ranks, ascending. Only these ranks call it. The group lasts until ``destroy``."""

    @abstractmethod
    def sever(self) -> None:
        """Cut all communication: a thread that is in, or enters, a collective, an init or a store wait gets an error.

        The sentinel calls it repeatedly until the generation has been left, because new connections may appear.
        """

    def own_failure(self) -> str:
        """Return the failure that the backend has found by itself, in words; "" if it has found none, or has no means,
        and after ``destroy`` has begun. Any thread may call it, each second, where ``severs_in_python`` is true."""
        return ""

    @abstractmethod
    def broken(self) -> bool:
        """Return True if the generation's communication is cut: by this process, or by the loss of a member."""

    @abstractmethod
    def has_failed(self) -> bool:
        """Return True if a collective of this generation has failed in this process, whatever caught its error.

        Cheap enough for each tick. It never becomes False again. A planned end of the generation is no failure.
        """

    def may_have_failed(self) -> bool:
        """Return True if a collective has failed, or may have without ``has_failed``, because a member is lost.

        Cheap enough for each tick. Do not call it after the last tick of the generation: then members leave by plan.
        """
        return self.has_failed()

    @abstractmethod
    def classify(self, error: BaseException) -> Fault:
        """Return the meaning of one exception, without its causes."""

    def usable(self) -> bool:
        """Return True if this process, after a failure, can be a member of another generation."""
        return True

    def retire(self) -> Callable[[], None]:
        """Take the groups of a generation out of use that all members have left by plan, so that nothing is in flight.

        Return the function that destroys what remains, on any thread, beside the next generation.
        """
        self.destroy()
        return lambda: None

    @abstractmethod
    def destroy(self, by_plan: bool = False) -> None:
        """Destroy the groups. No thread and no descriptor of the generation remains afterwards.

        ``by_plan``: all members do so now, as they have passed the exit gate.
        """


class Backend(Protocol):
    """One way to send tensors, for the life of the process."""

    def prepare(self, environment: WorkerEnvironment, send: Callable[[FromWorkerBody], None]) -> None:
        """Do slow preparations before the first READY. ``send`` sends a message to the agent."""

    def context(self) -> Context:
        """Return a context for the next generation. The one before it has been destroyed."""


def choose(name: str) -> Backend:
    """Return the backend with this name. ``auto`` chooses by the devices of this machine."""
    parts = BACKENDS[by_devices() if name == "auto" else name]
    return cast(Backend, load_part(parts.worker)())


def by_devices() -> str:
    """Return the backend that ``auto`` chooses on this machine."""
    return "nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"


def for_torch() -> str:
    """Return the backend name for torch's ``init_process_group``, for a process without other members."""
    name = by_devices()
    return f"cpu:gloo,cuda:{torch_name(name)}" if name == "nccl" else name


def torch_name(backend: str) -> str:
    """Return the name by which torch knows a backend of elasticstate (nccl, nccl2); "" if this torch does not have it.

    ``nccl`` is ProcessGroupNCCL, whatever torch means by that name.
    """
    return process_groups.torch_backend(*{"nccl": ("nccl-legacy", "nccl"), "nccl2": ("nccl2",)}[backend])


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


def explain(error: BaseException) -> None:
    """Add a note to an exception of the script, if a DistributedDataParallel of an earlier world lives.

    Its process group has ended: torch reports a lost connection, although no worker is lost.
    """
    if not isinstance(error, RuntimeError | ValueError) or sys.version_info < (3, 11):
        return
    gc.collect()
    if any(issubclass(type(found), DistributedDataParallel) and _has_ended(found) for found in gc.get_objects()):
        error.add_note(
            "A DistributedDataParallel of an earlier world is still there, whose process group has ended. If the "
            "function uses it, create it in the function, anew in each world."
        )


def _has_ended(wrapper: DistributedDataParallel) -> bool:
    try:
        return not dist.get_process_group_ranks(wrapper.process_group)
    except (AttributeError, KeyError, ValueError, RuntimeError):  # torch knows the groups of the present world alone
        return True


def is_lost(error: BaseException) -> bool:
    """Return True if ``error`` means that the process which raised it can never use the device again."""
    return isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) in _LASTING


def answers(scratch: torch.Tensor, device: torch.device, timeout: timedelta) -> bool:
    """Return True if a kernel that changes ``scratch``, a tensor on ``device``, completes in time."""

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
