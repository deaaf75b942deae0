"""Run a Python command in a process that was forked, as the interpreter runs it: ``x.py ARGS`` or ``-m x ARGS``.

The script must not notice the difference. Its tracebacks have no frame of this package. Import this module before all
modules that register exit functions.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import importlib.machinery
import itertools
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from elasticstate._native import exit_after_finalization
from elasticstate.compat.standard_library import main_module_runner
from elasticstate.net.fork_link import PADDING_VARIABLE

UNBUFFERED = "-u"  # the only option of the interpreter that a forked worker may have
_ARGUMENTS, _ENVIRONMENT = (45, 46), (47, 48)  # of /proc/self/stat, behind the name: start and end (proc_pid_stat(5))
_is_interrupted = False
_exit_code: int | None = None  # as soon as the script has ended in this process
_harmless_libraries: frozenset[str] = frozenset()


def run(command: Sequence[str]) -> NoReturn:
    """Run the command, then end the process as the interpreter does. ``command``: the interpreter comes first."""
    show_command(command)
    sys.orig_argv = list(command)
    words = list(itertools.dropwhile(UNBUFFERED.__eq__, command[1:]))
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        run_module = main_module_runner()
        _put_first(os.getcwd())
        _call(lambda: run_module(words[1]))
    else:
        sys.argv = words
        _put_first(os.path.dirname(os.path.realpath(words[0])))
        _call(lambda: exec(_compiled(main, os.path.abspath(words[0])), main.__dict__))
    sys.exit(0)


def _put_first(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, directory)


def _compiled(main: ModuleType, path: str) -> CodeType:
    """Return the compiled script, after setting the attributes of its module."""
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _call(script: Callable[[], object]) -> None:
    """Call the script. An exception ends the process as it ends a Python process."""
    global _is_interrupted, _exit_code
    try:
        script()
        _exit_code = 0
    except SystemExit as error:
        _exit_code = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
        raise
    except BaseException as error:
        trace = _without_own_frames(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.excepthook(type(error), error, trace)
        _is_interrupted = isinstance(error, KeyboardInterrupt)
        _exit_code = 1
        sys.exit(1)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    return trace


def skip_exit_functions_of(libraries: Collection[str]) -> None:
    """Let workers end without the exit functions of these shared libraries, after the interpreter's own ones.

    Those of torch only free memory. In a forked process this copies pages first, and takes 0.2 s of CPU time.
    """
    global _harmless_libraries
    _harmless_libraries = frozenset(libraries)


def mapped_libraries() -> set[str]:
    """Return the paths of the shared libraries of this process, other than those of Python's standard library."""
    own = sysconfig.get_config_var("DESTSHARED") or "/"
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6 and "x" in fields[1]}
    return {path for path in paths if os.path.dirname(path) != own}


def _end() -> None:
    """End the process as Python would. Called behind all other exit functions."""
    if _is_interrupted:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    if _exit_code is not None and mapped_libraries() <= _harmless_libraries:
        with suppress(Exception):  # then the interpreter reports it
            sys.stdout.flush()
            sys.stderr.flush()
            exit_after_finalization(_exit_code)


atexit.register(_end)


def show_command(command: Sequence[str]) -> None:
    """Write the command over the arguments of this process, which ps shows; as far as there is space for it."""
    start, end = _memory(_ARGUMENTS)
    _write(start, end, b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1])


def show_variables(variables: Mapping[str, str]) -> None:
    """Write environment variables over the padding variable of this process, for /proc/PID/environ.

    Other programs find workers by these. The rest of that memory stays, as libraries may have pointers to it.
    """
    start, end = _memory(_ENVIRONMENT)
    padding = ctypes.string_at(start, end - start).find(os.fsencode(f"{PADDING_VARIABLE}="))
    if padding < 0:
        return
    free = end - start - padding
    text = b""
    for name, value in variables.items():
        variable = os.fsencode(f"{name}={value}") + b"\0"
        text += variable if len(text) + len(variable) <= free else b""
    _write(start + padding, end, text)


def _memory(fields: tuple[int, int]) -> tuple[int, int]:
    """Return start and end of the memory with the arguments or the environment of this process."""
    stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return int(stat[fields[0]]), int(stat[fields[1]])


def _write(start: int, end: int, text: bytes) -> None:
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))
