"""``elasticrun trace EVENTS``: a trace of a job from its event file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elasticstate.cli.parser import file_parser
from elasticstate.core.types import listed, number_of
from elasticstate.errors import OptionError
from elasticstate.history.event_files import check_output, read_events, write_output
from elasticstate.terminal import printable

_DESCRIPTION = """\
Make a trace of a job from its event file, for Perfetto and chrome://tracing.

The trace has a process for the job and one for each host. The job's lanes have generations, regroups, downtime,
drains, cooldowns of hosts and stalls, and counters of the world size and the goodput. A host has a lane for each slot:
boot, waiting for a world, each generation with the worker's rank, and how the worker ended."""

_END = """\
example:
  elasticrun -np 4 --events-file events.jsonl train.py
  elasticrun trace events.jsonl -o trace.json

Open the file at https://ui.perfetto.dev (it stays in the browser) or in chrome://tracing. The job may still run."""


def main(argv: Sequence[str]) -> int:
    """Write a trace (``elasticrun trace``). Raises OptionError."""
    parser = file_parser("trace", _DESCRIPTION, _END, "trace.json")
    parser.add_argument("events", metavar="EVENTS", help="Event file that elasticrun --events-file has written.")
    given = parser.parse_args(argv)
    check_output(given.output, [given.events])
    from elasticstate.history.trace import ChromeTrace

    made = ChromeTrace()
    runs = made.add(given.events, read_events(given.events))
    if not runs:
        raise without_events(given.events)
    write_output(given.output, [given.events], made.data())
    text = (
        f"{given.output}: {number_of(made.spans, 'span')} of {listed([run.job for run in runs], shown=8)}. "
        "Open it at https://ui.perfetto.dev or in chrome://tracing."
    )
    sys.stdout.write(printable(text) + "\n")
    return 0


def without_events(path: str) -> OptionError:
    """Return the error for an event file without events."""
    return OptionError(
        f"{path!r}: has no complete event. Name a file that elasticrun --events-file has written, or wait until the "
        "job has started."
    )
