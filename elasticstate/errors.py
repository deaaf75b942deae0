"""Every exception that elasticstate raises.

::

    BaseException
     └── HostsUpdatedInterrupt      a planned change of the world; caught by ``run``, not by ``except Exception``
    Exception
     └── ElasticError
          ├── CollectiveError       the generation has failed: back to the last commit; caught by ``run``
          ├── NotInWorldError       ``rank()`` and its like were asked outside a world
          ├── StateError            a state cannot be captured, applied or restored as asked
          │    ├── StateLostError       the job has committed, and nobody holds a commit any more
          │    ├── StateDivergedError   the members of a world hold different states; names the tensors that differ
          │    └── CommitSpaceError     commits do not fit into --commit-dir; names what they need and what is free
          ├── UsageError            the API was used in a way that cannot work; the message says what to do
          ├── OptionError           an option has a bad value; names the option, the value and what it takes
          ├── DiscoveryError        the first call of host discovery failed
          └── WorkerFailedError     the job of ``launch()`` has failed; carries the root cause and all failures
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticstate.failures import WorkerFailure


class HostsUpdatedInterrupt(BaseException):
    """All members have completed the same tick and leave the world together; nothing is lost.

    Derives from ``BaseException`` so that a user's ``except Exception`` cannot eat it (the idea of trio's
    ``Cancelled``).
    """


class ElasticError(Exception):
    """Root of the errors of elasticstate."""


class CollectiveError(ElasticError):
    """The present generation is over: a member died, hung or left it. ``run`` restores and regroups."""


class NotInWorldError(ElasticError):
    """A world was asked for before the first one was formed."""


class StateError(ElasticError):
    """A state cannot be captured, applied or restored as asked."""


class StateLostError(StateError):
    """The job has committed, and no memory holds a commit any more. Never silently from scratch."""


class StateDivergedError(StateError):
    """The members of a world hold different states; the message names the tensors that differ."""


class CommitSpaceError(StateError):
    """Commits do not fit into ``--commit-dir``; the message names the bytes needed, those free, and what to do."""


class UsageError(ElasticError):
    """The API was used in a way that cannot work; the message names the remedy."""


class OptionError(ElasticError):
    """An option has a bad value; the message names the option, the value and what it takes."""


class DiscoveryError(ElasticError):
    """The first call of host discovery failed; the message carries the script's stderr."""


class WorkerFailedError(ElasticError):
    """A job that ``launch()`` has started has failed.

    ``root_cause`` is the first failure over all hosts, by time; ``failures`` are those of all workers, as they were
    heard of: also those that the job has survived.
    """

    def __init__(self, root_cause: WorkerFailure, failures: Sequence[WorkerFailure] = ()) -> None:
        super().__init__(root_cause, failures)
        self.root_cause = root_cause
        self.failures = tuple(failures)

    def __str__(self) -> str:
        return str(self.root_cause)
