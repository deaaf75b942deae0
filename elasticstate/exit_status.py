"""The end of a process in words: the same words in all lines, events and errors."""

from __future__ import annotations

from signal import Signals

OUT_OF_MEMORY = "out of memory"
"""Begin of the line in the error of a worker that the kernel has killed because its memory was used up."""

NO_WORLD_HINT = (
    "elasticrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and similar variables for each world. They exist only "
    "inside a function decorated with @elasticstate.run.\n"
    "Move the training into such a function, with init_device_mesh(), fully_shard() and DistributedDataParallel, and "
    "remove init_process_group(): the default process group exists there.\n"
    "Before the first world, elasticstate.local_rank() and elasticstate.device() can be called. See MIGRATION.md, "
    "'From torchrun'."
)
NO_GROUP_HINT = (
    "With elasticstate.run, the default process group exists only inside the decorated function. Create "
    "DistributedDataParallel there, and call torch.distributed there. A script without run calls init_process_group()."
)
"""End of the error of a worker that expected a world, or a process group, where none exists."""


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(return_code: int) -> str:
    """Return ``exited with 3``, or ``was killed by SIGKILL`` for -9. ``return_code``: as ``subprocess`` has it."""
    return f"was killed by {signal_name(-return_code)}" if return_code < 0 else f"exited with {return_code}"


def status_of(exit_code: int | None, signal: int | None) -> str:
    """Return ``exit code 3`` or ``SIGKILL``; without both ``its host was lost``."""
    if signal is not None:
        return signal_name(signal)
    return f"exit code {exit_code}" if exit_code is not None else "its host was lost"
