"""Report of a job: log lines for people, the event file for programs, and the summary at the end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from elasticstate.config import Options
from elasticstate.core.losses import NAMES, Losses
from elasticstate.core.types import RootCause, WorkerId
from elasticstate.errors import OptionError
from elasticstate.exit_status import status_of
from elasticstate.failures import WorkerFailure
from elasticstate.terminal import message
from elasticstate.writing import Writer

Fields = dict[str, Any]

_MOST_FAILURES = 1000  # limit of the failures that are kept
_MOST_EVENTS_BYTES = 16 << 20  # limit of the events that are kept while the event file cannot be written


def number_of(count: int, what: str) -> str:
    """Return ``1 worker``, ``3 workers``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _slot_name(worker: str) -> str:
    return worker.partition("#")[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of the job."""

    status: int
    word: str  # succeeded, failed, or what stopped the job
    root_cause: RootCause | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a job, as far as its driver has seen it."""

    generations: int
    losses: Losses
    goodput: float | None  # None: no tick was completed


class Report:
    """Writer of log lines and events. Call ``event`` for each event, then ``summary`` once.

    Raises OptionError if the event file cannot be opened.
    """

    def __init__(self, job: str, events_file: str | None, verbose: bool) -> None:
        self._job = job
        self._verbose = verbose
        self._ends: dict[str, str] = {}  # how workers ended, since the last world
        self._sent_away: set[str] = set()
        self._warned: set[str] = set()  # warnings of agents that were logged
        self.failures: list[WorkerFailure] = []  # the first failures of workers
        self._world = ""  # log line of a world in which training has not resumed yet
        self._reason = ""
        self._terminal = Writer(2)
        self._events: Writer | None = None
        self.writers = {"stderr": [self._terminal]}
        if events_file:
            self._events = _open_events(events_file)
            self.writers[f"--events-file {events_file}"] = [self._events]
        self._lines: dict[str, Callable[[Fields], str]] = {
            "job_started": lambda f: f"job {self._job}: {_size(f)}",
            "host_added": lambda f: f"host {f['host']}: {number_of(f['slots'], 'slot')}",
            "host_removed": lambda f: f"host {f['host']} was taken away",
            "host_draining": lambda f: f"host {f['host']} is to be left: {f['reason']}",
            "host_cooldown": lambda f: f"host {f['host']} is left alone for {f['seconds']:.1f} s: {f['reason']}",
            "agent_lost": lambda f: f"lost host {f['host']}: its agent {f['reason']}",
            "worker_exited": self._worker_exited,
            "worker_unresponsive": lambda f: f"{_slot_name(f['worker'])} does not respond: {f['reason']}",
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
        """Log a warning of an agent. The same warning on a thousand hosts is logged once."""
        if text not in self._warned:
            self._warned.add(text)
            text = f"host {host}: {text} (if it is the same on other hosts, that is not said again)"
            self.event("warning", {"generation": generation, "text": text})

    def event(self, name: str, fields: Fields, at: float | None = None) -> None:
        """Write an event to the event file, and a log line if the event has one.

        ``at``: time of the event on the monotonic clock; None: now.
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
        """Log why the core acts or waits: only with ``--verbose``, and only when the reason changes."""
        if self._verbose and reason and reason != self._reason:
            self._reason = reason
            self.say(f"because {reason}")

    def sent_away(self, worker: WorkerId) -> None:
        """Expect the end of a worker that was asked to leave: however it ends, its end is no failure."""
        self._sent_away.add(str(worker))

    def say(self, text: str) -> None:
        """Write a log line, now or as soon as the terminal takes it."""
        self._terminal.put(message("elasticrun", text).encode(errors="replace"))

    def _worker_exited(self, f: Fields) -> str:
        how = self._ends[f["worker"]] = status_of(f["exit_code"], f["signal"])
        expected = f["exit_code"] == 0 or f["worker"] in self._sent_away
        self._sent_away.discard(f["worker"])
        if not expected and len(self.failures) < _MOST_FAILURES:
            self.failures.append(_failure(f, how))
        if expected and not self._verbose:
            return ""
        rank = f" (rank {f['rank']})" if f["rank"] is not None else ""
        return f"{_slot_name(f['worker'])}{rank} ended: {how}"

    def _world_formed(self, f: Fields) -> str:
        unsaid, self._world = self._world, ""
        first = f["generation"] <= 1
        text = f"generation {f['generation']}: {number_of(f['size'], 'worker')} on {number_of(f['hosts'], 'host')}"
        if not first:
            lost = [f"{_slot_name(w)} ({self._ends[w]})" for w in f["left"] if w in self._ends]
            left = [_slot_name(w) for w in f["left"] if w not in self._ends]
            changes = (("lost", lost), ("without", left), ("with", [_slot_name(w) for w in f["joined"]]))
            text += "".join(f"; {what} {few(who)}" for what, who in changes if who)
        self._ends.clear()
        if first:
            return text
        self._world = text
        return unsaid

    def _training_resumed(self, f: Fields) -> str:
        text, self._world = self._world or f"generation {f['generation']}", ""
        return f"{text}; back in {_losses(f)}"

    # ------------------------------------------------------------------------------------------------------ the end

    def summary(self, totals: Totals, outcome: Outcome, wall_s: float, driver: int = 1) -> None:
        """Write the event job_finished, and the summary to the log.

        ``driver``: number of this driver. The totals cover only the time of this driver.
        """
        if self._world:
            self.say(self._world)
        generations, goodput = totals.generations, totals.goodput
        fields: Fields = {
            "generation": generations,
            "status": "failed" if outcome.status else "succeeded",
            "generations": generations,
            "driver": driver,
            **totals.losses.fields(),
            "goodput": None if goodput is None else round(goodput, 4),
        }
        self.event("job_finished", fields)
        text = f"job {self._job} {outcome.word} after {wall_s:.1f} s"
        if generations:
            text += f" of driver {driver}, which has seen" if driver > 1 else ""
            text += f": {number_of(generations, 'generation')}, downtime {_losses(fields)}"
        if goodput is not None:
            text += f", goodput {goodput:.1%}"
        self.say(text)

    def root_cause(self, cause: RootCause) -> None:
        """Log the root cause of a job that failed."""
        failure = failure_of(cause)
        self.say(f"root cause: {failure.reason}")
        for line in failure.details():
            self.say(f"  {line}")

    async def close(self, timeout_s: float) -> None:
        """Wait until all is written; at most ``timeout_s`` for each output that is blocked."""
        for writers in self.writers.values():
            for writer in writers:
                writer.close()
                await writer.flushed(timeout_s)

    def _write(self, line: Fields) -> None:
        if self._events is not None:
            self._events.put(json.dumps(line, default=str).encode() + b"\n")


def _open_events(path: str) -> Writer:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OptionError(f"--events-file: {path!r}: takes a path to write to ({error.strerror})") from None
    return Writer(lambda: fd, _MOST_EVENTS_BYTES)


def failure_of(cause: RootCause) -> WorkerFailure:
    """Convert a root cause to the failure that ``launch()`` reports."""
    host, slot = cause.worker.slot_id if cause.worker is not None else (None, None)
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


def _losses(f: Fields) -> str:
    """Return ``0.09 s, 0 commits lost, 2 ticks redone``. A lower bound begins with ``at least``."""
    seconds, commits, ticks = (f"{'at least ' if name in f['lower_bounds'] else ''}" for name in NAMES)
    seconds += "unknown (no ticks)" if f["downtime_s"] is None else f"{f['downtime_s']:.2f} s"
    commits += f"{number_of(f['commits_lost'], 'commit')} lost"
    ticks += f"{number_of(f['ticks_lost'], 'tick')} redone"
    is_redone = f["ticks_lost"] or "ticks_lost" in f["lower_bounds"]
    return ", ".join([seconds, commits, *([ticks] if is_redone else [])])


def _failure(f: Fields, how: str) -> WorkerFailure:
    reason = f"{_slot_name(f['worker'])} ended: {how}"
    places = (f["host"], f["slot"], f["rank"], f["generation"])
    return WorkerFailure(reason, *places, f["exit_code"], f["signal"], f["error"], f["time_ns"])


def _driver_restarted(f: Fields) -> str:
    lost = f"; lost: {few(f['lost'])}" if f["lost"] else ""
    back = few(f["back"]) or "nobody"
    return f"driver {f['epoch']} has taken over in generation {f['generation']}: in touch with {back}{lost}"


def few(names: Iterable[str]) -> str:
    """Return the first eight names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
