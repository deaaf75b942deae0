"""What a person and a program see of a job: a plain line per event, the event file, and the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from elasticstate.config import Options
from elasticstate.core.types import RootCause, WorkerId
from elasticstate.errors import OptionError
from elasticstate.failures import WorkerFailure, how_it_ended

Fields = dict[str, Any]

_MOST_FAILURES = 1000  # that are kept


def number_of(count: int, what: str) -> str:
    """``1 worker``, ``3 workers``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _seat(worker: str) -> str:
    return worker.partition("#")[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended."""

    status: int
    word: str  # succeeded, failed, or what made it stop
    root_cause: RootCause | None = None


class Report:
    """Call ``event`` for each event, then ``summary`` once. Raises OptionError when the event file cannot be opened."""

    def __init__(self, job: str, events_file: str | None, verbose: bool) -> None:
        self._job = job
        self._verbose = verbose
        self._ends: dict[str, str] = {}  # how workers ended since the last world
        self._sent_away: set[str] = set()
        self._warned: set[str] = set()  # what agents have warned of
        self.failures: list[WorkerFailure] = []  # of workers, the first ones
        self._world = ""  # the line of a world in which training has not resumed yet
        self._reason = ""
        self._is_behind = False  # there are events that could not be written
        try:
            self._file: IO[str] | None = open(events_file, "a", encoding="utf-8") if events_file else None  # noqa: SIM115
        except OSError as error:
            raise OptionError(f"--events-file: {events_file!r}: takes a path to write to ({error.strerror})") from None
        self._lines: dict[str, Callable[[Fields], str]] = {
            "job_started": lambda f: f"job {self._job}: {_size(f)}",
            "host_added": lambda f: f"host {f['host']}: {number_of(f['slots'], 'slot')}",
            "host_removed": lambda f: f"host {f['host']} was taken away",
            "host_leaving": lambda f: f"host {f['host']} is to be left: {f['reason']}",
            "host_cooldown": lambda f: f"host {f['host']} is left alone for {f['seconds']:.1f} s: {f['reason']}",
            "agent_lost": lambda f: f"lost host {f['host']}: its agent {f['reason']}",
            "worker_exited": self._worker_exited,
            "worker_unresponsive": lambda f: f"{_seat(f['worker'])} does not respond: {f['reason']}",
            "waiting": lambda f: f"waits for {f['for']}: {f['who']}",
            "driver_restarted": _driver_restarted,
            "warning": lambda f: f"warning: {f['text']}",
            "world_formed": self._world_formed,
            "training_resumed": self._training_resumed,
        }

    # --------------------------------------------------------------------------------------------------- the events

    def started(self, options: Options, has_one_thread_each: bool) -> None:
        sizes = {"np": options.np, "min_np": options.min_np, "max_np": options.max_np}
        self.event("job_started", {"generation": 0, "pid": os.getpid(), "command": list(options.command), **sizes})
        if has_one_thread_each:
            self.say("OMP_NUM_THREADS=1 for each worker, as several share this machine; set it to choose")

    def warn_once(self, host: str, text: str, generation: int) -> None:
        """The same trouble on a thousand hosts is one trouble."""
        if text not in self._warned:
            self._warned.add(text)
            text = f"host {host}: {text} (if it is the same on other hosts, that is not said again)"
            self.event("warning", {"generation": generation, "text": text})

    def event(self, name: str, fields: Fields, at: float | None = None) -> None:
        """Write the event to the file, and say it if a person wants to know.

        ``at``: when it was, by the monotonic clock; None: now.
        """
        ago_s = 0.0 if at is None else time.monotonic() - at
        self._write({"time": round(time.time() - ago_s, 6), "event": name, "job": self._job, **fields})
        if name in self._lines:
            text = self._lines[name](fields)
            if text:
                self.say(text)
        elif self._verbose and name != "root_cause":
            self.say(" ".join([name, *(f"{key}={value}" for key, value in fields.items())]))

    def reason(self, reason: str) -> None:
        """Why the core did what it did, or waits; said when it changes, and somebody wants to know."""
        if self._verbose and reason and reason != self._reason:
            self._reason = reason
            self.say(f"because {reason}")

    def sent_away(self, worker: WorkerId) -> None:
        """The worker has been told to go: its end, whatever it looks like, is no news."""
        self._sent_away.add(str(worker))

    def say(self, text: str) -> None:
        try:
            sys.stderr.write(f"elasticrun: {text}\n")
            sys.stderr.flush()
        except OSError:
            pass  # the terminal is gone: the job goes on

    def _worker_exited(self, f: Fields) -> str:
        how = self._ends[f["worker"]] = how_it_ended(f["exit_code"], f["signal"])
        expected = f["exit_code"] == 0 or f["worker"] in self._sent_away
        self._sent_away.discard(f["worker"])
        if not expected and len(self.failures) < _MOST_FAILURES:
            self.failures.append(_failure(f, how))
        if expected and not self._verbose:
            return ""
        rank = f" (rank {f['rank']})" if f["rank"] is not None else ""
        return f"{_seat(f['worker'])}{rank} ended: {how}"

    def _world_formed(self, f: Fields) -> str:
        unsaid, self._world = self._world, ""
        first = f["generation"] <= 1
        text = f"generation {f['generation']}: {number_of(f['size'], 'worker')} on {number_of(f['hosts'], 'host')}"
        if not first:
            lost = [f"{_seat(w)} ({self._ends[w]})" for w in f["left"] if w in self._ends]
            left = [_seat(w) for w in f["left"] if w not in self._ends]
            changes = (("lost", lost), ("without", left), ("with", [_seat(w) for w in f["joined"]]))
            text += "".join(f"; {what} {_few(who)}" for what, who in changes if who)
        self._ends.clear()
        if first:
            return text
        self._world = text
        return unsaid

    def _training_resumed(self, f: Fields) -> str:
        text, self._world = self._world, ""
        again = f", {number_of(f['ticks_lost'], 'tick')} to do again" if f["ticks_lost"] else ""
        return f"{text}; back in {f['downtime_s']:.2f} s, 0 commits lost{again}"

    # ------------------------------------------------------------------------------------------------------ the end

    def summary(self, fields: Fields, word: str, wall_s: float) -> None:
        """The event job_finished, and the same for a person. ``word``: how it ended."""
        if self._world:
            self.say(self._world)
        self.event("job_finished", fields)
        text = f"job {self._job} {word} after {wall_s:.1f} s"
        if fields["generations"]:
            text += f": {number_of(fields['generations'], 'generation')}, downtime {fields['downtime_s']:.2f} s"
        if fields["goodput"] is not None:
            text += f", goodput {fields['goodput']:.1%}"
        self.say(text)

    def root_cause(self, cause: RootCause) -> None:
        """The last words on a job that failed."""
        failure = failure_of(cause)
        self.say(f"root cause: {failure.reason}")
        for line in failure.details():
            self.say(f"  {line}")

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _write(self, line: Fields) -> None:
        """A disk that is full must not end a job: what could not be written is written when there is room."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            if not self._is_behind:
                self._is_behind = True
                self.say(f"warning: --events-file: {self._file.name!r}: {error.strerror}: the job goes on without it")


def failure_of(cause: RootCause) -> WorkerFailure:
    """The same, as ``launch()`` tells it."""
    host, slot = cause.worker.seat if cause.worker is not None else (None, None)
    return WorkerFailure(
        cause.reason,
        host,
        slot,
        cause.rank,
        cause.generation,
        cause.exit_code,
        cause.signal,
        cause.error,
        cause.time_ns,
    )


def _size(f: Fields) -> str:
    most = "any number" if f["max_np"] is None else f["max_np"]
    few = f" ({f['min_np']} to {most})" if (f["min_np"], f["max_np"]) != (f["np"], f["np"]) else ""
    return f"{number_of(f['np'], 'worker')}{few}"


def _failure(f: Fields, how: str) -> WorkerFailure:
    reason = f"{_seat(f['worker'])} ended: {how}"
    places = (f["host"], f["slot"], f["rank"], f["generation"])
    return WorkerFailure(reason, *places, f["exit_code"], f["signal"], f["error"], f["time_ns"])


def _driver_restarted(f: Fields) -> str:
    lost = f"; lost: {_few(f['lost'])}" if f["lost"] else ""
    back = _few(f["back"]) or "nobody"
    return f"driver {f['epoch']} has taken over in generation {f['generation']}: in touch with {back}{lost}"


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
