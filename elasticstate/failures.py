"""Failures of workers, for the errors of ``launch()`` and the last lines of ``elasticrun``."""

from __future__ import annotations

from dataclasses import dataclass

from elasticstate.exit_status import status_of
from elasticstate.terminal import printable


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
        """Return the details besides the reason, one per line."""
        about = []
        if self.host is not None:
            about.append(f"worker {self.host}:{self.slot} on host {self.host}")
            about.append(f"rank {self.rank}" if self.rank is not None else "no rank yet")
            about.append(f"generation {self.generation}")
        if self.exit_code is not None or self.signal is not None:
            about.append(status_of(self.exit_code, self.signal))
        return [*([", ".join(about)] if about else []), *self.error.rstrip().splitlines()]
