"""``elasticrun verify EVENTS...``: checks of event files against the rules of the protocol."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elasticstate.cli.parser import CommandParser
from elasticstate.cli.trace import without_events
from elasticstate.core.types import number_of
from elasticstate.history.event_files import read_events
from elasticstate.terminal import printable

_DESCRIPTION = """\
Check event files of jobs against what elasticstate promises.

Generations rise by one, each with one world of min_np to max_np members that were started, are READY and have not
exited. Ranks follow from ages. A generation ends before the next one begins; at a tick, only in a hold. Planned changes
lose no commit, and copied commits get no older. While a world trains, no worker starts on a host that
drains, or in a cooldown that the job can wait for. Each second has one cause; times, losses and failures of the
generations add up to those of the job. Drivers count up, and job_finished is the last event."""

_END = """\
example:
  elasticrun -np 4 --events-file events.jsonl train.py
  elasticrun verify events.jsonl

Prints one line for a file that holds. Else each line is FILE:LINE: what is wrong: please report that with the file.
A file may end early (the job still runs, or its driver was killed), and may have several jobs.

Exit status: 0 all files hold; 1 a check fails; 2 a file cannot be read."""


def main(argv: Sequence[str]) -> int:
    """Check event files (``elasticrun verify``). Raises OptionError."""
    parser = CommandParser(prog="elasticrun verify", description=_DESCRIPTION, epilog=_END)
    parser.add_argument(
        "events", nargs="+", metavar="EVENTS", help="Event files that elasticrun --events-file has written."
    )
    given = parser.parse_args(argv)
    from elasticstate.history.verify import checks

    status = 0
    for path in given.events:
        found = checks(read_events(path))
        if not found:
            raise without_events(path)
        lines = [f"{path}:{line}: {text}" for line, text in sorted(wrong for job in found for wrong in job.violations)]
        if lines:
            status = 1
        else:
            counts = (
                number_of(sum(job.events for job in found), "event"),
                number_of(sum(job.generation or 0 for job in found), "generation"),
                number_of(sum(len(job.failed) for job in found), "failure"),
            )
            notes = [f"; {note}" for job in found for note in job.notes]
            lines = [f"{path}: {', '.join(counts)}: holds{''.join(notes)}"]
        sys.stdout.writelines(printable(line) + "\n" for line in lines)
    return status
