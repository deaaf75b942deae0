"""Private names of torch's modules, optimizers and loaders. Checked with torch 2.11 to 2.15 and torchdata 0.11.

- ``Module._parameters``, ``_buffers``, ``_modules``: ``named_parameters`` and similar methods take three walks, and do
  not yield buffers that are None.
- ``Module._non_persistent_buffers_set``: no public method returns it.
- ``torch._dynamo.eval_frame.OptimizedModule._orig_mod``: the module that ``torch.compile(module)`` has wrapped. Not
  imported here: the import of the compiler takes a second.
- ``torch.nn.modules.batchnorm._NormBase``: base class of batch and instance norms, also of those of other packages.
- ``GradScaler._per_optimizer_states``: the optimizers that ``unscale_`` was called for since the last ``update``. No
  public method resets it without changing the scale.
- ``DataLoader._iterator``, and attributes of the loaders of torchdata: see the functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Set
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch.nn.modules import batchnorm, instancenorm
from torch.utils.data import DataLoader

from elasticstate.compat import warn_absent
from elasticstate.errors import UsageError

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

# attrgetter is as fast as the attribute itself: a commit calls these functions for each module of a model.
parameters_of: Callable[[torch.nn.Module], Mapping[str, torch.Tensor | None]] = attrgetter("_parameters")
"""Return the parameters that a module itself has; None where one is registered as None."""
buffers_of: Callable[[torch.nn.Module], Mapping[str, torch.Tensor | None]] = attrgetter("_buffers")
"""Return the buffers that a module itself has; None where one is registered as None."""
children_of: Callable[[torch.nn.Module], Mapping[str, torch.nn.Module | None]] = attrgetter("_modules")
"""Return the children of a module. A child with several names appears under each."""
transient_buffers_of: Callable[[torch.nn.Module], Set[str]] = attrgetter("_non_persistent_buffers_set")
"""Return the names of the buffers that are registered with ``persistent=False``."""


def has_registries() -> bool:
    """Return True if the functions above work; else warn once. Then only public methods of modules can be used."""
    module = torch.nn.Module()
    for name in _REGISTRIES:
        if not hasattr(module, name):
            warn_absent(
                "torch",
                f"torch.nn.Module.{name}",
                "a commit of a module does not contain which buffers are None or not persistent",
            )
            return False
    return True


def compiles_another(kind: type[torch.nn.Module]) -> bool:
    """Return True for the class of what ``torch.compile(module)`` returns: it has the module as its only child."""
    return issubclass(kind, _class("torch._dynamo.eval_frame", "OptimizedModule"))


def has_flat_shards(module: torch.nn.Module) -> bool:
    """Return True if a part of the module is torch's FullyShardedDataParallel."""
    kind = _class("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    return kind != () and any(isinstance(part, kind) for part in module.modules())


def has_buffer(module: torch.nn.Module, name: str) -> bool:
    """Return True if the module itself has a buffer of this name, which may be None. Uses public methods alone."""
    try:
        module.get_buffer(name)
    except AttributeError:
        return False
    except RuntimeError:  # a ScriptModule has no such method
        return any(key == name for key, _ in module.named_buffers(recurse=False))
    return True


def _norms() -> tuple[type[torch.nn.Module], ...]:
    base: Any = getattr(batchnorm, "_NormBase", None)
    if base is not None:
        return (base,)
    return (
        *(getattr(batchnorm, name) for name in batchnorm.__all__ if name != "SyncBatchNorm"),
        *(getattr(instancenorm, name) for name in instancenorm.__all__),
    )


NORMS = _norms()
"""Base classes of the modules with running statistics. Without ``_NormBase``: the classes of torch itself."""


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Make ``unscale_`` possible again after a step that did not end. Otherwise it raises "already been called"."""
    states: Any = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        warn_absent(
            "torch",
            "torch.amp.GradScaler._per_optimizer_states",
            "GradScaler.unscale_() may fail after a failure between unscale_() and update()",
        )
        return
    states.clear()


def has_scheduler(optimizer: Any) -> bool:
    """Return True if a scheduler of torch was made for this optimizer, whose ``step`` has this private mark then."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def end_persistent_workers(loader: DataLoader[Any]) -> None:
    """Let the next iterator of a DataLoader have new worker processes. No iterator of this loader may be in use."""
    loader._iterator = None


def is_loader(value: object) -> bool:
    """Return True for a StatefulDataLoader and for a Loader of nodes."""
    return is_stateful_loader(value) or _is_loader_of_nodes(value)


def is_stateful_loader(value: object) -> bool:
    """Return True for a StatefulDataLoader."""
    return isinstance(value, _class("torchdata.stateful_dataloader", "StatefulDataLoader"))


def state_of(value: Any) -> Any:
    """Return ``value.state_dict()``; for a Loader of nodes, the state that its next iterator begins with, if any.

    Its own method returns the state of the last iterator until the next one begins, also after ``load_state_dict()``.
    """
    waiting = getattr(value, "_next_iter_state_dict", None) if _is_loader_of_nodes(value) else None
    return value.state_dict() if waiting is None else waiting


def load_state(value: Any, state: Any) -> None:
    """Call ``value.load_state_dict(state)``, so that the next iterator of a Loader of nodes begins there.

    Without an iterator, ``state_dict()`` of such a Loader makes one for the next ``iter()``, which then ignores the
    loaded state.

    The last iterator of either kind of loader raises UsageError from now on: it would go on somewhere else, and
    ``state_dict()`` would return the loaded position again and again.
    """
    last = getattr(value, "_it" if _is_loader_of_nodes(value) else "_iterator", None) if is_loader(value) else None
    value.load_state_dict(state)
    if _is_loader_of_nodes(value):
        value._iter_for_state_dict = False
        value._it = None
    if last is not None:
        setattr(last, "next" if _is_loader_of_nodes(value) else "_next_data", _refuse)


def _refuse() -> NoReturn:
    raise UsageError(
        "A position was loaded into the loader after this iterator was made. Begin a new loop over the loader, inside "
        "the function that is decorated with run."
    )


def _is_loader_of_nodes(value: object) -> bool:
    return isinstance(value, _class("torchdata.nodes", "Loader"))


def _class(module: str, name: str) -> Any:
    """Return a class; () if its module is not imported: then there are no objects of the class."""
    return getattr(sys.modules.get(module), name, ())
