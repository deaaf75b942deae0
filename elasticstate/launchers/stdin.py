"""Stdin of elasticrun, which one worker gets: with ``--debug-rank`` the worker of this rank, else a single worker.

The worker reads the terminal itself. It may, although elasticrun is in the foreground: a process of another session has
no job control at this terminal, so it is never stopped by SIGTTIN (n_tty.c of Linux, ``job_control()``). So it must not
get the terminal while a shell reads that.
"""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from elasticstate.errors import OptionError
from elasticstate.net.names import is_this_machine
from elasticstate.options import Options
from elasticstate.options.kinds import parse_host

_REMEDY = "Run elasticrun in the foreground of a terminal, or call debugpy.listen() in the script and attach an editor."


def with_debugger(options: Options) -> Options:
    """Return the options of a job in which a worker may be debugged; unchanged if none gets stdin. Raises OptionError.

    Raises OptionError if ``--debug-rank`` is given, and stdin has nothing to read.
    """
    is_asked_for = options.debug_rank is not None
    if options.call_directory is not None or not (is_asked_for or _has_one_worker_here(options)):
        return options
    if reason := _why_unusable():
        if is_asked_for:
            raise OptionError(f"--debug-rank: {options.debug_rank}: {reason}. {_REMEDY}")
        return options
    if is_asked_for or os.isatty(0):
        options = options.for_debugger(is_asked_for)
    return options if is_asked_for else replace(options, debug_rank=0)


@contextmanager
def stdin_for(options: Options) -> Iterator[int | None]:
    """Yield a descriptor of stdin for a worker; None if no worker gets it. At the end, set the terminal as it was.

    A debugger that is killed leaves a terminal without echo, or without lines.
    """
    if options.debug_rank is None or _why_unusable():  # the latter: of a new driver
        yield None
        return
    stdin, modes = os.dup(0), termios.tcgetattr(0) if os.isatty(0) else None
    try:
        yield stdin
    finally:
        os.close(stdin)
        if modes is not None and _is_in_foreground():
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(0, termios.TCSANOW, modes)  # does not wait for a terminal that is not read


def _has_one_worker_here(options: Options) -> bool:
    is_listed = not (options.hostfile or options.host_discovery_script or options.listen)
    is_local = options.discovery in (None, "list") and options.launcher in (None, "local")
    hosts = (parse_host(text, 1).name for text in options.hosts)
    return options.has_one_worker and is_listed and is_local and all(map(is_this_machine, hosts))


def _why_unusable() -> str:
    """Return why no worker can read stdin, as a clause; "" if one can."""
    if sys.stdin is None:
        return "stdin is closed"
    if os.path.samestat(os.fstat(0), os.stat(os.devnull)):
        return "stdin is /dev/null"
    return "" if not os.isatty(0) or _is_in_foreground() else "elasticrun is in the background of its terminal"


def _is_in_foreground() -> bool:
    """Return False while the terminal belongs to another process group, such as that of the shell."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # the terminal of another session, which has no job control for this process
        return True
