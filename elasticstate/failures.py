"""How a worker failed, as ``launch()`` and the end of ``elasticrun`` tell it."""

from __future__ import annotations

from dataclasses import dataclass

from elasticstate.processes import signal_name


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A failure of a job: of one worker, or, with no worker, of the job as a whole (too few workers for too long)."""

    reason: str  # one line
    host: str | None = None
    slot: int | None = None
    rank: int | None = None  # None: it had none yet
    generation: int = 0
    exit_code: int | None = None
    signal: int | None = None  # neither: its host was lost
    error: str = ""  # traceback, or the end of stderr
    time_ns: int = 0  # unix, by the clock of its host; 0: not known

    def __str__(self) -> str:
        return "\n".join([self.reason, *(f"  {line}" for line in self.details())])

    def details(self) -> list[str]:
        """Line by line, what there is to say besides the reason."""
        about = []
        if self.host is not None:
            about.append(f"worker {self.host}:{self.slot} on host {self.host}")
            about.append(f"rank {self.rank}" if self.rank is not None else "without a rank")
            about.append(f"generation {self.generation}")
        if self.exit_code is not None or self.signal is not None:
            about.append(how_it_ended(self.exit_code, self.signal))
        return [*([", ".join(about)] if about else []), *self.error.rstrip().splitlines()]


def how_it_ended(exit_code: int | None, signal: int | None) -> str:
    """``SIGKILL``, ``exit code 3``."""
    if signal is not None:
        return signal_name(signal)
    return f"exit code {exit_code}" if exit_code is not None else "its host was lost"
