"""Failures of durable copies: their kinds, one word each, and their reasons."""

from __future__ import annotations

import errno

ABSENT = "absent"
BUSY = "busy"
FULL = "full"
HOST = "host"
HUNG = "hung"
LIBRARY = "library"
LOST = "lost"
MEMORY = "memory"
SHARDED = "sharded"
STORAGE = "storage"
TORN = "torn"
UNCHANGED = "unchanged"
NOT_FAILED = {ABSENT, BUSY, UNCHANGED}
"""Reasons not to save a copy now that are no failures."""
MISSED = {ABSENT, BUSY, TORN}
"""Kinds of attempts that came too late for a commit, or too early for the next one. The storage may be good."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class ShardedCommitError(Exception):
    """A commit is not of the kind that was ordered: that of one worker alone must not become a complete copy."""


def failure_of(error: BaseException) -> tuple[str, str]:
    """Return kind and reason of an error of a storage."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ShardedCommitError):
        return SHARDED, reason
    if isinstance(error, ImportError):
        return LIBRARY, reason
    if isinstance(error, OSError) and error.errno in _FULL:
        return FULL, reason
    return STORAGE, reason if isinstance(error, OSError) else f"{type(error).__name__}: {reason}"
