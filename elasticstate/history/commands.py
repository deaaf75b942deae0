"""The commands ``elasticrun trace`` and ``elasticrun report``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from elasticstate.core.texts import listed, number_of
from elasticstate.errors import OptionError
from elasticstate.history.event_files import read_events
from elasticstate.history.output import check_output, write_output
from elasticstate.terminal import printable

_TRACE = """\
Make a trace of a job from its event file, for Perfetto and chrome://tracing.

The trace has a process for the job and one for each host. The job's lanes have generations, regroups, downtime,
drains, cooldowns of hosts and stalls, and counters of the world size and the goodput. A host has a lane for each slot:
boot, waiting for a world, each generation with the worker's rank, and how the worker ended."""

_TRACE_END = """\
example:
  elasticrun -np 4 --events-file events.jsonl train.py
  elasticrun trace events.jsonl -o trace.json

Open the file at https://ui.perfetto.dev (it stays in the browser) or in chrome://tracing. The job may still run."""

_REPORT = """\
Make one HTML page from the event files of one or several jobs.

The page has the world size over time, the rate of ticks, goodput and badput by cause, the generations with their
causes, failures by host and by cause with tracebacks, cooldowns of hosts, and the copies of commits: replication and
durable copies. Several jobs are compared side by side. It needs no network and no other file."""

_REPORT_END = """\
examples:
  elasticrun report events.jsonl -o report.html
  elasticrun report before.jsonl after.jsonl -o comparison.html

Open the file in a browser. The job may still run. The report requires pip install 'elasticstate[report]'."""

_LIBRARIES = ("jinja2", "matplotlib")


class _CommandParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise OptionError(f"{self.prog.split()[-1]}: {message}. {self.prog} --help explains the command.")


def trace(argv: Sequence[str]) -> int:
    """Write a trace (``elasticrun trace``). Raises OptionError."""
    parser = _parser("trace", _TRACE, _TRACE_END, "trace.json")
    parser.add_argument("events", metavar="EVENTS", help="Event file that elasticrun --events-file has written.")
    given = parser.parse_args(argv)
    check_output(given.output, [given.events])
    from elasticstate.history.trace import ChromeTrace

    made = ChromeTrace()
    runs = made.add(given.events, read_events(given.events))
    if not runs:
        raise _without_events(given.events)
    write_output(given.output, [given.events], made.data())
    _print(
        f"{given.output}: {number_of(made.spans, 'span')} of {listed([run.job for run in runs], shown=8)}. "
        "Open it at https://ui.perfetto.dev or in chrome://tracing."
    )
    return 0


def report(argv: Sequence[str]) -> int:
    """Write an HTML page (``elasticrun report``). Raises OptionError."""
    parser = _parser("report", _REPORT, _REPORT_END, "report.html")
    parser.add_argument(
        "events", nargs="+", metavar="EVENTS", help="Event files that elasticrun --events-file has written."
    )
    given = parser.parse_args(argv)
    absent = [library for library in _LIBRARIES if not _is_installed(library)]
    if absent:
        raise OptionError(f"report: {listed(absent)} cannot be imported. Run pip install 'elasticstate[report]'.")
    check_output(given.output, given.events)
    from elasticstate.history.job_history import histories
    from elasticstate.history.page import page

    runs = []
    for path in given.events:
        found = histories(path, read_events(path))
        if not found:
            raise _without_events(path)
        runs += found
    write_output(given.output, given.events, page(runs).encode(errors="replace"))
    _print(f"{given.output}: {listed([run.job for run in runs], shown=8)}. Open it in a browser.")
    return 0


def _parser(name: str, description: str, epilog: str, output: str) -> _CommandParser:
    parser = _CommandParser(
        prog=f"elasticrun {name}",
        description=description,
        epilog=epilog,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=118),
        allow_abbrev=False,
    )
    parser.add_argument(
        "-o",
        "--output",
        default=output,
        metavar="FILE",
        help="File to write. It is replaced when the new one is complete (default: %(default)s).",
    )
    return parser


def _is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ValueError:  # sys.modules says that the library must not be imported
        return False


def _without_events(path: str) -> OptionError:
    return OptionError(
        f"{path!r}: has no complete event. Name a file that elasticrun --events-file has written, or wait until the "
        "job has started."
    )


def _print(text: str) -> None:
    sys.stdout.write(printable(text) + "\n")
