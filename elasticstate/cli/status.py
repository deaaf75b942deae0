"""``elasticrun status``: the status of a job, once or again and again, or of one agent (``--agent``)."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from elasticstate.cli.parser import CommandParser
from elasticstate.driver.record import Record, find_job
from elasticstate.errors import OptionError
from elasticstate.net.control import ask_status
from elasticstate.options import CONNECT_TIMEOUT_S, has_cursor_control
from elasticstate.options.kinds import at_least_s
from elasticstate.options.reading import value_of
from elasticstate.terminal import complain, printable

if TYPE_CHECKING:
    from rich.live import Live

_INTERVAL_S = 1.0
_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Print the status of a job or of an agent. Return the exit status. Raises OptionError."""
    return _agent_status(argv) if "--agent" in argv else _job_status(argv)


def _job_status(argv: Sequence[str]) -> int:
    """Print the status of a job. Exit status 1: there is no such job, or its driver does not answer."""
    parser = CommandParser(
        prog="elasticrun status",
        usage="elasticrun status JOB [--json] [--watch [S]]\n       elasticrun status JOB --token\n"
        "       elasticrun status --agent PATH [--ready]",
        description="Print the world of a running job of this user on this machine, its figures, the missing workers, "
        "and what the job waits for.",
        epilog="Exit status: 0 printed, with --watch: the job has ended; 1 no such job, or no answer; 130 Ctrl-C.",
    )
    add = parser.add_argument
    add("job", nargs="*", metavar="JOB", help="Name of the job (elasticrun --job-name; its first line shows it, too).")
    add("--json", action="store_true", help="Print the numbers as one JSON object in one line, for programs.")
    add(
        "--watch",
        nargs="?",
        const=f"{_INTERVAL_S:g}",
        metavar="S",
        help="Print the status every S seconds until the job ends (default: 1), on a terminal in the same place. While "
        "the driver does not answer, the command waits for it or for the next driver of the job.",
    )
    add("--token", action="store_true", help="Print the job's token, which the --dashboard asks for before it acts.")
    add("--agent", metavar="PATH", help="Ask the agent of this machine that has this --status-socket instead.")
    given = parser.parse_args(argv)
    if len(given.job) != 1 or not given.job[0]:
        raise OptionError(
            f"status: {' '.join(argv)!r}: must be the name of one job. Use elasticrun status JOB [--json] [--watch [S]]"
            "."
        )
    job: str = given.job[0]
    interval_s = None if given.watch is None else value_of("--watch", given.watch, at_least_s(0.1))
    record = find_job(job)
    if record is None:
        complain("elasticrun", f"no job {job!r} of this user runs on this machine")
        return 1
    if given.token:
        sys.stdout.write(f"{record.token}\n")
        return 0
    if interval_s is not None:
        return _Watch(job, given.json, interval_s).run(record)
    try:
        sys.stdout.write(_ask(record, given.json))
    except ConnectionError as error:
        complain("elasticrun", _no_answer(job, error))
        return 1
    return 0


def _ask(record: Record, as_json: bool) -> str:
    """Return the status for a terminal. Raises ConnectionError."""
    return printable(asyncio.run(ask_status(record.address, record.token, CONNECT_TIMEOUT_S, as_json)))


def _no_answer(job: str, error: ConnectionError) -> str:
    return f"the driver of job {job!r} does not answer: {error}"


class _Watch:
    """Repeated status of a job, until the job ends. A driver that does not answer may be replaced by another one."""

    def __init__(self, job: str, as_json: bool, interval_s: float) -> None:
        self._job = job
        self._as_json = as_json
        self._interval_s = interval_s
        self._has_printed = False
        self._live: Live | None = None

    def run(self, record: Record) -> int:
        """Print until the job ends. Return the exit status."""
        try:
            with self._display():
                now: Record | None = record
                while now is not None and now.job_id == record.job_id:
                    self._print_status(now)
                    time.sleep(self._interval_s)
                    now = find_job(self._job)
        except KeyboardInterrupt:
            return _INTERRUPTED
        except BrokenPipeError:  # as in ``| head``
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what remains in the buffer
            return 0
        if not self._as_json:
            print(f"job {self._job} has ended")
        return 0

    def _display(self) -> AbstractContextManager[object]:
        """Return the context of the output. On a terminal each status replaces the last one."""
        if self._as_json or not sys.stdout.isatty() or not has_cursor_control():
            return nullcontext()
        from rich.live import Live

        self._live = Live(auto_refresh=False, vertical_overflow="ellipsis")
        return self._live

    def _print_status(self, record: Record) -> None:
        try:
            text = _ask(record, self._as_json)
        except ConnectionError as error:
            text = "" if self._as_json else f"{_no_answer(self._job, error)}\n"
            if self._as_json:
                complain("elasticrun", _no_answer(self._job, error))
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(text.rstrip("\n"), overflow="fold"), refresh=True)
        elif text:
            separator = "\n" if self._has_printed and not self._as_json else ""
            sys.stdout.write(separator + text)
            sys.stdout.flush()
            self._has_printed = True


def _agent_status(argv: Sequence[str]) -> int:
    """Print the status of an agent of this machine. Exit status 1: it does not answer; with --ready also: no driver."""
    parser = CommandParser(prog="elasticrun status")
    parser.add_argument("--agent", required=True, metavar="PATH", help="The agent's --status-socket.")
    parser.add_argument("--ready", action="store_true", help="Exit status 1 also if the agent serves no driver.")
    given = parser.parse_args(argv)
    from elasticstate.net.link import ask_agent

    try:
        status = ask_agent(given.agent, CONNECT_TIMEOUT_S)
    except TimeoutError:
        complain("elasticrun", f"the agent at {given.agent} does not answer within {CONNECT_TIMEOUT_S:g} s")
        return 1
    except OSError as error:
        complain("elasticrun", f"no agent answers at {given.agent}: {error.strerror}")
        return 1
    print(printable(status.text))
    return 1 if given.ready and not status.is_ready else 0
