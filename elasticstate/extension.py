"""Extension points: names for a package that offers the API of another library on top of elasticstate.

``elasticstate.horovod``, ``.huggingface``, ``.lightning``, ``.local_sgd`` and ``.loggers`` use only these names and
those of ``elasticstate`` itself. Such a package

- calls ``join_fixed_world`` first, and ``join`` before it needs rank, size or a collective, if the script has no
  ``run`` function yet at that time; ``leave`` at the end of a script without one;
- calls ``keep_last_world`` if collectives must work after ``run`` and ``leave``, and then ``end_last_world`` at exit;
- encloses the part of a collective call that waits for all ranks in ``begin_call`` and ``end_call``;
- may ask ``failure_text`` whether an error of a collective comes from the failure of a member; an error that is both
  a CollectiveError and a UsageError is an own error of the script;
- stores ``world_generation()`` with everything that belongs to one world, and makes it anew in another generation;
- may derive its states from ``elasticstate.State`` and its subclasses. It may override ``check_host_updates``, which
  ends each tick; ``_is_taken``, which refuses names of values; ``_value_kinds``, which a sync compares; ``_owned``,
  which names the tensors that only an optimizer's ``step`` writes; and ``_step_sources``, which returns the values in
  which an optimizer that steps must be, or None. ``ticks`` returns the number of completed ticks. A
  state is a ``torch.distributed`` Joinable: the hooks of ``state.join_hook()`` end a tick without training, and copy
  the state of the last ranks to all;
- may define values of a state that need the state: the constructor of ``State`` calls their method
  ``attach_to_state(state, name)``. Keep a weak reference: a cycle would keep the commits in memory;
- may add values to a state that a script has made: ``add_values``, after a look at its ``parts``;
- calls ``set_random_state`` with an earlier ``random_state()`` if its library sets seeds in each world.
"""

from __future__ import annotations

import os
import time
from typing import Any

from elasticstate.compat.torch_tensors import copy_all
from elasticstate.options import environment_variable, launched_place, worker_environment
from elasticstate.present_world import libraries_local_rank
from elasticstate.state.base import State, committer_of
from elasticstate.state.rng import apply as set_random_state, capture as random_state
from elasticstate.state.sampler import (
    Order,
    local_place,
    world_generation,
    world_is_new,
    world_rank,
    world_size,
)
from elasticstate.state.session import Channel
from elasticstate.worker.call_monitor import begin_call, end_call
from elasticstate.worker.run import end_last_world, failure_text, join, join_fixed_world, keep_last_world, leave

__all__ = [
    "Channel",
    "Order",
    "add_values",
    "begin_call",
    "copy_all",
    "end_call",
    "end_last_world",
    "environment_variable",
    "failure_text",
    "host",
    "is_job",
    "job_id",
    "join",
    "join_fixed_world",
    "keep_last_world",
    "leave",
    "libraries_local_rank",
    "local_place",
    "parts",
    "random_state",
    "set_random_state",
    "starting_size",
    "ticks",
    "world_generation",
    "world_is_new",
    "world_rank",
    "world_size",
]

_ALONE = f"process {os.getpid()} of {time.time_ns()}"


def host() -> str:
    """Return the name of this worker's host.

    Under ``elasticrun``, host discovery gives the name. It is "localhost" for a process that runs alone.
    """
    environment, place = worker_environment(), launched_place()
    if environment is not None:
        return environment.worker.host
    return place.host if place is not None else "localhost"


def is_job() -> bool:
    """Return True if ``elasticrun`` has started this worker, so that another process may continue its training."""
    return worker_environment() is not None


def job_id() -> str:
    """Return the id of this worker's job, unique among all jobs; without ``elasticrun`` that of this process."""
    environment = worker_environment()
    return environment.job_id if environment is not None else _ALONE


def starting_size() -> int:
    """Return the number of workers with which the job is to start (``-np``). It never changes.

    Without ``elasticrun``, return the size of the present world.
    """
    environment = worker_environment()
    return (environment.start_size if environment is not None else 0) or world_size()


def ticks(state: State) -> int:
    """Return the number of ticks that the state has completed in the present world."""
    return committer_of(state).session.ticks


def parts(state: State) -> dict[str, Any]:
    """Return the values of the state by name; instead of a list, tuple or dict of objects with ``state_dict()``, these
    objects by their paths."""
    return state._parts()


def add_values(state: State, **values: Any) -> None:
    """Add values to a state after its construction, the same ones on all ranks. They are captured and loaded last.

    Raises UsageError if the state has committed, is in a world, or has an attribute of this name.
    """
    state._add_values(values)
