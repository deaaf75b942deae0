"""Orphans: processes whose parents have ended, and whose parent is the agent from then on.

Workers that fork from the template process come to the agent in this way, so that the agent can wait for them. Other
descendants come, too; their exit statuses interest nobody, but unread they would stay zombies.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

from elasticstate.processes import children_that_ended
from elasticstate.threads import in_thread

_PR_SET_CHILD_SUBREAPER = 36
_REAP_INTERVAL_S = 1.0


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


async def reap_orphans(is_awaited: Callable[[int], bool]) -> None:
    """Read the exit statuses of orphans, for ever. ``is_awaited``: returns True for a process that others wait for.

    A child of a finished command may be found here before the command's own wait: only the second look reaps.
    """
    before: set[int] = set()
    while True:
        await asyncio.sleep(_REAP_INTERVAL_S)
        ended = {pid for pid in await in_thread(children_that_ended) if not is_awaited(pid)}
        for pid in ended & before:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        before = ended - before
