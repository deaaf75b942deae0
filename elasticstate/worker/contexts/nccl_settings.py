"""What torch and NCCL are told by environment variables, so that a process outlives the failure of its communicators.

Sources, where nothing else is named: ``ProcessGroupNCCL.hpp`` of torch 2.13 (torch/csrc/distributed/c10d),
``ProcessGroupNCCL.cpp`` and ``NCCLUtils.cpp`` of a version near it, and
https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
"""

from __future__ import annotations

import math
import sys
from datetime import timedelta
from typing import NamedTuple

import torch

from elasticstate.config import set_unless_given


class Setting(NamedTuple):
    """A variable, what it has to say, and what happens otherwise."""

    names: tuple[str, ...]  # the older ones last
    value: str
    otherwise: str


_ALWAYS = (
    # Watchdog::runLoop() hands each failed or overdue operation to handleException(), which throws on the watchdog's
    # thread with 1 and 3 (the default), and so ends the process; 2 aborts beside us. With 0 nothing is done: who ends a
    # generation is the sentinel.
    Setting(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        "0",
        "torch's watchdog deals with a failed collective itself, and mostly by ending the process",
    ),
    # Watchdog::run() rethrows what its queries of events meet (a CUDA error, an aborted communicator) on its own
    # thread, where nobody catches it: std::terminate().
    Setting(
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS",),
        "0",
        "torch's watchdog ends the process when it meets a CUDA error",
    ),
    # HeartbeatMonitor::runLoop() calls std::abort() when the watchdog stands still for a while, as it does when an
    # abort takes long, or the process is stopped. --heartbeat-timeout and --hang-timeout are there for that.
    Setting(
        ("TORCH_NCCL_ENABLE_MONITORING",),
        "0",
        "torch's heartbeat monitor ends the process when the watchdog stands still",
    ),
    # The source says that the switch above goes away one day: then a day has to be long enough. (More than 24 days in
    # milliseconds do not fit into its int.)
    Setting(
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",),
        "86400",
        "torch's heartbeat monitor may end the process when the watchdog stands still for so long",
    ),
    # With 1 (the default) the monitor asks the store of the default group every second whether another rank wants a
    # dump; the store of a generation that has ended is cut.
    Setting(
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",),
        "0",
        "torch's heartbeat monitor goes on asking the store of a generation that has ended",
    ),
    # Watchdog::runLoop() sleeps for four times that (15 s) once it has found a failed operation, so that others may
    # write their dumps; who destroys the group joins the watchdog, and would wait as long.
    Setting(
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",),
        "0",
        "each failure may hold up the recovery by four times as many milliseconds",
    ),
    # Programs that use NVIDIA's own in-process restart (nvidia-resiliency-ext) set it; what fails otherwise is not
    # known here, nor measured. It costs bandwidth on machines with NVSwitch.
    Setting(
        ("NCCL_NVLS_ENABLE",),
        "0",
        "NVLink SHARP is not known to outlive an abort of its communicators",
    ),
)
_NONBLOCKING = Setting(
    # Otherwise ncclCommInitRank() returns when all members are there, or never.
    ("TORCH_NCCL_USE_COMM_NONBLOCKING",),
    "1",
    "nothing bounds the wait for the other members when a communicator is made",
)
_NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"  # seconds; 1800 unless it is set


def apply_settings(nccl: tuple[int, ...]) -> list[str]:
    """Set what the user has not; what the user has set otherwise is kept, and told. ``nccl``: its version."""
    # Non-blocking communicators of 2.26 hang now and then: https://github.com/pytorch/pytorch/pull/154055
    wanted = _ALWAYS if (2, 26) <= nccl < (2, 27) else (*_ALWAYS, _NONBLOCKING)
    warnings = []
    for setting in wanted:
        given = set_unless_given(setting.value, *setting.names)
        if given is not None:
            name, value = given
            warnings.append(
                f"{name}={value} is set in the environment: {setting.otherwise}; unset it, or set it to {setting.value}"
            )
    return warnings


def warn(warnings: list[str]) -> None:
    for text in warnings:
        sys.stderr.write(f"elasticstate: {text}\n")


def bound_init(timeout: timedelta) -> None:
    """How long a communicator may take to be made (and to be aborted), if the user has not said so. torch looks once in
    the life of a process."""
    set_unless_given(str(math.ceil(timeout.total_seconds())), _NONBLOCKING_TIMEOUT)


def nccl_version() -> tuple[int, ...]:
    """Of the library that is loaded."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return tuple(version[:3])
