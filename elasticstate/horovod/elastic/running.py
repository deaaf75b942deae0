"""``hvd.elastic.run``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import elasticstate
from elasticstate.horovod import headers, world
from elasticstate.horovod.reducer import drop_all

P = ParamSpec("P")
R = TypeVar("R")


def run(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function(state, ...)`` elastic. See ``elasticstate.run``."""

    @functools.wraps(function)
    def in_one_world(*args: P.args, **kwargs: P.kwargs) -> R:
        state = args[0]
        assert isinstance(state, elasticstate.State), "elasticstate.run verifies this"
        headers.use(state)
        try:
            if world.is_initialized():
                world.ready()
            return function(*args, **kwargs)
        finally:
            drop_all()
            headers.use(None)

    return elasticstate.run(in_one_world)
