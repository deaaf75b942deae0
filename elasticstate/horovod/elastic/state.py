"""States under Horovod's names and signatures."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

import elasticstate
from elasticstate.horovod import negotiation, world
from elasticstate.horovod.calls import Call, CallKind
from elasticstate.horovod.optimizer import drop_all
from elasticstate.horovod.world import members_of

__all__ = ["ObjectState", "State", "TorchState"]

_MIXED = 3  # horovod.runner.elastic.worker.HostUpdateResult: hosts may be added and removed

_FREE = {"check", "commit_bytes", "commits", "exclude_from_check", "progress"}  # unknown to Horovod: names of values


class HostsUpdatedInterrupt(elasticstate.HostsUpdatedInterrupt, RuntimeError):
    """Raised by ``commit()``, ``save()`` and ``check_host_updates()`` at a planned change of the world.

    ``elastic.run`` catches it. As in Horovod, it is a RuntimeError, so ``except Exception`` catches it, too: raise it
    again there.
    """

    skip_sync = False  # in Horovod, True after a mere removal; here ``sync`` itself sends nothing then


class _Free:
    """Attribute of ``elasticstate.State`` whose name may be that of a value: it is hidden by the value."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, state: Any, owner: type | None = None) -> Any:
        return self if state is None else getattr(super(State, state), self._name)


class State(elasticstate.State):
    """Base class for a state of your own. See ``elasticstate.State``.

    A value may have any name that is no attribute of Horovod's states.
    """

    commits: Any = _Free("commits")
    commit_bytes: Any = _Free("commit_bytes")

    @classmethod
    def _is_taken(cls, name: str) -> bool:
        return name not in _FREE and super()._is_taken(name)

    def check_host_updates(self) -> None:
        if negotiation.some_have_joined():
            negotiation.agree(Call(CallKind.TICK, ("the end of a tick",)), members_of(None))
        try:
            super().check_host_updates()
        except elasticstate.HostsUpdatedInterrupt as interrupt:
            self.on_hosts_updated(time.time(), _MIXED)
            raise HostsUpdatedInterrupt(*interrupt.args) from None

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Do nothing. A subclass may extend this, to learn that all members leave the world for another one.

        Called at the last tick of the world, on the thread that ends the tick.

        Args:
            timestamp: the present time, in seconds since 1970.
            update_res: always 3, Horovod's number for "hosts may be added and removed".
        """


class ObjectState(State, elasticstate.ObjectState):
    """State of plain values. See ``elasticstate.ObjectState``. The first two arguments exist for old scripts only."""

    def __init__(self, bcast_object: object = None, get_rank: object = None, **values: Any) -> None:
        super().__init__(**values)


class TorchState(State, elasticstate.TorchState):
    """State of model, optimizer and other values. See ``elasticstate.TorchState``."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **values)


P = ParamSpec("P")
R = TypeVar("R")


def run(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function(state, ...)`` elastic. See ``elasticstate.run``."""

    @functools.wraps(function)
    def in_one_world(*args: P.args, **kwargs: P.kwargs) -> R:
        state = args[0]
        assert isinstance(state, elasticstate.State), "elasticstate.run verifies this"
        negotiation.use(state)
        try:
            if world.is_initialized():
                world.ready()
            return function(*args, **kwargs)
        finally:
            drop_all()
            negotiation.use(None)

    return elasticstate.run(in_one_world)
