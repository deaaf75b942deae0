"""NCCL backends for tensors on CUDA devices, with Gloo for CPU tensors: torch's ``cpu:gloo,cuda:nccl``.

A generation is cut in two parts: the sentinel's native thread cuts Gloo's sockets and the store, and the sentinel's
Python thread aborts NCCL's communicators.

torch has two NCCL backends. ``ProcessGroupNCCL`` is the older one: ``nccl`` up to torch 2.13, and ``nccl-legacy`` since
torch 2.14. ``nccl2`` is a port of torchcomms, which torch 2.15 also means by ``nccl``
(https://github.com/pytorch/pytorch/pull/192281).
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticstate._native import count_failed_collectives
from elasticstate.compat import process_groups
from elasticstate.compat.nccl_versions import refusal
from elasticstate.errors import UsageError
from elasticstate.log import logger
from elasticstate.net.messages import FromWorkerBody
from elasticstate.options import ANY_NCCL, WorkerEnvironment, environment_variable, set_unless_given
from elasticstate.worker.contexts import Aside, Fault, Rendezvous, addresses, answers, is_lost, torch_name
from elasticstate.worker.contexts.gloo import GlooContext
from elasticstate.worker.script import exit_for_replacement

# Environment variables for torch and NCCL that let a process outlive the failure of its communicators.
#
# Sources, unless named otherwise: ``ProcessGroupNCCL.hpp`` of torch 2.13 (torch/csrc/distributed/c10d),
# ``ProcessGroupNCCL.cpp`` and ``NCCLUtils.cpp`` of a similar version, and
# https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html


# Names of a variable (the current one first), its required value, and the effect of other values.
_SETTINGS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    # Watchdog::runLoop() passes each failed or overdue operation to handleException(). With 1 and 3 (the default) that
    # throws on the watchdog's thread and so ends the process; with 2 it aborts in parallel to elasticstate. With 0 it
    # does nothing: the sentinel ends generations.
    (
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        "0",
        "torch's watchdog handles a failed collective, in most cases by ending the process",
    ),
    # Watchdog::run() rethrows the errors of its event queries (a CUDA error, an aborted communicator) on its own
    # thread, where nothing catches them: std::terminate().
    (("TORCH_NCCL_RETHROW_CUDA_ERRORS",), "0", "torch's watchdog ends the process after a CUDA error"),
    # HeartbeatMonitor::runLoop() calls std::abort() when the watchdog stops for a while, for example during a long
    # abort or while the process is stopped. --heartbeat-timeout and --hang-timeout cover these cases.
    (
        ("TORCH_NCCL_ENABLE_MONITORING",),
        "0",
        "torch's heartbeat monitor ends the process when the watchdog makes no progress",
    ),
    # The source announces that the switch above will be removed. After that, a timeout of one day must suffice. (More
    # than 24 days, in milliseconds, do not fit into torch's int.)
    (
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",),
        "86400",
        "torch's heartbeat monitor may end the process when the watchdog makes no progress for so many seconds",
    ),
    # With 1 (the default) the monitor asks the store of the default group every second for dump requests of other
    # ranks. The store of an ended generation is cut.
    (
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",),
        "0",
        "torch's heartbeat monitor keeps sending requests to the store of a generation that has ended",
    ),
    # Watchdog::runLoop() sleeps for four times this value (15 s) after it finds a failed operation, so that other ranks
    # can write their dumps. Destroying the group joins the watchdog, and would wait as long.
    (
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",),
        "0",
        "each failure may delay the recovery by four times as many milliseconds",
    ),
    # Aborted communicators keep their multicast memory (https://github.com/NVIDIA/nccl/issues/2117). Programs that use
    # NVIDIA's in-process restart set it, too. It costs bandwidth on machines with NVSwitch.
    (
        ("NCCL_NVLS_ENABLE",),
        "0",
        "NVLink SHARP keeps memory of aborted communicators, so each failure costs memory",
    ),
    # Seen on an H100 with torch 2.11 and NCCL 2.28.9. torch takes the answer "in progress" of a non-blocking
    # communicator for an error in all_to_all_single(). And an abort while the first collective connects leaves the
    # caller of the collective waiting. Some versions of torch choose 1 by themselves.
    (
        ("TORCH_NCCL_USE_COMM_NONBLOCKING",),
        "0",
        "all_to_all raises 'NCCL operation in progress', and a worker may hang after a failure",
    ),
)


def apply_settings() -> list[str]:
    """Set the variables that the user has not set. Keep the user's other values, and return a warning for each."""
    warnings = []
    for names, required, effect in _SETTINGS:
        if (given := set_unless_given(required, *names)) is not None:
            name, value = given
            remedy = f"Unset the variable, or set it to {required}."
            warnings.append(f"{name}={value} in the environment: {effect}. {remedy}")
    return warnings


def require_usable(backend: str, nccl: tuple[int, ...]) -> list[str]:
    """Raise UsageError if this version of NCCL is known not to survive a failure.

    If the user wants it nevertheless, return that as a warning. AMD's library has versions of its own.
    """
    reason = "" if torch.version.hip else refusal(nccl)
    if not reason:
        return []
    problem = f"NCCL {'.'.join(map(str, nccl))}: {reason}"
    if environment_variable(ANY_NCCL) == "1":
        return [f"{problem}. {ANY_NCCL}=1 permits it."]
    raise UsageError(
        f"--backend: {backend!r}: {problem}. Install a torch with another NCCL, use --backend gloo, or set "
        f"{ANY_NCCL}=1 to use it nevertheless."
    )


def nccl_version() -> tuple[int, ...]:
    """Return the version of the loaded NCCL library."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return tuple(version[:3])


_TOGETHER_TIMEOUT_S = 5.0  # maximum time until all members have completed their last operations
_ABORT_TIMEOUT_S = 15.0  # a usual abort takes 0.5 s (nvidia-resiliency-ext, usage guide of the in-process restart)
_DESTROY_TIMEOUT_S = 60.0  # after all aborts: torch joins the threads of each group
_LOOK_INTERVAL_S = 0.005
_CUDA = torch.device("cuda")
_CPU = torch.device("cpu")

# nccl2 raises these as RuntimeErrors without a type of their own. Seen in torch 2.15.0, and in its source:
# torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.cpp and ProcessGroupNCCLUtils.cpp
_NCCL2_ERRORS = (
    "NCCL communicator was aborted after a previous error",
    "NCCL operation timed out",
    "Work timed out during finalize",
    "NCCL Async Error",
    "ProcessGroupNCCL has been finalized",
)


class NcclBackend:
    """An NCCL backend (see contexts.Backend). The CUDA context of the process outlives all generations."""

    name = "nccl"  # of --backend

    def __init__(self) -> None:
        self._scratch: torch.Tensor | None = None
        self._device = torch.device("cuda", 0)

    def prepare(self, environment: WorkerEnvironment, send: Callable[[FromWorkerBody], None]) -> None:
        """Prepare the device and NCCL's settings. Raises UsageError when this slot has no device, this torch does not
        have the backend, or this version of NCCL is known not to survive a failure."""
        slot = environment.worker.slot
        _make_sure_of_device(self.name, slot)
        process_groups.require_group_parts()
        count_failed_collectives()
        version = nccl_version()
        for warning in [*require_usable(self.name, version), *apply_settings()]:
            logger.warning(warning)
        addresses.use_for_gloo(environment.local_address)
        addresses.use_for_nccl(environment.local_address)
        self._device = torch.device("cuda", slot)
        torch.cuda.set_device(slot)
        self._scratch = torch.zeros(1, device="cpu").cuda(slot)

    def context(self) -> NcclContext:
        return NcclContext(self._scratch, self._device, self.name)


class Nccl2Backend(NcclBackend):
    """torch's nccl2, which is not used unless the user asks for it: it has run on one GPU, for minutes."""

    name = "nccl2"


def _make_sure_of_device(backend: str, slot: int) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not dist.is_nccl_available():
        problem, remedy = "this torch is built without NCCL", "Install a build of torch for CUDA, or use --backend gloo"
    elif not torch_name(backend):
        problem, remedy = f"torch {torch.__version__} has no backend {backend}", "Use --backend nccl, or torch 2.14"
    elif not count:
        problem, remedy = "torch finds no CUDA device", "Run elasticrun --check, or use --backend gloo"
    elif slot >= count:
        problem = f"slot {slot} of this host has no CUDA device of its own, because torch finds {count}"
        remedy = (
            f"Use at most {count} slots on this host (-np, -H, --slots-per-host), or --backend gloo. A script must not "
            "set CUDA_VISIBLE_DEVICES itself"
        )
    else:
        return
    raise UsageError(f"--backend: {backend!r}: {problem}. {remedy}.")


class NcclContext(GlooContext):
    """The NCCL and Gloo groups of one generation. See contexts.Context."""

    severs_in_python = True
    raises_when_cut = False  # the kernels end, and the stream goes on

    def __init__(self, scratch: torch.Tensor | None, device: torch.device, backend: str = "nccl") -> None:
        """``scratch``: a tensor with one number on ``device``, made before the first generation."""
        super().__init__()
        self._scratch = scratch
        self._device = device
        self._backend = backend
        self._failure = ""  # what NCCL has found by itself
        self._lock = threading.Lock()  # for the attributes below, and for the end of ``_rendezvous``
        self._severed = False
        self._is_leaving = False
        self._making: float | None = None  # since when a group is being created
        self._cut_in_making: float | None = None  # when that was to end
        self._aborts: dict[Any, Aside | None] = {}  # begun, of each group; None: it has no NCCL part

    # ------------------------------------------------------------------------------------------------------ main thread

    def create(self, rendezvous: Rendezvous) -> None:
        """Create the Gloo part first, which needs all members to arrive: NCCL's start cannot be cut. So NCCL only has
        to wait for members that die in the moment between the two parts (see ``sever``)."""
        assert self._scratch is not None, "prepare() comes first"
        self._create(rendezvous, f"cpu:gloo,cuda:{torch_name(self._backend)}", device_id=self._device)
        part = _nccl_of(dist.group.WORLD)
        if part is None:
            found = getattr(process_groups.part_for(dist.group.WORLD, _CUDA), "name", lambda: "none")()
            raise UsageError(
                f"--backend: {self._backend!r}: torch has made no part of NCCL for CUDA tensors, but {found!r}, which "
                "elasticstate cannot abort. Unset variables that replace torch's backends, such as "
                "TORCH_DISTRIBUTED_USE_TORCHCOMMS, or use --backend gloo."
            )
        # torch's function, which has been called, omits some backends, depending on its version.
        process_groups.set_part_timeout(part, rendezvous.collective_timeout)

    def _begin_group(self, size: int) -> bool:
        with self._lock:
            may_begin = not self._severed and self.sockets.begin_group(size)
            self._making = time.monotonic() if may_begin else None
            return may_begin

    def _end_group(self) -> None:
        self.sockets.end_group()
        with self._lock:
            self._making = None

    def retire(self) -> Callable[[], None]:
        """Destroy the groups at once: see contexts.Context."""
        self._part_together()
        self._destroy(exit_for_replacement)
        return lambda: None

    def destroy(self, by_plan: bool = False) -> None:
        if by_plan:
            self._part_together()
        self._destroy(_keep_groups if by_plan else exit_for_replacement)

    def _part_together(self) -> None:
        with self._lock:
            self._is_leaving = True
        if self._rendezvous is not None and dist.is_initialized() and not self._severed:
            self._be_through_together()

    def _destroy(self, on_late_abort: Callable[[str], object]) -> None:
        """Destroy the groups after all their aborts, in whatever thread they have begun: torch's shutdown of a group
        whose abort still runs is not safe."""
        with self._lock:
            self._is_leaving = True
        self._gloo.be_quiet()
        if self._rendezvous is not None:
            # An abort goes on while a CUDA graph lives that has captured an operation of its communicator
            # (https://github.com/vllm-project/vllm/pull/39846). Those of a script that has left are garbage.
            gc.collect()
        is_aborted = self._abort(on_late_abort)
        self._gloo.take()
        with self._lock:
            self._rendezvous = None  # no abort begins from now on
        if not is_aborted:
            return
        with _ending_within(_DESTROY_TIMEOUT_S):
            self._groups.destroy()
        with self._lock:
            self._aborts.clear()
        self.sockets.forget()

    def _be_through_together(self) -> None:
        """Wait, for a limited time, until no member is inside an operation: an abort would cancel the last bytes of one
        that has ended here. torch's own shutdown is not used: aborting a communicator during it is not safe."""
        cpu = process_groups.part_for(dist.group.WORLD, _CPU)
        is_late = threading.Event()

        def meet() -> None:
            torch.cuda.synchronize(self._device)
            if is_late.is_set():
                return
            options = dist.BarrierOptions()
            options.timeout = timedelta(seconds=_TOGETHER_TIMEOUT_S)
            cpu.barrier(options).wait()

        aside = Aside(meet, self._device.index)
        deadline = time.monotonic() + _TOGETHER_TIMEOUT_S
        while not aside.join(_LOOK_INTERVAL_S) and not self._severed and time.monotonic() < deadline:
            pass
        is_late.set()

    def has_failed(self) -> bool:
        return self._severed or bool(self._failure) or self.sockets.failed()

    def may_have_failed(self) -> bool:
        """A process that is lost has closed its connections of Gloo's part, too."""
        return self.has_failed() or self.sockets.lost()

    def classify(self, error: BaseException) -> Fault:
        if is_lost(error):
            return Fault.DEVICE
        is_of_nccl2 = isinstance(error, RuntimeError) and any(text in str(error) for text in _NCCL2_ERRORS)
        return Fault.GENERATION if is_of_nccl2 or isinstance(error, dist.DistError) else Fault.UNKNOWN

    def usable(self) -> bool:
        """Return True if the device still runs a kernel: an error that poisons a CUDA context shows at the next CUDA
        call. The communicators are aborted at the same time, so their kernels end."""
        if self._scratch is None or self._rendezvous is None:
            return True
        return answers(self._scratch, self._device, self._rendezvous.init_timeout)

    # ------------------------------------------------------------------------------------------------------- any thread

    def sever(self) -> None:
        """End all operations. Called again and again until the generation is left. Nothing ends NCCL's start, which
        waits for a lost member for ever: then this process has to be replaced."""
        self.sockets.sever()
        with self._lock:
            self._severed = True
            if self._making is not None:
                now = time.monotonic()
                self._cut_in_making = self._cut_in_making or now
                is_late = now - self._cut_in_making > _ABORT_TIMEOUT_S
            else:
                self._cut_in_making = None
        if self._cut_in_making is None:
            self._abort(exit_for_replacement)
        elif is_late:
            exit_for_replacement(f"NCCL has waited {_ABORT_TIMEOUT_S:g} s for a lost member while it made a group")

    def _abort(self, on_late_abort: Callable[[str], object]) -> bool:
        """Abort all communicators, each once. Return True if that has ended in time. No new ones appear: the store is
        cut.

        All groups are aborted at the same time, each on its own thread: an abort waits for the device, on which another
        group's kernel may hang (https://github.com/pytorch/pytorch/issues/119797). torch's ``_abort_process_group``
        also removes the groups while the main thread uses them.
        """
        with self._lock:
            if self._rendezvous is None:
                return True  # no group exists yet, or any more
            for group in self._groups.all():
                if group not in self._aborts:
                    part = _nccl_of(group)
                    call = functools.partial(_abort_part, part)
                    self._aborts[group] = None if part is None else Aside(call, self._device.index)
            aborts = [abort for abort in self._aborts.values() if abort is not None]
        is_late = not all(abort.join(abort.begun + _ABORT_TIMEOUT_S - time.monotonic()) for abort in aborts)
        if is_late:
            on_late_abort(f"NCCL has not aborted its communicators within {_ABORT_TIMEOUT_S:g} s")
        return not is_late

    def own_failure(self) -> str:
        """Return what torch's watchdog has found: a network error, or an operation that takes too long (see _SETTINGS).
        It does not see the creation of a group."""
        with self._lock:
            rendezvous = self._rendezvous
            if rendezvous is None or self._is_leaving or self._failure:
                return self._failure
            if self._making is not None:  # NCCL's start has no limit of its own
                if time.monotonic() - self._making > rendezvous.collective_timeout.total_seconds():
                    self._failure = _NOT_MADE.format(rendezvous.collective_timeout.total_seconds())
                return self._failure
        for part in map(_nccl_of, self._groups.all()):
            if part is not None and (error := process_groups.error_of(part)):
                self._failure = _in_words(error, rendezvous.collective_timeout)
        return self._failure

    def broken(self) -> bool:
        """Return True if this process has cut the generation, a pair of the Gloo part has lost its connection (as one
        of a dead process), or NCCL has found a failure."""
        return self._severed or self.sockets.broken() or bool(self.own_failure())


def _nccl_of(group: Any) -> Any:
    """Return the NCCL part of a group; None if it has none. A Gloo group also accepts CUDA tensors."""
    part = process_groups.part_for(group, _CUDA)
    return part if part is not None and part.name().startswith("nccl") else None


def _abort_part(part: Any) -> None:
    """Abort a communicator. nccl2 waits for that as long as for an operation of the group."""
    try:
        process_groups.set_part_timeout(part, timedelta(seconds=_ABORT_TIMEOUT_S))
        part.abort()
    except Exception as error:  # it stays as it is; the device shows whether it can be used
        logger.error("NCCL could not abort a communicator: %s", error)


def _keep_groups(reason: str) -> None:
    """Tell that the groups of the last world stay as they are. The training has ended: nothing is worth a kill."""
    logger.error("%s. Drop the CUDA graphs with collectives before the training function returns.", reason)


_NOT_MADE = (
    "NCCL has not made a group within --collective-timeout of {:g} s, although no worker is lost. A rank does not make "
    "it, or NCCL uses an address that others cannot reach: see NCCL_SOCKET_IFNAME and NCCL_DEBUG=INFO"
)


@contextmanager
def _ending_within(timeout_s: float) -> Iterator[None]:
    """Replace this process if the block takes longer."""
    reason = f"torch has not destroyed its groups within {timeout_s:g} s"
    timer = threading.Timer(timeout_s, exit_for_replacement, (reason,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _in_words(error: str, timeout: timedelta) -> str:
    if error == "TIMEOUT":
        return (
            f"an operation of NCCL has taken longer than --collective-timeout of {timeout.total_seconds():g} s, or "
            "than the time-out that the script has given its group"
        )
    return f"NCCL has lost the connection to another worker, or has failed ({error}). NCCL_DEBUG=WARN tells more"
