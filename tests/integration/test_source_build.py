"""A build of the package on a machine that lacks something: it ends before anything is downloaded or compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("compiler", "environment", "said"),
    [
        ("", {}, "there is no C++ compiler. Install g++ 10 or later"),
        ("", {"CXX": "nothing++ -O2"}, "CXX='nothing++ -O2' names no program. Install g++ 10 or later"),
        ("#!/bin/sh\nexit 1\n", {}, "the compiler 'c++' does not know C++20. Install g++ 10 or later"),
        ("#!/bin/sh\nexit 0\n", {}, "there is no make. Install it"),
    ],
)
def test_what_is_missing_is_named_with_the_package_to_install(
    compiler: str, environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    source, programs = tmp_path / "source", tmp_path / "programs"
    (source / "elasticstate").mkdir(parents=True)
    programs.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    if compiler:
        (programs / "c++").write_text(compiler)
        (programs / "c++").chmod(0o755)
    ended = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "dist_info"],
        cwd=source,
        env={"PATH": str(programs), "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1
    assert last.startswith(f"elasticstate cannot be compiled: {said}")
    assert not list(source.glob("*.dist-info")), os.listdir(source)
