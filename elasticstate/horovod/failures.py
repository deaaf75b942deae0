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
        if not extension.proves_failure(error):
            raise
        if extension.is_in_last_world():
            text = "a worker has failed after the training, where no other world is made"
        else:
            text = "a worker of the world has failed"
        raise CollectiveError(f"{text}: {error}") from error
