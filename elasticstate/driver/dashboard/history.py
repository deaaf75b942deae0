"""History of a job for its dashboard: generations, failures, and the lines of ``elasticrun``. All lists are bounded.

The history is a file in the job's directory, so that the next driver continues it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from elasticstate.core.texts import listed
from elasticstate.driver.dashboard.merge_patch import View
from elasticstate.failures import WorkerFailure

_MOST_GENERATIONS = 200
_MOST_FAILURES = 50
_MOST_LINES = 200
_LONGEST_ERROR = 8000  # characters
_LONGEST_LINE = 500
_SHOWN = 6  # workers in one text
_FIRST = "start of the job"


class History(msgspec.Struct):
    """Past of a job, newest last. The dashboard passes on what ``Report`` writes."""

    generations: dict[str, View] = {}
    failures: dict[str, View] = {}
    lines: dict[str, View] = {}
    numbers: int = 0  # of failures and lines so far
    cause: str = _FIRST  # why the newest world is changed
    loss: str = ""  # the first failure of a member or a host since the newest world: the cause behind ``cause``
    left: list[str] = []  # slots of the workers that the newest world has lost
    unresponsive: dict[str, str] = {}  # by worker: why its agent kills it

    def event(self, name: str, fields: dict[str, Any], at: float) -> None:
        match name:
            case "end":
                self.cause = fields["cause"]
            case "world_formed":
                self._world_formed(fields, at)
            case "generation_finished":
                self._update(fields, until=at, goodput_s=fields["goodput_s"], wall_s=fields["wall_s"])
            case "training_resumed":
                known = fields["downtime_s"] is not None
                self._update(fields, ticks_lost=fields["ticks_lost"], commits_lost=fields["commits_lost"])
                self._update(fields, **({"downtime_s": fields["downtime_s"]} if known else {}))
            case "worker_unresponsive":
                self.unresponsive[fields["worker"].partition("#")[0]] = fields["reason"]
            case "agent_lost":
                reason = f"host {fields['host']} lost: its agent {fields['reason']}"
                self.loss = self.loss or reason
                self._add_failure({"reason": reason, "at": at, "generation": fields["generation"]})
            case "root_cause":
                self._root_cause(fields, at)

    def failure(self, failure: WorkerFailure, at: float) -> None:
        """Add the failure of a worker."""
        worker = f"{failure.host}:{failure.slot}"
        why = self.unresponsive.pop(worker, "")
        about = {"reason": f"{failure.reason} ({why})" if why else failure.reason, "worker": worker}
        rank = {} if failure.rank is None else {"rank": failure.rank}
        if rank and worker not in self.left:  # else: the newest world was formed because of it
            self.loss = self.loss or str(about["reason"])
        error = failure.error.rstrip()[-_LONGEST_ERROR:]
        self._add_failure({**about, **rank, "at": at, "generation": failure.generation, "error": error})

    def line(self, text: str, at: float) -> None:
        """Add a line of ``elasticrun``."""
        self._add(self.lines, {"at": at, "text": text[:_LONGEST_LINE]}, _MOST_LINES)

    def _world_formed(self, fields: dict[str, Any], at: float) -> None:
        joined, left = fields["joined"], fields["left"]
        self.generations[str(fields["generation"])] = {
            "at": at,
            "size": fields["size"],
            "hosts": fields["hosts"],
            "cause": self.loss or self.cause,
            "joined": listed(joined, shown=_SHOWN) if joined and self.cause != _FIRST else "",
            "left": listed(left, shown=_SHOWN) if left else "",
        }
        self.cause, self.loss = "end of the generation", ""
        self.left = [name.partition("#")[0] for name in left]
        _shorten(self.generations, _MOST_GENERATIONS)

    def _update(self, fields: dict[str, Any], **values: float) -> None:
        generation = str(fields["generation"])
        if generation in self.generations:
            self.generations[generation] = {**self.generations[generation], **values}

    def _root_cause(self, fields: dict[str, Any], at: float) -> None:
        error = str(fields.get("error") or "").rstrip()[-_LONGEST_ERROR:]
        about = {"reason": f"root cause: {fields['reason']}", "at": at, "generation": fields["generation"]}
        self._add_failure({**about, "error": error})

    def _add_failure(self, failure: View) -> None:
        self._add(self.failures, failure, _MOST_FAILURES)

    def _add(self, to: dict[str, View], entry: View, most: int) -> None:
        self.numbers += 1
        to[str(self.numbers)] = entry
        _shorten(to, most)


def _shorten(entries: dict[str, View], most: int) -> None:
    while len(entries) > most:
        del entries[next(iter(entries))]


def decoded(data: bytes) -> History:
    """Return the history in a file; an empty one if it cannot be read."""
    try:
        return msgspec.json.decode(data, type=History)
    except msgspec.DecodeError:
        return History()
