"""NCCL for the tensors on CUDA devices, and Gloo for those in the memory of the CPU: torch's ``cpu:gloo,cuda:nccl``.

A generation is cut in two: Gloo's sockets and the store by the sentinel's native thread, NCCL's communicators by an
abort, on the sentinel's Python thread.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elasticstate.config import WorkerEnvironment
from elasticstate.errors import UsageError
from elasticstate.net.messages import FromWorkerBody
from elasticstate.worker.contexts import device as devices, nccl_settings
from elasticstate.worker.contexts.context import Fault, Rendezvous
from elasticstate.worker.contexts.gloo_groups import GlooGroups
from elasticstate.worker.contexts.groups import TorchGroups
from elasticstate.worker.replacement import be_replaced

_TOGETHER_TIMEOUT_S = 5.0  # for all members to be through with what they do in a generation that is left
_LOOK_INTERVAL_S = 0.005
_CUDA = torch.device("cuda")
_CPU = torch.device("cpu")


class Nccl:
    """The backend (see context.Backend). The CUDA context of the process outlives all generations."""

    def __init__(self) -> None:
        self._scratch: torch.Tensor | None = None

    def prepare(self, environment: WorkerEnvironment, say: Callable[[FromWorkerBody], None]) -> None:
        """Raises UsageError when this slot has no device, or torch no NCCL."""
        slot = environment.worker.slot
        _make_sure_of_device(slot)
        nccl_settings.warn(nccl_settings.apply_settings(nccl_settings.nccl_version()))
        torch.cuda.set_device(slot)
        self._scratch = torch.zeros(1, device=torch.device("cuda", slot))

    def context(self) -> NcclContext:
        return NcclContext(self._scratch)


def _make_sure_of_device(slot: int) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not dist.is_nccl_available():
        problem, remedy = "this torch is built without NCCL", "install a build of torch for CUDA, or use --backend gloo"
    elif not count:
        problem, remedy = "torch sees no CUDA device", "see 'elasticrun --check', or use --backend gloo"
    elif slot >= count:
        problem = f"slot {slot} of this host has no CUDA device of its own: torch sees {count}"
        remedy = f"at most {count} slots on this host (-np, -H, --slots-per-host), or --backend gloo"
    else:
        return
    raise UsageError(f"--backend: 'nccl': {problem}; {remedy}")


class NcclContext:
    """See context.Context."""

    severs_in_python = True

    def __init__(self, scratch: torch.Tensor | None) -> None:
        """``scratch``: one number on the device, made before the first generation."""
        self._scratch = scratch
        self._gloo = GlooGroups()
        self.sockets = self._gloo.sockets
        self._groups = TorchGroups(self._begin_group, self._end_group)
        self._rendezvous: Rendezvous | None = None
        self._lock = threading.Lock()  # for the three below
        self._severed = False
        self._making = False  # a group
        self._aborted: set[Any] = set()

    # ------------------------------------------------------------------------------------------------ main thread

    def watch_store(self, address: tuple[str, int]) -> None:
        self.sockets.watch_store(*address)

    def create(self, rendezvous: Rendezvous) -> None:
        """Gloo's half comes first, for which all members have to be there: NCCL, which cannot be cut as it begins, has
        only to wait for those that die in that moment."""
        assert self._scratch is not None, "prepare() comes first"
        self._rendezvous = rendezvous
        nccl_settings.bound_init(rendezvous.init_timeout)
        self._groups.create(
            "cpu:gloo,cuda:nccl",
            rendezvous.collective_timeout,
            store=rendezvous.store,
            rank=rendezvous.rank,
            world_size=rendezvous.size,
            timeout=rendezvous.init_timeout,
            device_id=self._scratch.device,
        )
        distributed_c10d._set_pg_timeout(rendezvous.collective_timeout, dist.group.WORLD)

    def _begin_group(self, size: int) -> bool:
        with self._lock:
            self._making = not self._severed and self.sockets.begin_group(size)
            return self._making

    def _end_group(self) -> None:
        self.sockets.end_group()
        with self._lock:
            self._making = False

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """Of Gloo alone: what passes through it is in the memory of the CPU."""
        assert self._rendezvous is not None, "there is a generation"
        return self._gloo.subgroup(self._rendezvous, ranks)

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
        """Wait until no member is in the middle of an operation: the last bytes of one that has ended here may still be
        on their way, and an abort takes them back. Whoever leaves alone waits in vain, but not for long.

        Not by torch's own shutdown: aborting a communicator while that destroys it is not safe.
        """
        cpu: Any = distributed_c10d._get_default_group()._get_backend(_CPU)
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

    def classify(self, error: BaseException) -> Fault:
        if devices.is_lost(error):
            return Fault.DEVICE
        return Fault.GENERATION if isinstance(error, dist.DistError) else Fault.UNKNOWN

    def usable(self) -> bool:
        """What poisons a CUDA context shows with the next thing that is asked of it, whatever it was called before (by
        NCCL, say, "unhandled cuda error"). The communicators are aborted meanwhile, so their kernels end."""
        if self._scratch is None or self._rendezvous is None:
            return True
        return devices.answers(self._scratch, self._rendezvous.init_timeout)

    # ------------------------------------------------------------------------------------------------- any thread

    def sever(self) -> None:
        self.sockets.sever()
        with self._lock:
            self._severed = True
            if self._making:
                return  # it ends by itself: Gloo's half is cut, NCCL's has its time-out; then comes the next sweep
        self._abort()

    def _abort(self) -> None:
        """Abort all communicators that there are, once. No more can come: the store is cut.

        All groups at once, each on a thread: the abort of one waits for the device, on which the kernel of another one
        may hang (https://github.com/pytorch/pytorch/issues/119797). torch's ``_abort_process_group`` puts them between
        ncclGroupStart and ncclGroupEnd, but each group aborts on another thread, for which these do not count; and it
        takes the groups away while the main thread uses them.
        """
        rendezvous = self._rendezvous
        if rendezvous is None:
            return  # there is no group yet, or no more
        with self._lock:
            groups = [group for group in list(distributed_c10d._world.pg_map) if group not in self._aborted]
            self._aborted.update(groups)
        aborts = [devices.Aside(backend.abort) for backend in map(_nccl_of, groups) if backend is not None]
        deadline = time.monotonic() + 2 * rendezvous.init_timeout.total_seconds()  # it may wait for an init
        for abort in aborts:
            if not abort.join(deadline - time.monotonic()):
                be_replaced("NCCL does not come back from aborting its communicators")
            if abort.error is not None:
                sys.stderr.write(f"elasticstate: NCCL's abort of a communicator has failed: {abort.error}\n")

    def broken(self) -> bool:
        """Cut here, or a pair of Gloo's half has lost its connection, which goes with the process at its other end."""
        return self._severed or self.sockets.broken()


def _nccl_of(group: Any) -> Any:
    """NCCL's part of a group, if it has one."""
    try:
        backend = group._get_backend(_CUDA)
    except RuntimeError:
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend if backend.name() == "nccl" else None  # a group of Gloo takes CUDA tensors, too
