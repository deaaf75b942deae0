"""Replacement of this process by another process in the same slot, when this one cannot continue."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from elasticstate.log import logger


def exit_for_replacement(reason: str) -> NoReturn:
    """End this process immediately. The agent starts another one in this slot, which resumes from the retained commit.

    The process ends by a signal: the driver does not count that as the worker's own error, and no exit code of
    libraries runs, which may wait for a device or for dead members.
    """
    logger.error("this worker is restarted: %s", reason)
    sys.stdout.flush()
    sys.stderr.flush()
    while True:
        os.kill(os.getpid(), signal.SIGKILL)
