"""Slow callbacks of event loops, as the drivers and agents of a test run report them (elasticstate/loop_watch.py)."""

from __future__ import annotations

import os
import re
from pathlib import Path

_LONG_S = 1.0


class SlowCallbacks:
    """The reports in a file. A virtual machine now and then runs a callback five times as long as ever before.

    This happens to a callback of any kind, about once in a run of all tests, and the kernel reports no steal. So one
    report is a note, unless the callback lasted for a second. The second report of a callback of the same kind is a
    fault of the product.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._earlier: dict[str, str] = {}  # by kind

    def new(self) -> tuple[list[str], list[str]]:
        """Return the notes and the faults since the last call."""
        notes, faults = [], []
        for line in self.path.read_text().splitlines():
            kind = _kind(line)
            if kind in self._earlier:
                faults += [self._earlier[kind], line]
            elif float(line.partition(" ")[0]) > _LONG_S:
                faults.append(line)
            else:
                notes.append(line)
            self._earlier[kind] = line
        if notes or faults:
            os.truncate(self.path, 0)
        return notes, faults


def _kind(line: str) -> str:
    """Return the description of a callback without numbers: its function and file."""
    description = line.partition(": <")[2].partition(" wait_for")[0]
    return re.sub(r"0x[0-9a-f]+|\d+", "", description)
