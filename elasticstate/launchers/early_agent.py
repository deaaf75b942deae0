"""Processes that become agents on this machine.

elasticrun starts one before it imports the driver's modules, so that driver and agent import at the same time. This
takes 0.2 s each.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

AGENT = "elasticstate.agent"

_waiting: list[subprocess.Popen[bytes]] = []


@contextmanager
def early_agent(is_needed: bool) -> Iterator[None]:
    """Start a process that imports the agent's modules. It ends with the context if no agent needs it."""
    if is_needed:
        with suppress(OSError):  # the start of an agent reports it
            _waiting.append(_start())
    try:
        yield
    finally:
        for process in _waiting:
            process.kill()
            process.communicate()
        _waiting.clear()


def agent_process() -> subprocess.Popen[bytes]:
    """Return a process that reads an agent's parameters from its stdin. Raises OSError if it cannot be started."""
    return _waiting.pop() if _waiting else _start()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", AGENT],
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[2],  # first in sys.path: the agent imports this very package
        start_new_session=True,  # Ctrl-C in the terminal is for the driver
    )
