"""Run a Python command in this process, as the interpreter runs it: ``x.py ARGS`` or ``-m x ARGS``.

The script must not notice the difference. Its tracebacks have no frame of this package. Import this module before all
modules that register exit functions. It imports few others: in a new process the script may replace their names.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import faulthandler
import gc
import importlib.machinery
import io
import itertools
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from elasticstate._native import exit_after_finalization, exit_at_latest
from elasticstate.worker.gloo_rest import rest

# ----------------------------------------------------------------------------------------------------------- interrupts
# SIGINT to a worker that ends already has no effect. Otherwise it would print a traceback, wherever it arrives.


def ignore() -> None:
    """Ignore SIGINT from now on, unless the script handles it. Processes that the script starts get it."""
    if _replace(signal.default_int_handler, _nothing):
        atexit.register(ignore_at_exit)


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore SIGINT, unless the script handles it."""
    is_ours = _replace(signal.default_int_handler, _nothing)
    try:
        yield
    finally:
        if is_ours:
            _replace(_nothing, signal.default_int_handler)


def ignore_at_exit() -> None:
    """Ignore SIGINT for good: the end of the interpreter would give it its usual effect back."""
    for handler in (_nothing, signal.default_int_handler):
        _replace(handler, signal.SIG_IGN)


def _replace(old: object, new: Any) -> bool:
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not old:
        return False
    signal.signal(signal.SIGINT, new)
    return True


def _nothing(signum: int, frame: object) -> None:
    pass


UNBUFFERED = "-u"  # the only option of the interpreter that a forked worker may have
_ARGUMENTS, _ENVIRONMENT = (45, 46), (47, 48)  # of /proc/self/stat, behind the name: start and end (proc_pid_stat(5))
_LONGEST_END_S = 300.0  # from the last exit function to the end of the process
_STACKS_S = 1.0  # to write the stacks of all threads
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
        from elasticstate.compat.libraries import main_module_runner

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
        ignore()
        _exit_code = 0
    except SystemExit as error:
        ignore()
        _exit_code = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
        raise
    except BaseException as error:
        ignore()
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


def hidden_module(directory: str) -> str:
    """Return a module in the script's directory that a new process would import instead of an imported one, or ""."""
    with os.scandir(directory) as entries:
        for entry in entries:
            is_module = entry.name.endswith(".py") or os.path.isfile(os.path.join(entry.path, "__init__.py"))
            imported = sys.modules.get(entry.name.removesuffix(".py")) if is_module else None
            if imported is not None and not (getattr(imported, "__file__", None) or "").startswith(entry.path):
                return entry.path
    return ""


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
    if _exit_code is None:
        return
    with suppress(Exception):
        faulthandler.dump_traceback_later(_LONGEST_END_S, file=2)
        what = f"the script has ended, but its process has not {_LONGEST_END_S:g} s later: see the stacks above."
        line = f"elasticstate: {what} It ends now, with the script's exit code {_exit_code}.\n"
        exit_at_latest(_exit_code, _LONGEST_END_S + _STACKS_S, line)
        if not rest(_STACKS_S):
            _flush_files()
            rest(inf)
    if mapped_libraries() <= _harmless_libraries:
        with suppress(Exception):  # then the interpreter reports it
            sys.stdout.flush()
            sys.stderr.flush()
            exit_after_finalization(_exit_code)
    if "triton" in sys.modules:
        gc.unfreeze()  # what the template process has frozen: one of Triton's exit functions reports it as leaks


def _flush_files() -> None:
    """Write what open files of the script still hold: the process may end without a finalization of its interpreter."""
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for file in [found for found in gc.get_objects() if issubclass(type(found), kinds)]:
        with suppress(Exception):  # closed, or its device is full
            file.flush()


atexit.register(_end)


def exit_for_replacement(reason: str) -> NoReturn:
    """End this process immediately. The agent starts another one in this slot, which resumes from the retained commit.

    A signal is no error of the worker's own for the driver, and no exit code of libraries runs, which may wait.
    """
    from elasticstate.log import logger  # here: logging registers an exit function

    logger.error("this worker is restarted: %s", reason)
    sys.stdout.flush()
    sys.stderr.flush()
    while True:
        os.kill(os.getpid(), signal.SIGKILL)


def show_command(command: Sequence[str]) -> None:
    """Write the command over the arguments of this process, which ps shows; as far as there is space for it."""
    start, end = _memory(_ARGUMENTS)
    _write(start, end, b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1])


def show_variables(variables: Mapping[str, str]) -> None:
    """Write environment variables over the padding variable of this process, for /proc/PID/environ.

    Other programs find workers by these. The rest of that memory stays, as libraries may have pointers to it.
    """
    from elasticstate.net.link import PADDING_VARIABLE

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
