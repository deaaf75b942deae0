#!/usr/bin/env python3
"""Lint and all tests, side by side: ``python tests/run.py``, or ``python tests/run.py unit lint`` for some parts.

The parts:
  jobs  real jobs with real faults, on this machine and on simulated hosts, and the documentation; 4 processes
  unit  unit tests, simulations, and jobs that mostly compute; 2 processes at low priority
  lint  ruff and mypy, at low priority; mypy is less strict where optional packages are missing

The first part writes to the terminal, the others to .NAME.log; these are shown at the end. The last lines name what
failed. The exit status is 0 if all is well, 1 after a failure, and 130 after Ctrl-C, which ends all that was started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
FAILURES = ROOT / ".failures.log"
INTERRUPT_TIMEOUT_S = 60.0  # a test that is interrupted may take so long to end its job; then it is killed

# Jobs wait most of the time, for each other and for faults to be detected: four of them run at a time. Simulations,
# unit tests and lint mostly compute: they run beside the jobs, with what the jobs leave of the processors, and so do
# jobs that mostly compute and have no fault by time. All tests of a file run in one process, as they share jobs, and
# the longest files come first (tests/conftest.py).
COMPUTING = [f"tests/integration/test_{name}.py" for name in ("steady", "huggingface", "lightning", "horovod_examples")]
COMPUTING += ["tests/docs/test_newcomer_errors.py"]
WAITING = [f"tests/{folder}" for folder in ("chaos", "security", "multihost", "integration", "zoo", "docs")]
NICE = ["nice", "-n", "10"]
PYTEST = [str(BIN / "pytest"), "--failures-file", str(FAILURES), "--dist", "loadfile"]
PYTEST += ["--no-loadscope-reorder"]
PYTEST += ["--all-packages"] if sys.version_info >= (3, 11) else []  # Transformers is for 3.11 or later

# What elasticstate imports and need not be installed. To mypy, what comes from a missing package is Any.
OPTIONAL = ("accelerate", "aiohttp", "jinja2", "lightning", "matplotlib", "mpi4py", "prometheus_client", "ray")
MISSING = [name for name in (*OPTIONAL, "transformers") if find_spec(name) is None]
LENIENT = ["--disable-error-code=import-not-found", "--allow-subclassing-any", "--no-warn-return-any"]
LENIENT += ["--allow-untyped-decorators", "--no-warn-unused-ignores"]
PARTS = {
    "jobs": [[*PYTEST, "-n", "4", *WAITING, *(f"--ignore={file}" for file in COMPUTING)]],
    "unit": [[*NICE, *PYTEST, "-n", "2", "tests/simulation", *COMPUTING, "tests/unit"]],
    "lint": [
        [*NICE, str(BIN / "ruff"), "check", "."],
        [*NICE, str(BIN / "ruff"), "format", "--check", "."],
        [*NICE, str(BIN / "mypy"), *(LENIENT if MISSING else ())],
    ],
}


class Run:
    """Parts that run side by side. Each command has a session of its own, so that Ctrl-C reaches this process alone."""

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts
        self._running: set[Process] = set()
        self._interrupts = 0
        self._failures: list[str] = []

    async def all(self) -> int:
        """Run the parts. Return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        began = time.monotonic()
        FAILURES.unlink(missing_ok=True)
        await asyncio.gather(*(self._part(name) for name in self._parts))

        for log in map(log_of, self._parts[1:]):
            sys.stdout.write(log.read_text(errors="replace"))
        if FAILURES.exists():
            sys.stdout.write(FAILURES.read_text())
        for failure in self._failures:
            print(failure)
        if MISSING and "lint" in self._parts:
            print(f"mypy was lenient, because these packages are not installed: {', '.join(MISSING)}")
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = f"{time.monotonic() - began:.0f} s, and {usage.ru_utime + usage.ru_stime:.0f} s of processor time"
        print(f"{'interrupted' if self._interrupts else 'failed' if self._failures else 'passed'} after {seconds}")
        return 130 if self._interrupts else bool(self._failures)

    async def _part(self, name: str) -> None:
        began = time.monotonic()
        status = 0
        if name == self._parts[0]:
            for command in PARTS[name]:
                status |= await self._command(name, command, None)
        else:
            with log_of(name).open("wb") as log:
                for command in PARTS[name]:
                    status |= await self._command(name, command, log)
        print(f"\n{name}: {'failed' if status else 'passed'} after {time.monotonic() - began:.0f} s", flush=True)

    async def _command(self, name: str, command: list[str], output: BinaryIO | None) -> int:
        """Run a command, unless the run was interrupted. Return its exit status, or -N after signal N."""
        if self._interrupts:
            return 1
        # Compiled Python files are kept, because each job starts many processes.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            env=environment,
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT if output else None,
            start_new_session=True,
        )
        self._running.add(process)
        if self._interrupts:  # while it started
            process.send_signal(signal.SIGINT)
        status = await process.wait()
        self._running.discard(process)
        if status:
            program = next(Path(word).name for word in command if word not in NICE)
            self._failures.append(f"FAILED {name}: {program} ended with exit status {status}")
        return status

    def _interrupt(self) -> None:
        """End the commands as Ctrl-C does; kill them at the second signal, or when they have not ended in time."""
        self._interrupts += 1
        print("interrupted: ending the tests" if self._interrupts == 1 else "killing the tests", flush=True)
        for process in self._running:
            with suppress(ProcessLookupError):  # it has just ended
                if self._interrupts == 1:
                    process.send_signal(signal.SIGINT)  # pytest ends its own processes
                else:
                    os.killpg(process.pid, signal.SIGKILL)
        if self._interrupts == 1:
            asyncio.get_running_loop().call_later(INTERRUPT_TIMEOUT_S, self._interrupt)


def log_of(name: str) -> Path:
    """Return the file to which a part writes while another one writes to the terminal."""
    return ROOT / f".{name}.log"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    chosen = list(dict.fromkeys(parser.parse_args().parts)) or list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}. Choose from {', '.join(PARTS)}.")
    return asyncio.run(Run(chosen).all())


if __name__ == "__main__":
    sys.exit(main())
