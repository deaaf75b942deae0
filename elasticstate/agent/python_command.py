"""The workers' command, as far as worker/script.py needs to understand it.

worker/script.py runs the command in children of the template process, and in new processes.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import Path

UNBUFFERED = "-u"
_IN_NEW_PROCESS = str(Path(__file__).parents[1] / "worker" / "new_process.py")

# Variables that torch and the libraries below it read when they are imported.
_READ_AT_IMPORT = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|GOTO|NUMEXPR|VECLIB|ATEN|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|TRITON|LD|PYTHON)_[A-Z0-9_]+"
    r"|TORCHDYNAMO_[A-Z_]+|PYTHON[A-Z]+"
)
_READ_LATER = re.compile(r"TORCH_(NCCL|GLOO|FR)_[A-Z0-9_]+|TORCHELASTIC_[A-Z0-9_]+|PYTORCH_NVML_BASED_CUDA_CHECK")


def is_python(command: Sequence[str]) -> bool:
    """Return True if the command names a Python interpreter, or is a Python script."""
    return bool(re.fullmatch(r"python[0-9.]*", os.path.basename(command[0])))


def reason_against_template(command: Sequence[str], directory: str, environment: Mapping[str, str]) -> str:
    """Return why workers with this command cannot fork from the template process, or ""."""
    if reason := _reason_in_command(command, directory, environment):
        return reason
    words = _words(command)
    return "" if words[0] == "-m" else _reason_in_script(Path(directory, words[0]))


def for_new_process(command: Sequence[str], directory: str, environment: Mapping[str, str]) -> Sequence[str]:
    """Return the command that does the same in a new process, and ends as a forked worker does, if that is possible."""
    if not is_python(command) or _reason_in_command(command, directory, environment):
        return command
    words = _words(command)
    return [*command[: len(command) - len(words)], _IN_NEW_PROCESS, *words]


def _words(command: Sequence[str]) -> list[str]:
    """Return what follows the interpreter and its option."""
    return list(dropwhile(UNBUFFERED.__eq__, command[1:]))


def _reason_in_command(command: Sequence[str], directory: str, environment: Mapping[str, str]) -> str:
    """Return why worker/script.py cannot run this command, or ""."""
    # A path counts from the directory of the job, in which the worker starts, not from that of the agent.
    is_path = os.path.dirname(command[0]) != ""
    program = command[0] if is_path else shutil.which(command[0], path=environment.get("PATH"))
    if program is None or not _is_this_python(os.path.join(directory, program)):
        return f"{command[0]} is another Python than {sys.executable}, which runs the agent"
    words = _words(command) if environment.get("PYTHONUNBUFFERED") else list(command[1:])
    if words[:1] == ["-m"] and len(words) > 1:
        return ""
    if not words or words[0].startswith("-"):
        return f"the interpreter has the argument {words[0]!r}" if words else "the interpreter has no script"
    try:
        is_source = b"\0" not in Path(directory, words[0]).read_bytes()
    except OSError:
        return f"{words[0]} is not a file"
    return "" if is_source else f"{words[0]} is no source file"


def _is_this_python(program: str) -> bool:
    """Return True for this process's interpreter: the same program in the same virtual environment."""
    same_directory = os.path.realpath(os.path.dirname(program)) == os.path.realpath(os.path.dirname(sys.executable))
    return same_directory and os.path.realpath(program) == os.path.realpath(sys.executable)


def _reason_in_script(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""  # the worker shows the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if _READ_AT_IMPORT.fullmatch(name) and not _READ_LATER.fullmatch(name):
                return f"{path.name} mentions {name}, which takes effect only if it is set before imports"
    return ""


def script_directory(command: Sequence[str], directory: str) -> str:
    """Return the directory that the interpreter puts first in ``sys.path`` for the command."""
    words = _words(command)
    return directory if words[0] == "-m" else os.path.dirname(os.path.realpath(os.path.join(directory, words[0])))
