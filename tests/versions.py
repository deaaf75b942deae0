#!/usr/bin/env python3
"""Chosen tests with chosen versions of torch and Python: ``python tests/versions.py 2.11+3.10 2.15+3.12``.

Each pair gets a copy of the sources and an environment of its own below build/versions, of up to 8 GB, which are
removed when its tests have ended. torch comes from where pip is configured to look, as a user gets it. A Python is
looked up on PATH, then below ~/.pyenv. The parts:

  unit  the unit tests of state, worker and compat; with --all, all unit tests, with all optional packages
  zoo   tests/zoo: ordinary programs, undisturbed and with faults
  jobs  ten files of tests/integration, with the job of README and the demo

The last lines are the table: passed, failed and skipped tests of each part. The exit status is 0 if all tests passed
that were not skipped, 1 after a failure or with a pair that could not be tried, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "versions"
PAIRS = ("2.15+3.12", "2.11+3.10", "2.14+3.12", "2.13+3.13")
JOBS = ("contexts", "hangs", "joins", "loaders", "plain", "sever", "sharded_faults", "survival", "ticks")
EXAMPLES = "tests/integration/test_examples.py"
PARTS = {
    "unit": ["tests/unit/state", "tests/unit/worker", "tests/unit/compat"],
    "zoo": ["tests/zoo"],
    "jobs": [*(f"tests/integration/test_{name}.py" for name in JOBS), EXAMPLES],
}
ONLY = ["-k", f"not {Path(EXAMPLES).name} or readme or demo"]
INTERRUPT_TIMEOUT_S = 60.0  # a test that is interrupted may take so long to end its job; then it is killed
PART_TIMEOUT_S = 5400.0


class Pair:
    """One version of torch and of Python."""

    def __init__(self, name: str, all_units: bool, keep: bool) -> None:
        self.torch, _, self.python = name.partition("+")
        self.name = name
        self.cells: list[str] = []
        self.failures: list[str] = []
        self._all_units = all_units
        self._keep = keep
        self._place = PLACE / name
        self._sources = self._place / "sources"
        self._bin = self._place / "environment" / "bin"

    def run(self) -> None:
        """Fill the cells. Afterwards nothing of it is left on the disk."""
        try:
            self._install()
            for part in PARTS:
                self.cells.append(self._part(part))
        except (subprocess.SubprocessError, LookupError) as error:
            self.failures.append(str(error))
        finally:
            if not self._keep:
                self._say("removing its environment")
                shutil.rmtree(self._place, ignore_errors=True)

    def _install(self) -> None:
        python = runpy.run_path(str(ROOT / "deploy" / "wheels" / "build.py"))["find_python"](self.python)
        if python is None:
            raise LookupError(f"no Python {self.python} was found")
        self._say(f"copying the sources, and installing torch {self.torch} for {python}")
        names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, stdout=-1, check=True)
        for name in filter(None, names.stdout.decode().split("\0")):
            if (ROOT / name).is_file():  # and was not deleted
                (self._sources / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self._sources / name)
        pins = (ROOT / "constraints.txt").read_text()
        constraints = self._place / "constraints.txt"
        pins = re.sub(r"(?m)^setuptools==.*$", "", pins)  # torch 2.11 and 2.12 want an older one
        constraints.write_text(re.sub(r"(?m)^torch==.*$", f"torch=={self.torch}.*", pins))
        pip = [self._bin / "pip", "install", "--no-cache-dir", "--quiet", "--constraint", constraints]
        if not (self._place / "complete").exists():
            self._command([python, "-m", "venv", "--clear", self._bin.parent])
            self._command([*pip, "torch"])
            self._command([*pip, "torch", "setuptools>=70.1", "cmake", "nanobind"])  # a setuptools that torch permits
        self._say("installing the package, and what its tests need")
        extras = "dev-all,mpi" if self._all_units else "dev,mpi"
        self._command([*pip, "--no-build-isolation", "--editable", f".[{extras}]", "torchdata"])
        print_versions = "import sys, torch; print('torch', torch.__version__, 'and Python', sys.version.split()[0])"
        self._command([self._bin / "python", "-c", print_versions])
        (self._place / "complete").touch()

    def _part(self, part: str) -> str:
        report, failed = self._place / f"{part}.xml", self._place / f"{part}.failures"
        self._say(f"{part} tests")
        failed.unlink(missing_ok=True)
        report.unlink(missing_ok=True)
        began = time.monotonic()
        chosen = ["tests/unit"] if part == "unit" and self._all_units else PARTS[part]
        pytest = [self._bin / "python", "-m", "pytest", "-q", "-rs", f"--junitxml={report}"]
        try:
            self._command([*pytest, "--failures-file", failed, *chosen, *(ONLY if part == "jobs" else [])])
        except subprocess.SubprocessError as error:
            self.failures += failed.read_text().splitlines() if failed.exists() else []
            if not failed.exists() or not report.exists():
                self.failures.append(f"{part}: {error}")
        if not report.exists():
            return "did not end"
        (suite,) = ElementTree.parse(report).getroot()
        total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
        bad = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
        counts = {"passed": total - skipped - bad, "failed": bad, "skipped": skipped}
        cell = ", ".join(f"{count} {word}" for word, count in counts.items() if count or word == "passed")
        self._say(f"{part}: {cell}, after {time.monotonic() - began:.0f} s")
        return cell

    def _command(self, command: list[str | Path]) -> None:
        """Run a command. Raises SubprocessError if it fails, or takes too long."""
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment["PATH"] = f"{self._bin}{os.pathsep}{environment.get('PATH', '')}"
        # With a session of its own, Ctrl-C reaches this process alone, which then interrupts the command once.
        process = subprocess.Popen(
            command, cwd=self._sources, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            if status := process.wait(PART_TIMEOUT_S):
                raise subprocess.CalledProcessError(status, [Path(part).name for part in command[:4]])
        finally:
            if process.poll() is None:
                end(process)

    def _say(self, text: str) -> None:
        print(f"\n=== {self.name}: {text}", flush=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a command; kill it at a second interrupt, or if it has not ended in time."""
    process.send_signal(signal.SIGINT)  # pytest ends its own processes
    try:
        process.wait(INTERRUPT_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def pair(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?\+3\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of versions such as 2.15+3.12 (torch+Python)")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", type=pair, metavar="TORCH+PYTHON", help=f"default: {' '.join(PAIRS)}")
    parser.add_argument("--all", action="store_true", help="all unit tests, with all optional packages")
    parser.add_argument("--keep", action="store_true", help="keep the environments, and use those that were kept")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    pairs = [Pair(name, arguments.all, arguments.keep) for name in arguments.pairs or PAIRS]
    interrupted = False
    try:
        for each in pairs:
            each.run()
    except KeyboardInterrupt:
        interrupted = True
    failures = [f"{each.name}: {failure}" for each in pairs for failure in each.failures]
    print("\n| torch | Python |", *(f"{part} |" for part in PARTS))
    print("|---|---|", *("---|" for _ in PARTS), sep="")
    for each in pairs:
        cells = each.cells + ["not run"] * (len(PARTS) - len(each.cells))
        print(f"| {each.torch} | {each.python} |", *(f"{cell} |" for cell in cells))
    print(*failures, "interrupted" if interrupted else "failed" if failures else "passed", sep="\n")
    return 130 if interrupted else bool(failures)


if __name__ == "__main__":
    sys.exit(main())
