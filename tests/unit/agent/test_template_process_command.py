"""Which commands fork from the template process, and which ones a new process runs as a fork does."""

from __future__ import annotations

import os
import py_compile
import sys
import zipapp
from pathlib import Path

import pytest

from elasticstate.agent.template_process import for_new_process, reason_against_template
from elasticstate.worker import new_process

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
        ([sys.executable, "-u", "train.py"], "the argument '-u'"),
        ([sys.executable, "missing.py"], "missing.py is not a file"),
        ([sys.executable, "venv"], "venv is not a file"),
        ([sys.executable, "train.pyz"], "train.pyz is no source file"),
        ([sys.executable, "__pycache__/train.pyc"], "train.pyc is no source file"),
    ],
)
def test_reasons_against_the_template(project: Path, command: list[str], reason: str) -> None:
    zipapp.create_archive(
        project, project.parent / "train.pyz", main="train:main", filter=lambda p: p.name == "train.py"
    )
    (project.parent / "train.pyz").rename(project / "train.pyz")
    py_compile.compile(str(project / "train.py"), str(project / "__pycache__" / "train.pyc"))
    assert reason in reason_against_template(command, str(project), PATH)
    assert for_new_process(command, str(project), PATH) == command


def test_a_new_process_runs_the_command_behind_the_interpreter_and_its_option(project: Path) -> None:
    own, unbuffered = new_process.__file__, PATH | {"PYTHONUNBUFFERED": "1"}
    (project / "early.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n")
    for command, expected in (
        ([NAME, "train.py", "-u"], [NAME, own, "train.py", "-u"]),
        ([NAME, "-u", "-u", "train.py"], [NAME, "-u", "-u", own, "train.py"]),
        ([NAME, "-m", "train", "x"], [NAME, own, "-m", "train", "x"]),
        ([NAME, "early.py"], [NAME, own, "early.py"]),
        (["bash", "train.py"], ["bash", "train.py"]),
    ):
        assert for_new_process(command, str(project), unbuffered) == expected


def test_another_python_of_the_same_name(project: Path) -> None:
    other = project / NAME
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    assert "another Python" in reason_against_template([f"./{NAME}", "train.py"], str(project), PATH)
