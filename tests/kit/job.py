"""A real job under test: ``elasticrun`` with real agents and workers, its event file, and the workers' own logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from elasticstate.history.event_files import read_events
from elasticstate.history.verify import checks
from tests.kit import forks
from tests.kit.forks import SCRIPTS, Forked
from tests.kit.forks.forked_job import is_as_imported

Line = dict[str, Any]


def check_events(path: Path) -> None:
    """Check the event file of a job that has ended, if it has any, as ``elasticrun verify`` does."""
    if path.exists():
        wrong = [f"{path}:{line}: {text}" for job in checks(read_events(str(path))) for line, text in job.violations]
        assert not wrong, "\n".join(wrong)


class Job:
    """One run of ``elasticrun``. Use it as a context manager: at its end it checks the job's events, and after a failed
    test it kills all processes of the job.

    ``imported``: modules that take seconds, and that the process has imported from which those of the job fork.
    ``diverges``: the commits of its ranks differ. In all other jobs, that is an error.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        command: list[str] | None = None,
        before: list[str] | None = None,
        within: Sequence[str] = (),
        imported: Sequence[str] = (),
        diverges: bool = False,
        **script: object,
    ) -> None:
        self.directory = directory
        self.diverges = diverges
        self.process: Forked | subprocess.Popen[bytes]
        self.logs = directory / "logs"
        self.logs.mkdir()
        self.events_file = directory / "events.jsonl"
        self.output_file = directory / "output.txt"
        self.stop_file = directory / "stop"
        self._files: dict[Path, _Lines] = {}
        command = command or [*(before or []), sys.executable, str(SCRIPTS / "train.py"), *self._arguments(script)]
        arguments = ["--events-file", str(self.events_file), *options, "--", *command]
        self.within = within
        self.imported = imported
        self.arguments = arguments
        self.start(*arguments)

    def start(self, *arguments: str) -> None:
        """Start ``elasticrun``, or start it again after it was killed."""
        environment = forks.environment()
        with open(self.output_file, "ab") as output, open(os.devnull) as nothing:
            template = None if self.within else forks.template(*self.imported)
            if template is not None and is_as_imported(template.environment, environment):
                descriptors = (nothing.fileno(), output.fileno(), output.fileno())
                agents = 4 if {"--host-discovery-script", "-H"} & {*arguments} else 1
                command = ["-m", "elasticstate", *arguments]
                self.process = template.fork(command, environment, descriptors, agents)
            else:
                command = [*self.within, sys.executable, "-m", "elasticstate", *arguments]
                self.process = subprocess.Popen(
                    command, stdin=nothing, stdout=output, stderr=subprocess.STDOUT, env=environment
                )

    def kill_driver(self) -> None:
        """Kill the driver with SIGKILL, and wait until the process is gone."""
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL

    def _arguments(self, script: dict[str, object]) -> list[str]:
        arguments = ["--log", str(self.logs)]
        for name, value in script.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                arguments.append(flag)
            elif isinstance(value, list | tuple):
                arguments += [part for item in value for part in (flag, str(item))]
            else:
                arguments += [flag, str(value)]
        return arguments

    def __enter__(self) -> Job:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                if error is None:  # else the first error is raised
                    raise
            finally:
                self.process.kill()
                self.process.wait()
        if error is None:
            check_events(self.events_file)
            assert self.diverges or not self.events("divergence"), self.events("divergence")

    # -------------------------------------------------------------------------------------------------- observation

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def _lines(self, path: Path) -> list[Line]:
        return self._files.setdefault(path, _Lines(path)).read()

    def events(self, name: str | None = None) -> list[Line]:
        return [e for e in self._lines(self.events_file) if name is None or e["event"] == name]

    def log(self, what: str | None = None) -> list[Line]:
        """Return the log lines of the workers, ordered by time."""
        lines = [line for path in sorted(self.logs.glob("*.jsonl")) for line in self._lines(path)]
        return sorted((line for line in lines if what is None or line["what"] == what), key=lambda line: line["time"])

    def log_of(self, host: str) -> list[Line]:
        """Return the log lines of the workers of one host, ordered by time."""
        lines = [line for path in self.logs.glob(f"{host}-*.jsonl") for line in self._lines(path)]
        return sorted(lines, key=lambda line: line["time"])

    def fired(self) -> int:
        """Return the number of faults that took effect."""
        return len(list(self.logs.glob("fired-*")))

    def pid_of(self, rank: int, generation: int | None = None) -> int:
        """Return the process that has this rank in the given generation, or in the newest that has begun to train."""
        entered = [e for e in self.log("enter") if e["rank"] == rank]
        if generation is not None:
            entered = [e for e in entered if e["generation"] == generation]
        newest = max(entered, key=lambda e: int(e["generation"]))
        return int(newest["pid"])

    def wait_for(self, what: str, condition: Callable[[], Any], timeout: float = 60.0) -> Any:
        """Wait until ``condition()`` is true, and return its value. A time-out error names ``what``."""
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            ended = self.process.poll()
            if time.monotonic() > deadline or (ended is not None and not condition()):
                state = "still runs" if ended is None else f"ended with {ended}"
                raise AssertionError(f"no {what} within {timeout} s; the job {state}:\n{self.output[-6000:]}")
            time.sleep(0.01)
        return found

    def wait_for_while_gone(self, what: str, condition: Callable[[], Any], timeout: float = 60.0) -> None:
        """Wait until ``condition()`` is true, while the driver is dead."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {timeout} s:\n{self.output[-6000:]}"
            time.sleep(0.01)

    def wait_for_event(self, name: str, count: int = 1, timeout: float = 60.0, **fields: object) -> Line:
        def found() -> Line | None:
            matching = [e for e in self.events(name) if all(e.get(k) == v for k, v in fields.items())]
            return matching[count - 1] if len(matching) >= count else None

        event: Line = self.wait_for(f"event {name} #{count} {fields or ''}", found, timeout)
        return event

    def kill(self, *slots: int, number: int = signal.SIGKILL) -> None:
        """Send a signal, SIGKILL by default, to the workers in these slots of localhost."""
        slot_ids = tuple(f"localhost:{slot}:" for slot in slots)
        workers = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # discovery scripts among the children end at any time
                if process.environ().get("ELASTICSTATE_WORKER", "").startswith(slot_ids):
                    workers.append(process)
        assert len(workers) == len(slots)
        for process in workers:
            process.send_signal(number)

    def wait_for_step(self, step: int, timeout: float = 60.0) -> None:
        self.wait_for(f"commit of step {step}", lambda: any(c["step"] >= step for c in self.log("commit")), timeout)

    def finish(self, status: int = 0, timeout: float = 60.0) -> None:
        """Wait for the end of the job, which must have this exit status."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended within {timeout} s:\n{self.output[-6000:]}") from None
        assert self.process.returncode == status, self.output[-6000:]

    # ------------------------------------------------------------------------------------------------------- checks

    def check_survival(self, faults: int | None = None) -> None:
        """Check a job that survived: no committed step lost, members equal at the start of each world and the end."""
        if faults is not None:
            assert self.fired() == faults, f"{self.fired()} of {faults} faults have struck:\n{self.output[-4000:]}"
        self._check_members_equal("enter")
        self._check_no_committed_step_lost()
        finals = self.log("final")
        assert finals, self.output[-6000:]
        assert len({f["digest"] for f in finals}) == 1, finals
        assert len({f["step"] for f in finals}) == 1, finals
        last = max(int(e["generation"]) for e in self.log("enter"))
        assert len(finals) == len({e["rank"] for e in self.log("enter") if e["generation"] == last})

    def _check_members_equal(self, what: str) -> None:
        by_generation: dict[int, set[tuple[str, int]]] = {}
        for line in self.log(what):
            by_generation.setdefault(line["generation"], set()).add((line["digest"], line["step"]))
        unequal = {g: values for g, values in by_generation.items() if len(values) > 1}
        assert not unequal, unequal

    def _check_no_committed_step_lost(self) -> None:
        """Check that a step that all members had committed is never trained again."""
        members: dict[int, int] = {}
        for line in self.log("enter"):
            members[line["generation"]] = max(members.get(line["generation"], 0), line["size"])
        committed: dict[tuple[int, int], int] = {}
        for line in self.log("commit"):
            key = (line["generation"], line["step"])
            committed[key] = committed.get(key, 0) + 1
        entered: dict[int, list[Line]] = {}
        for line in self.log("enter"):
            entered.setdefault(line["generation"], []).append(line)
        safe: dict[int, int] = {}  # generation -> last step that all its members have committed
        for (generation, step), count in committed.items():
            if count >= members[generation]:
                safe[generation] = max(safe.get(generation, 0), step)
        highest = 0
        for generation in sorted(entered):
            again = [e for e in entered[generation] if e["step"] < highest]
            assert not again, f"step {highest} was committed before generation {generation}, and lost: {again}"
            highest = max(highest, safe.get(generation, 0))


class _Lines:
    """The lines of a file that grows. Each line is read and parsed once, as tests ask again every 10 ms."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._lines: list[Line] = []

    def read(self) -> list[Line]:
        if self._path.exists() and self._path.stat().st_size > self._size:
            with open(self._path, "rb") as file:
                file.seek(self._size)
                complete, end, _ = file.read().rpartition(b"\n")
            self._size += len(complete) + len(end)
            whole = (line for line in complete.splitlines() if line.endswith(b"}"))  # a kill may leave half a line
            self._lines += map(json.loads, whole)
        return self._lines


class Hosts:
    """A hosts file with a discovery script that prints it. A test changes the file at any time."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "hosts"
        self.script = directory / "discover.sh"
        self.script.write_text(f"#!/bin/sh\ncat {self._file}\n")
        self.script.chmod(0o755)

    def set(self, *hosts: str) -> Hosts:
        fresh = self._file.with_suffix(".new")
        fresh.write_text("".join(f"{host}\n" for host in hosts))
        fresh.replace(self._file)
        return self

    @property
    def options(self) -> tuple[str, ...]:
        return ("--host-discovery-script", str(self.script), "--discovery-interval", "0.25")
