"""Every exception that elasticstate raises.

::

    BaseException
     └── HostsUpdatedInterrupt      a planned change of the world; ``run`` catches it, ``except Exception`` does not
    Exception
     └── ElasticError
          ├── CollectiveError       the generation has failed; ``run`` catches it and restores the last commit
          ├── NotInWorldError       ``rank()`` or a similar function was called outside a world
          ├── StateError            a state cannot be captured, applied or restored
          │    ├── StateLostError       the job has committed, and no worker or host holds a commit any more
          │    ├── StateMisfitError     a whole commit does not fit the objects of this worker
          │    ├── StateDivergedError   the members of a world hold different states; names the tensors that differ
          │    ├── CommitStorageError   commits do not fit into --commit-dir; names the bytes needed and the bytes free
          │    └── CopyError            a copy of a commit cannot be read; the next copy is tried (internal)
          ├── UnreachableError      a member of the world cannot be reached; names host, address and what to do
          ├── UsageError            the API was used in a way that cannot work; the message says what to do
          │    └── UnknownValueError    a state has no value of that name; also an AttributeError
          ├── OptionError           an option has an invalid value; names the option, the value and the valid values
          ├── DiscoveryError        the first call of host discovery failed
          └── WorkerFailedError     the job of ``launch()`` has failed; has the root cause and all failures
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticstate.failures import WorkerFailure


class HostsUpdatedInterrupt(BaseException):
    """All members have completed the same tick and leave the world together; no training step is lost.

    It derives from ``BaseException`` so that a user's ``except Exception`` does not catch it (as ``trio.Cancelled``).
    """


class ElasticError(Exception):
    """Base class of the errors of elasticstate."""


class CollectiveError(ElasticError, RuntimeError):
    """The current generation has ended: a member died, hung or left. ``run`` restores and regroups.

    It is a RuntimeError, as the errors of torch's collectives are. One that is also a UsageError, as packages may
    define, is an own error of the script.
    """


class NotInWorldError(ElasticError):
    """A property of the world was requested before the first world was formed."""


class StateError(ElasticError):
    """A state cannot be captured, applied or restored."""


class StateLostError(StateError):
    """The job has committed, and no worker or host holds a commit any more. It never silently starts from scratch."""


class StateMisfitError(StateError):
    """A whole commit does not fit the objects of this worker: the training has changed their structure.

    The commit stays, and no older one is used instead.
    """


class StateDivergedError(StateError):
    """The members of a world hold different states; the message names the tensors that differ."""


class CommitStorageError(StateError):
    """Commits do not fit into ``--commit-dir``; the message names the bytes needed, those free, and what to do."""


class CopyError(StateError):
    """A copy of a commit cannot be read: it is gone, damaged, or its owner has changed it. Internal."""


class UnreachableError(ElasticError, RuntimeError):
    """A member of the world cannot be reached over the network; the message names host, address and what to do.

    It is a RuntimeError, as torch's error is.
    """


class UsageError(ElasticError):
    """The API was used in a way that cannot work; the message says what to do."""


class UnknownValueError(UsageError, AttributeError):
    """A state has no value of that name. It is an AttributeError, so ``hasattr(state, name)`` works."""


class OptionError(ElasticError):
    """An option has an invalid value; the message names the option, the value and the valid values."""


class DiscoveryError(ElasticError):
    """The first call of host discovery failed; the message carries the script's stderr."""


class WorkerFailedError(ElasticError):
    """A job that ``launch()`` has started has failed.

    ``root_cause`` is the earliest failure on all hosts. ``failures`` are the failures of all workers in the order in
    which the driver received them, including those that the job has survived.
    """

    def __init__(self, root_cause: WorkerFailure, failures: Sequence[WorkerFailure] = ()) -> None:
        super().__init__(root_cause, failures)
        self.root_cause = root_cause
        self.failures = tuple(failures)

    def __str__(self) -> str:
        return str(self.root_cause)
