"""elasticstate: elastic, fault-tolerant PyTorch training inside the process.

::

    import elasticstate as elastic

    state = elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)

    @elastic.run
    def train(state): ...

    train(state)

Most names are loaded when they are first used: the driver and the agents, which import this package too, never load
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from elasticstate import tracebacks
from elasticstate.errors import (
    CollectiveError,
    CommitStorageError,
    CopyError,
    DiscoveryError,
    ElasticError,
    HostsUpdatedInterrupt,
    NotInWorldError,
    OptionError,
    StateDivergedError,
    StateError,
    StateLostError,
    StateMisfitError,
    UnknownValueError,
    UnreachableError,
    UsageError,
    WorkerFailedError,
)

if TYPE_CHECKING:
    from elasticstate.launching import launch
    from elasticstate.present_world import (
        cross_rank,
        cross_size,
        device,
        generation,
        local_leader,
        local_rank,
        local_size,
        rank,
        size,
        world,
    )
    from elasticstate.state.base import ObjectState, State
    from elasticstate.state.loader import ElasticDataLoader
    from elasticstate.state.sampler import ElasticSampler
    from elasticstate.state.torch import TorchState
    from elasticstate.worker.record import ErrorHandler, record
    from elasticstate.worker.run import run
    from elasticstate.worker.user_metrics import report_metric

_HOMES = {  # the others that are loaded later are of present_world
    "ElasticDataLoader": "state.loader",
    "ElasticSampler": "state.sampler",
    "ErrorHandler": "worker.record",
    "ObjectState": "state.base",
    "State": "state.base",
    "TorchState": "state.torch",
    "launch": "launching",
    "record": "worker.record",
    "report_metric": "worker.user_metrics",
    "run": "worker.run",
}

__all__ = [
    "CollectiveError",
    "CommitStorageError",
    "CopyError",
    "DiscoveryError",
    "ElasticDataLoader",
    "ElasticError",
    "ElasticSampler",
    "ErrorHandler",
    "HostsUpdatedInterrupt",
    "NotInWorldError",
    "ObjectState",
    "OptionError",
    "State",
    "StateDivergedError",
    "StateError",
    "StateLostError",
    "StateMisfitError",
    "TorchState",
    "UnknownValueError",
    "UnreachableError",
    "UsageError",
    "WorkerFailedError",
    "cross_rank",
    "cross_size",
    "device",
    "generation",
    "launch",
    "local_leader",
    "local_rank",
    "local_size",
    "rank",
    "record",
    "report_metric",
    "run",
    "size",
    "world",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    tracebacks.install()
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'present_world')}"), name)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}._native":
            raise
        raise UsageError(
            f"elasticstate was imported from {__path__[0]}, where its native module is not compiled. Move the script "
            "out of the folder of the sources, or compile the module there with pip install -e ."
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
