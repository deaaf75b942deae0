"""``elasticrun``: the command line. Each command is a module with a function ``main``, imported when the command runs.

Heavy modules are imported only when a job runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module

from elasticstate.errors import OptionError
from elasticstate.terminal import complain, hold_standard_descriptors

COMMANDS = ("status", "agent", "trace", "report", "verify", "export")  # anything else is a job: run.py


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line of ``elasticrun``; return the exit status."""
    hold_standard_descriptors()
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else ""
    try:
        if name in COMMANDS:
            name, argv = f"elasticstate.cli.{name}", argv[1:]
        else:
            _refuse_misspelled(name)
            name = "elasticstate.cli.run"
        return int(import_module(name).main(argv))
    except OptionError as error:
        complain("elasticrun", str(error))
        return 2


def _refuse_misspelled(word: str) -> None:
    """Raise OptionError if the first word is almost one of ``COMMANDS``, and no program has that name."""
    if not word or word.startswith("-") or os.path.exists(word) or shutil.which(word):
        return
    if meant := difflib.get_close_matches(word, COMMANDS, 1):
        raise OptionError(f"no program is called {word!r}. Did you mean elasticrun {meant[0]}?")
