"""``HorovodInternalError`` in place of torch's error, if a member of the world has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elasticstate import extension
from elasticstate.errors import CollectiveError


@contextmanager
def failures_named() -> Iterator[None]:
    """Raise CollectiveError in place of a RuntimeError from torch, if it is proven that a member has failed.

    All other errors pass, such as a dtype that the backend cannot send.
    """
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        if text := extension.failure_text(error):
            raise CollectiveError(text) from error
        raise
