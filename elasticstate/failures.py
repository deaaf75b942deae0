"""Failures of workers, for the errors of ``launch()`` and the last lines of ``elasticrun``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elasticstate.exit_status import how_it_ended, status_of
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
