"""Reports on outputs that cannot be written: when a trouble begins, when it changes, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elasticstate.core.types import WorkerId
from elasticstate.net.messages import OutputTrouble
from elasticstate.writing import BLOCKED_S, Writer


@dataclass(slots=True)
class _Seen:
    reported: OutputTrouble
    reported_at: float = 0.0
    over_bytes: int = 0  # dropped by writers that are closed
    before_bytes: int = 0  # dropped before the present trouble


class Watch:
    """Watches several outputs. Call ``look`` for each output, several times a second."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def forget(self) -> None:
        """Report each trouble that lasts once more."""
        for output, seen in self._seen.items():
            seen.reported = OutputTrouble(output, "", (), 0)

    def look(self, output: str, writers: list[Writer], waiting: Iterable[WorkerId] = ()) -> Iterator[OutputTrouble]:
        """Yield the state of an output with these ``writers`` if it has changed. Remove the writers that are closed.

        ``waiting``: the workers that wait for this output. A new count of dropped bytes alone is reported only now and
        then.
        """
        seen = self._seen.setdefault(output, _Seen(OutputTrouble(output, "", (), 0)))
        reason = next(filter(None, [writer.trouble() for writer in writers]), "")
        for writer in [writer for writer in writers if writer.is_over]:
            writers.remove(writer)
            seen.over_bytes += writer.dropped_bytes
        dropped_bytes = seen.over_bytes + sum(writer.dropped_bytes for writer in writers) - seen.before_bytes
        trouble = OutputTrouble(output, reason, tuple(waiting) if reason else (), dropped_bytes)
        is_change = (reason, trouble.workers) != (seen.reported.reason, seen.reported.workers)
        now = time.monotonic()
        if is_change or (reason and trouble != seen.reported and now - seen.reported_at > BLOCKED_S):
            seen.reported, seen.reported_at = trouble, now
            yield trouble
        if not reason:
            seen.before_bytes += dropped_bytes
