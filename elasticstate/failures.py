"""The end of a process in words, the same in all lines, events and errors; and failures of workers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from signal import Signals

from elasticstate.terminal import printable

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
NO_STDIN_HINT = (
    "This worker has no terminal. A single worker that elasticrun starts on its own machine reads the terminal, and of "
    "several the one of --debug-rank R. Elsewhere call debugpy.listen() in the script, and attach an editor."
)
"""End of the error of a worker that wanted to read from a person."""


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


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Failure of one worker; or, without a worker, of the job as a whole (too few workers for too long)."""

    reason: str  # one line
    host: str | None = None
    slot: int | None = None
    rank: int | None = None  # None: the worker had no rank yet
    generation: int = 0
    exit_code: int | None = None
    signal: int | None = None  # neither exit code nor signal: its host was lost
    error: str = ""  # traceback, or the end of stderr
    time_ns: int = 0  # Unix time by the clock of its host; 0: unknown

    def __str__(self) -> str:
        return printable("\n".join([self.reason, *(f"  {line}" for line in self.details())]))

    def details(self) -> list[str]:
        """Return the details that the reason lacks, one per line."""
        about = []
        if self.host is not None:
            if not self._is_in_reason(name := f"{self.host}:{self.slot}"):
                about.append(f"worker {name}")
            if self.generation:
                rank = f"rank {self.rank}" if self.rank is not None else "no rank yet"
                about.append(f"{rank}, generation {self.generation}")
            elif not self._is_in_reason(when := "before the first world"):
                about.append(when)
        if self.exit_code is not None or self.signal is not None:
            status = status_of(self.exit_code, self.signal)
            how = how_it_ended(self.exit_code or 0 if self.signal is None else -self.signal)
            if not (self._is_in_reason(status) or self._is_in_reason(how)):
                about.append(status)
        error = self.error.rstrip()
        return [*([", ".join(about)] if about else []), *(error.splitlines() if error not in self.reason else [])]

    def _is_in_reason(self, words: str) -> bool:
        """Return True if the reason has these words, and not as a part of longer ones."""
        return re.search(rf"(?<![\w.-]){re.escape(words)}(?!\w)", self.reason) is not None
