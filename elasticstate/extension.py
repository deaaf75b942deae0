"""Extension points: names for a package that offers the API of another library on top of elasticstate.

``elasticstate.horovod`` uses only these names and those of ``elasticstate`` itself. Such a package

- calls ``check_launcher`` first, and ``join`` before it needs rank, size or a collective, if the script has no ``run``
  function yet at that time; ``leave`` at the end of a script without one;
- calls ``keep_last_world`` if collectives must work after ``run`` and ``leave``, and then ``end_last_world`` at exit;
- encloses the part of a collective call that waits for all ranks in ``begin_call`` and ``end_call``;
- stores ``world_generation()`` with everything that belongs to one world, and makes it anew in another generation;
- may derive its states from ``elasticstate.State`` and its subclasses. It may override ``check_host_updates``, which
  ends each tick, and ``_is_taken``, which refuses names of values. ``ticks`` returns the number of completed ticks. A
  state is a ``torch.distributed`` Joinable: the hooks of ``state.join_hook()`` end a tick without training, and copy
  the state of the last ranks to all.
"""

from __future__ import annotations

import os
import time

from elasticstate.compat.tensors import copy_all
from elasticstate.config import environment_variable, refusal_of_other_launchers, worker_environment
from elasticstate.errors import UsageError
from elasticstate.state.base import State, committer_of
from elasticstate.state.channel import Channel
from elasticstate.state.order import Order, world_generation, world_is_new, world_rank, world_size
from elasticstate.worker.call_monitor import begin_call, end_call
from elasticstate.worker.run import end_last_world, is_in_last_world, join, keep_last_world, leave, proves_failure

__all__ = [
    "Channel",
    "Order",
    "begin_call",
    "check_launcher",
    "copy_all",
    "end_call",
    "end_last_world",
    "environment_variable",
    "host",
    "is_in_last_world",
    "job_id",
    "join",
    "keep_last_world",
    "leave",
    "proves_failure",
    "ticks",
    "world_generation",
    "world_is_new",
    "world_rank",
    "world_size",
]

_ALONE = f"process {os.getpid()} of {time.time_ns()}"


def check_launcher() -> None:
    """Raise UsageError if another launcher, such as mpirun, has started this process together with others."""
    if refusal := refusal_of_other_launchers():
        raise UsageError(refusal)


def host() -> str:
    """Return the name that host discovery gives this worker's host; "localhost" without ``elasticrun``."""
    environment = worker_environment()
    return environment.worker.host if environment is not None else "localhost"


def job_id() -> str:
    """Return the id of this worker's job, unique among all jobs; without ``elasticrun`` that of this process."""
    environment = worker_environment()
    return environment.job_id if environment is not None else _ALONE


def ticks(state: State) -> int:
    """Return the number of ticks that the state has completed in the present world."""
    return committer_of(state).ticks
