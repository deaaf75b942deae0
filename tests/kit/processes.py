"""Questions about processes that may end at any time, between two looks of the same question, too."""

from __future__ import annotations

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Return True if the process is gone, or a zombie."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_of(process: psutil.Process) -> str:
    """Return the command line of a process; "" if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
