"""Which commands fork from the template process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elasticstate.agent.python_command import reason_against_template

PATH = {"PATH": os.path.dirname(sys.executable) + os.pathsep + "/usr/bin"}
NAME = os.path.basename(sys.executable)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a directory with a script; its virtual environment is this one."""
    (tmp_path / "train.py").write_text("print('training')\n")
    (tmp_path / "venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.mark.parametrize("python", [sys.executable, NAME, f"venv/bin/{NAME}", f"./venv/bin/{NAME}"])
def test_this_python_however_it_is_written(project: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path counts from the directory of the job, which is not that of the agent."""
    monkeypatch.chdir("/")
    assert reason_against_template([python, "train.py"], str(project), PATH) == ""


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["venv/nothing", "train.py"], "venv/nothing is another Python"),
        (["nothing", "train.py"], "nothing is another Python"),
        ([sys.executable], "no script"),
        ([sys.executable, "-O", "train.py"], "the argument '-O'"),
        ([sys.executable, "missing.py"], "missing.py is not a file"),
    ],
)
def test_reasons_against_the_template(project: Path, command: list[str], reason: str) -> None:
    assert reason in reason_against_template(command, str(project), PATH)


def test_another_python_of_the_same_name(project: Path) -> None:
    other = project / NAME
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    assert "another Python" in reason_against_template([f"./{NAME}", "train.py"], str(project), PATH)
