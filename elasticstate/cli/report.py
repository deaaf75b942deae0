"""``elasticrun report EVENTS...``: one HTML page of one or several jobs, from their event files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from elasticstate.cli.parser import file_parser
from elasticstate.cli.trace import without_events
from elasticstate.core.types import listed
from elasticstate.errors import OptionError
from elasticstate.history.event_files import check_output, read_events, write_output
from elasticstate.terminal import printable

_DESCRIPTION = """\
Make one HTML page from the event files of one or several jobs.

The page has the world size over time, the rate of ticks, goodput and badput by cause, the generations with their
causes, failures by host and by cause with tracebacks, cooldowns of hosts, and the copies of commits: replication and
durable copies. Several jobs are compared side by side. It needs no network and no other file."""

_END = """\
examples:
  elasticrun report events.jsonl -o report.html
  elasticrun report before.jsonl after.jsonl -o comparison.html

Open the file in a browser. The job may still run. The report requires pip install 'elasticstate[report]'."""

_LIBRARIES = ("jinja2", "matplotlib")


def main(argv: Sequence[str]) -> int:
    """Write an HTML page (``elasticrun report``). Raises OptionError."""
    parser = file_parser("report", _DESCRIPTION, _END, "report.html")
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
            raise without_events(path)
        runs += found
    write_output(given.output, given.events, page(runs).encode(errors="replace"))
    text = f"{given.output}: {listed([run.job for run in runs], shown=8)}. Open it in a browser."
    sys.stdout.write(printable(text) + "\n")
    return 0


def _is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ValueError:  # sys.modules says that the library must not be imported
        return False
