"""Text for a terminal. Text from outside (discovery, other hosts, workers' errors) cannot control the terminal.

A worker's own output is not changed: the terminal gets its colours and progress bars.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def printable(text: str) -> str:
    """Return the text with all control and format characters escaped, except newlines and tabs.

    Escapes as Python does: ESC becomes ``\\x1b``. Carriage returns and bidirectional marks are escaped, too.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def message(sender: str, text: str) -> str:
    """Return ``sender: text`` with its line end. Further lines are indented, so that none looks like a message."""
    indented = printable(text).rstrip("\n").replace("\n", "\n  ")
    return f"{sender}: {indented}\n"


def hold_standard_descriptors() -> None:
    """Open /dev/null as each of the descriptors 0, 1 and 2 that is closed.

    Otherwise a socket or a file would get that number and receive all printed text. Call this function before any file
    is opened.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(
                os.devnull, os.O_RDWR
            )  # gets the lowest free number, which is ``fd``: all lower ones are open
            assert opened == fd
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115


def complain(sender: str, text: str) -> None:
    """Write a message to stderr, in a process without an event loop. Never fails."""
    with suppress(OSError):
        sys.stderr.write(message(sender, text))
        sys.stderr.flush()
