"""Environment variables for torch and NCCL that let a process outlive the failure of its communicators.

Sources, unless named otherwise: ``ProcessGroupNCCL.hpp`` of torch 2.13 (torch/csrc/distributed/c10d),
``ProcessGroupNCCL.cpp`` and ``NCCLUtils.cpp`` of a similar version, and
https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from elasticstate.compat import process_groups
from elasticstate.compat.nccl_versions import refusal
from elasticstate.errors import UsageError
from elasticstate.options import ANY_NCCL, environment_variable, set_unless_given


class Setting(NamedTuple):
    """A variable, its required value, and the effect of other values."""

    names: tuple[str, ...]  # current name first, older names last
    value: str
    otherwise: str


_SETTINGS = (
    # Watchdog::runLoop() passes each failed or overdue operation to handleException(). With 1 and 3 (the default) that
    # throws on the watchdog's thread and so ends the process; with 2 it aborts in parallel to elasticstate. With 0 it
    # does nothing: the sentinel ends generations.
    Setting(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        "0",
        "torch's watchdog handles a failed collective, in most cases by ending the process",
    ),
    # Watchdog::run() rethrows the errors of its event queries (a CUDA error, an aborted communicator) on its own
    # thread, where nothing catches them: std::terminate().
    Setting(
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS",),
        "0",
        "torch's watchdog ends the process after a CUDA error",
    ),
    # HeartbeatMonitor::runLoop() calls std::abort() when the watchdog stops for a while, for example during a long
    # abort or while the process is stopped. --heartbeat-timeout and --hang-timeout cover these cases.
    Setting(
        ("TORCH_NCCL_ENABLE_MONITORING",),
        "0",
        "torch's heartbeat monitor ends the process when the watchdog makes no progress",
    ),
    # The source announces that the switch above will be removed. After that, a timeout of one day must suffice. (More
    # than 24 days, in milliseconds, do not fit into torch's int.)
    Setting(
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",),
        "86400",
        "torch's heartbeat monitor may end the process when the watchdog makes no progress for so many seconds",
    ),
    # With 1 (the default) the monitor asks the store of the default group every second for dump requests of other
    # ranks. The store of an ended generation is cut.
    Setting(
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",),
        "0",
        "torch's heartbeat monitor keeps sending requests to the store of a generation that has ended",
    ),
    # Watchdog::runLoop() sleeps for four times this value (15 s) after it finds a failed operation, so that other ranks
    # can write their dumps. Destroying the group joins the watchdog, and would wait as long.
    Setting(
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",),
        "0",
        "each failure may delay the recovery by four times as many milliseconds",
    ),
    # Programs that use NVIDIA's in-process restart (nvidia-resiliency-ext) set it. The failure that it prevents is
    # neither known here nor measured. It costs bandwidth on machines with NVSwitch.
    Setting(
        ("NCCL_NVLS_ENABLE",),
        "0",
        "NVLink SHARP may not survive an abort of its communicators",
    ),
    # Seen on an H100 with torch 2.11 and NCCL 2.28.9. torch takes the answer "in progress" of a non-blocking
    # communicator for an error in all_to_all_single(). And an abort while the first collective connects leaves the
    # caller of the collective waiting. Some versions of torch choose 1 by themselves.
    Setting(
        ("TORCH_NCCL_USE_COMM_NONBLOCKING",),
        "0",
        "all_to_all raises 'NCCL operation in progress', and a worker may hang after a failure",
    ),
)


def apply_settings() -> list[str]:
    """Set the variables that the user has not set. Keep the user's other values, and return a warning for each."""
    warnings = []
    for setting in _SETTINGS:
        given = set_unless_given(setting.value, *setting.names)
        if given is not None:
            name, value = given
            warnings.append(
                f"{name}={value} in the environment: {setting.otherwise}. Unset the variable, or set it to "
                f"{setting.value}."
            )
    return warnings


def torch_name(backend: str) -> str:
    """Return the name by which torch knows a backend of elasticstate (nccl, nccl2); "" if this torch does not have it.

    ``nccl`` is ProcessGroupNCCL, whatever torch means by that name.
    """
    return process_groups.torch_backend(*{"nccl": ("nccl-legacy", "nccl"), "nccl2": ("nccl2",)}[backend])


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
