"""Errors of this package. Each is one of elasticstate's, and also what Horovod raises in its place.

::

    UsageError
     └── ArgumentUsageError (ValueError)                  an argument is wrong
          ├── CallUsageError (HorovodInternalError)       the ranks' calls differ, or a call's argument is wrong
          └── OptimizerUsageError (AssertionError)        a DistributedOptimizer is used in the wrong way
    NotInWorldError
     └── NotInitializedError (ValueError)                 no world: init() was not called, or it has ended
    CollectiveError                                       HorovodInternalError: a member of the world has failed

``elastic.run`` restores after a CollectiveError, except one that is a UsageError: a retry would not help.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elasticstate import extension
from elasticstate.errors import CollectiveError, NotInWorldError, UsageError


class ArgumentUsageError(UsageError, ValueError):
    """An argument is wrong. The message says which, and what to do."""


class CallUsageError(ArgumentUsageError, CollectiveError):
    """The calls of the ranks differ, or an argument of a call is wrong. All ranks that made the call raise it.

    They have sent no data, and their next calls match again, so a script may catch it and go on.
    """


class OptimizerUsageError(ArgumentUsageError, AssertionError):
    """A DistributedOptimizer is used in the wrong way. The message says what to do."""


class NotInitializedError(NotInWorldError, ValueError):
    """There is no world: ``init()`` was not called, or the world has ended."""


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
