"""Private names of torch.nn. Checked with torch 2.13.

- ``Module._parameters``, ``_buffers``, ``_modules``: ``named_parameters`` and similar methods take three walks, and do
  not yield buffers that are None.
- ``Module._non_persistent_buffers_set``: no public method returns it.
- ``torch._dynamo.eval_frame.OptimizedModule._orig_mod``: the module that ``torch.compile(module)`` has wrapped. Not
  imported here: the import of the compiler takes a second.
- ``torch.nn.modules.batchnorm._NormBase``: base class of batch and instance norms, also of those of other packages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Set
from operator import attrgetter
from typing import Any

import torch
from torch.nn.modules import batchnorm, instancenorm

from elasticstate.compat.absent_names import warn_absent

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
    """Return True for the class of what ``torch.compile(module)`` returns: it has the module as its only child.

    FSDP2 makes a subclass of it.
    """
    wrapper = "torch._dynamo.eval_frame", "OptimizedModule"
    return any((base.__module__, base.__name__) == wrapper for base in kind.__mro__)


def has_flat_shards(module: torch.nn.Module) -> bool:
    """Return True if a part of the module is torch's FullyShardedDataParallel."""
    wrapper = "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"
    kinds = {type(part) for part in module.modules()} if wrapper[0] in sys.modules else set()
    return any((base.__module__, base.__name__) == wrapper for kind in kinds for base in kind.__mro__)


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
