"""Installs a wheel from its file into a new environment without a compiler, and runs the README's job with a kill.

Run by ``make wheels`` for each wheel: ``python deploy/wheels/try_wheel.py dist/NAME.whl``. It needs the Python
that the wheel is for. Prints how long the steps took; fails if the job does not survive, or if a worker does not join.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from build import ROOT, find_python

LIMIT_S = 300.0
COMPILER = re.compile(r"(^|-)(cc|c\+\+|gcc|g\+\+|clang|clang\+\+)(-\d+)?$")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path, help="a wheel, or a directory with the one for --python")
    parser.add_argument("--python", help="version of Python (default: the one in the wheel's name)")
    parser.add_argument("--torch", default="torch", help="what pip takes as torch, e.g. torch==2.13.0")
    arguments = parser.parse_args()
    wheel, version = arguments.wheel.resolve(), arguments.python or version_of(arguments.wheel)
    if wheel.is_dir():
        fitting = [w for w in sorted(wheel.glob("*.whl")) if version_of(w) == version or "-abi3-" in w.name]
        if not fitting:
            print(f"{wheel} has no wheel for Python {version!r}", file=sys.stderr)
            return 2
        wheel = fitting[0]  # the one of just this version comes before the one for several
    python = find_python(version)
    if python is None:
        print(f"no Python {version!r} was found", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        return try_it(wheel, python, arguments.torch, Path(directory))


def version_of(wheel: Path) -> str:
    """Return the version of Python in a wheel's name, such as 3.11."""
    tag = re.search(r"-cp3(\d+)-", wheel.name)
    return f"3.{tag[1]}" if tag else ""


def try_it(wheel: Path, python: str, torch: str, directory: Path) -> int:
    began = time.monotonic()
    subprocess.run([python, "-m", "venv", directory / "venv"], check=True)
    bin_directory = directory / "venv" / "bin"
    environment = {**os.environ, "PATH": f"{bin_directory}{os.pathsep}{without_compilers(directory)}"}
    environment.pop("PYTHONPATH", None)
    pip = [bin_directory / "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, torch], check=True, env=environment)
    has_torch = time.monotonic()
    print(f"{torch}: {has_torch - began:.0f} s", flush=True)
    subprocess.run([*pip, wheel], check=True, env=environment)
    installed = time.monotonic()
    script, losses = directory / "gpt.py", directory / "losses"
    shutil.copy(ROOT / "examples" / "gpt.py", script)
    command = ["elasticrun", "-np", "4", "--min-np", "2", "python", script, "--losses", losses]
    job = subprocess.Popen(
        [*command, "--steps", "300", "--pace", "0.2"],
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = follow(job, script, losses)
    finally:
        job.terminate()
        job.communicate(timeout=60)
    joined = time.monotonic()
    print("".join(said), end="")
    print(f"{wheel.name}: installed after {installed - has_torch:.0f} s beyond torch, and from there ", end="")
    print(f"{joined - installed:.0f} s to a kill and a join: {joined - has_torch:.0f} s together")
    return 0


def without_compilers(directory: Path) -> Path:
    """Make a directory with all programs of PATH but compilers, and return it."""
    programs = directory / "programs"
    programs.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).glob("*") if os.path.isdir(place) else ():
            if not COMPILER.search(program.name):
                link = programs / program.name
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    assert not any((programs / compiler).exists() for compiler in ("cc", "c++", "gcc", "g++"))
    return programs


def follow(job: subprocess.Popen[str], script: Path, losses: Path) -> list[str]:
    """Kill a worker when the first world trains, read until another one has joined, and return the lines."""
    said: list[str] = []
    watchdog = threading.Timer(LIMIT_S, job.kill)
    watchdog.daemon = True
    watchdog.start()
    assert job.stdout is not None
    for line in job.stdout:
        said.append(line)
        if "generation 1: 4 workers" in line:
            while not losses.exists() or not losses.read_text():
                assert job.poll() is None, said
                time.sleep(0.05)
            newest = subprocess.run(
                ["pgrep", "-n", "-f", f"^python {script}"], capture_output=True, text=True, check=True
            )
            os.kill(int(newest.stdout), signal.SIGKILL)
        if "generation 3: 4 workers" in line and "joined" in line:
            assert any("generation 2: 3 workers" in earlier and "SIGKILL" in earlier for earlier in said), said
            watchdog.cancel()
            return said
    watchdog.cancel()
    raise AssertionError(f"no worker was killed and replaced within {LIMIT_S:g} s: {said}")


if __name__ == "__main__":
    sys.exit(main())
