"""Every exception that elasticstate raises.

::

    BaseException
     └── HostsUpdatedInterrupt      a planned change of the world; caught by ``run``, not by ``except Exception``
    Exception
     └── ElasticError
          ├── CollectiveError       the generation has failed: back to the last commit; caught by ``run``
          ├── NotInWorldError       ``rank()`` and its like were asked outside a world
          ├── StateError            a state cannot be captured, applied or restored as asked
          │    └── StateLostError   the job has committed, and nobody alive holds a commit
          ├── UsageError            the API was used in a way that cannot work; the message says what to do
          ├── OptionError           an option has a bad value; names the option, the value and what it takes
          └── DiscoveryError        the first call of host discovery failed
"""

from __future__ import annotations


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
    """The job has committed, and no living worker holds a commit. Never silently from scratch."""


class UsageError(ElasticError):
    """The API was used in a way that cannot work; the message names the remedy."""


class OptionError(ElasticError):
    """An option has a bad value; the message names the option, the value and what it takes."""


class DiscoveryError(ElasticError):
    """The first call of host discovery failed; the message carries the script's stderr."""
