"""NCCL backend for tensors on CUDA devices, with Gloo for CPU tensors: torch's ``cpu:gloo,cuda:nccl``.

A generation is cut in two parts: the sentinel's native thread cuts Gloo's sockets and the store, and the sentinel's
Python thread aborts NCCL's communicators.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticstate._native import count_failed_collectives
from elasticstate.compat import process_groups
from elasticstate.config import WorkerEnvironment
from elasticstate.errors import UsageError
from elasticstate.log import logger
from elasticstate.net.messages import FromWorkerBody
from elasticstate.worker.contexts import addresses, device as devices, nccl_settings
from elasticstate.worker.contexts.context import Fault, Rendezvous
from elasticstate.worker.contexts.gloo_groups import GlooGroups
from elasticstate.worker.contexts.groups import TorchGroups
from elasticstate.worker.replacement import exit_for_replacement

_TOGETHER_TIMEOUT_S = 5.0  # maximum time until all members have completed their last operations
_LOOK_INTERVAL_S = 0.005
_CUDA = torch.device("cuda")
_CPU = torch.device("cpu")


class NcclBackend:
    """The NCCL backend (see context.Backend). The CUDA context of the process outlives all generations."""

    def __init__(self) -> None:
        self._scratch: torch.Tensor | None = None

    def prepare(self, environment: WorkerEnvironment, send: Callable[[FromWorkerBody], None]) -> None:
        """Prepare the device and NCCL's settings.

        Raises UsageError when this slot has no device, or this torch has no NCCL.
        """
        slot = environment.worker.slot
        _make_sure_of_device(slot)
        process_groups.require_group_parts()
        count_failed_collectives()
        for warning in nccl_settings.apply_settings(nccl_settings.nccl_version()):
            logger.warning(warning)
        addresses.use_for_gloo(environment.local_address)
        addresses.use_for_nccl(environment.local_address)
        torch.cuda.set_device(slot)
        self._scratch = torch.zeros(1, device=torch.device("cuda", slot))

    def context(self) -> NcclContext:
        return NcclContext(self._scratch)


def _make_sure_of_device(slot: int) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not dist.is_nccl_available():
        problem, remedy = "this torch is built without NCCL", "Install a build of torch for CUDA, or use --backend gloo"
    elif not count:
        problem, remedy = "torch finds no CUDA device", "Run elasticrun --check, or use --backend gloo"
    elif slot >= count:
        problem = f"slot {slot} of this host has no CUDA device of its own, because torch finds {count}"
        remedy = f"Use at most {count} slots on this host (-np, -H, --slots-per-host), or --backend gloo"
    else:
        return
    raise UsageError(f"--backend: 'nccl': {problem}. {remedy}.")


class NcclContext:
    """The NCCL and Gloo groups of one generation. See context.Context."""

    severs_in_python = True

    def __init__(self, scratch: torch.Tensor | None) -> None:
        """``scratch``: a tensor with one number on the device, made before the first generation."""
        self._scratch = scratch
        self._gloo = GlooGroups()
        self.sockets = self._gloo.sockets
        self._groups = TorchGroups(self._begin_group, self._end_group)
        self._rendezvous: Rendezvous | None = None
        self._lock = threading.Lock()  # for the three attributes below
        self._severed = False
        self._making = False  # True while a group is created
        self._aborted: set[Any] = set()

    # ------------------------------------------------------------------------------------------------------ main thread

    def watch_store(self, address: tuple[str, int]) -> None:
        self.sockets.watch_store(*address)

    def create(self, rendezvous: Rendezvous) -> None:
        """Create the Gloo part first, which needs all members to arrive.

        NCCL's start cannot be cut. So NCCL only has to wait for members that die in the moment between the two parts.
        """
        assert self._scratch is not None, "prepare() comes first"
        self._rendezvous = rendezvous
        nccl_settings.bound_init(rendezvous.init_timeout)
        addresses.announce(rendezvous)
        with addresses.explained(rendezvous):
            self._groups.create(
                "cpu:gloo,cuda:nccl",
                rendezvous.collective_timeout,
                store=rendezvous.store,
                rank=rendezvous.rank,
                world_size=rendezvous.size,
                timeout=rendezvous.init_timeout,
                device_id=self._scratch.device,
            )
        process_groups.set_default_group_timeout(rendezvous.collective_timeout)

    def _begin_group(self, size: int) -> bool:
        with self._lock:
            self._making = not self._severed and self.sockets.begin_group(size)
            return self._making

    def _end_group(self) -> None:
        self.sockets.end_group()
        with self._lock:
            self._making = False

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """Return a Gloo group, because only CPU tensors are sent in it."""
        assert self._rendezvous is not None, "there is a generation"
        return self._gloo.subgroup(self._rendezvous, ranks)

    def retire(self) -> Callable[[], None]:
        """Destroy the groups at once: see context.Context."""
        self.destroy()
        return lambda: None

    def destroy(self) -> None:
        if self._rendezvous is not None and dist.is_initialized() and not self._severed:
            self._be_through_together()
        self._gloo.be_quiet()
        self._abort()
        self._gloo.clear()
        self._rendezvous = None
        self._groups.destroy()
        with self._lock:
            self._aborted.clear()
        self.sockets.forget()

    def _be_through_together(self) -> None:
        """Wait, for a limited time, until no member is inside an operation.

        The last bytes of an operation that has ended here may still be in transit, and an abort cancels them. A member
        that leaves alone waits until the timeout. torch's own shutdown is not used: aborting a communicator during that
        shutdown is not safe.
        """
        cpu = process_groups.part_for(dist.group.WORLD, _CPU)
        device = self._scratch.device if self._scratch is not None else _CUDA

        is_late = threading.Event()

        def meet() -> None:
            torch.cuda.synchronize(device)
            if is_late.is_set():
                return
            options = dist.BarrierOptions()
            options.timeout = timedelta(seconds=_TOGETHER_TIMEOUT_S)
            cpu.barrier(options).wait()

        aside = devices.Aside(meet)
        deadline = time.monotonic() + _TOGETHER_TIMEOUT_S
        while not aside.join(_LOOK_INTERVAL_S) and not self._severed and time.monotonic() < deadline:
            pass
        is_late.set()

    def has_failed(self) -> bool:
        return self._severed or self.sockets.failed()

    def may_have_failed(self) -> bool:
        """NCCL's errors are not counted. A process that is lost has closed its connections of Gloo's part, too."""
        return self.sockets.lost()

    def classify(self, error: BaseException) -> Fault:
        if devices.is_lost(error):
            return Fault.DEVICE
        return Fault.GENERATION if isinstance(error, dist.DistError) else Fault.UNKNOWN

    def usable(self) -> bool:
        """Return True if the device still runs a kernel.

        An error that poisons a CUDA context shows at the next CUDA call, even if it was reported under another name
        before (by NCCL as "unhandled cuda error", for example). The communicators are aborted at the same time, so
        their kernels end.
        """
        if self._scratch is None or self._rendezvous is None:
            return True
        return devices.answers(self._scratch, self._rendezvous.init_timeout)

    # ------------------------------------------------------------------------------------------------------- any thread

    def sever(self) -> None:
        self.sockets.sever()
        with self._lock:
            self._severed = True
            if self._making:
                return  # the creation ends by itself: Gloo's part is cut, NCCL's times out; the next sweep aborts
        self._abort()

    def _abort(self) -> None:
        """Abort all communicators, each once. No new ones can appear, because the store is cut.

        All groups are aborted at the same time, each on its own thread: an abort waits for the device, on which another
        group's kernel may hang (https://github.com/pytorch/pytorch/issues/119797). torch's ``_abort_process_group``
        wraps the aborts in ncclGroupStart and ncclGroupEnd, but each group aborts on another thread, where these have
        no effect. It also removes the groups while the main thread uses them.
        """
        rendezvous = self._rendezvous
        if rendezvous is None:
            return  # no group exists yet, or any more
        with self._lock:
            groups = [group for group in process_groups.all_groups() if group not in self._aborted]
            self._aborted.update(groups)
        aborts = [devices.Aside(backend.abort) for backend in map(_nccl_of, groups) if backend is not None]
        deadline = time.monotonic() + 2 * rendezvous.init_timeout.total_seconds()  # an abort may wait for an init
        for abort in aborts:
            if not abort.join(deadline - time.monotonic()):
                exit_for_replacement("NCCL has not aborted its communicators in time")
            if abort.error is not None:
                logger.error("NCCL could not abort a communicator: %s", abort.error)

    def broken(self) -> bool:
        """Return True if this process has cut the generation, or a pair of the Gloo part has lost its connection.

        A dead process loses its Gloo connections.
        """
        return self._severed or self.sockets.broken()


def _nccl_of(group: Any) -> Any:
    """Return the NCCL part of a group; None if it has none."""
    part = process_groups.part_for(group, _CUDA)
    return part if part is not None and part.name() == "nccl" else None  # a Gloo group also accepts CUDA tensors
