"""Running statistics: buffers of a module that differ by rank by design."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from elasticstate.compat.modules import NORMS, compiles_another


def running_statistics(name: str, module: torch.nn.Module) -> Iterator[str]:
    """Yield the names of the buffers that a forward pass updates from this rank's batch alone.

    DistributedDataParallel broadcasts rank 0's buffers before the pass, so they differ after it.
    ``num_batches_tracked`` differs where ranks have different numbers of micro-batches. The statistics of SyncBatchNorm
    cover all ranks, so they are not included.
    """
    for path, part in _named_modules(f"{name}.buffers", module):
        if isinstance(part, NORMS) and not isinstance(part, torch.nn.SyncBatchNorm):
            for key in ("running_mean", "running_var", "num_batches_tracked"):
                if getattr(part, key, None) is not None:
                    yield f"{path}.{key}"


def _named_modules(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield all parts of a module by the names that they have without ``torch.compile`` (see module_state.Walk)."""
    names: dict[str, str] = {}
    compiled: set[str] = set()
    for path, part in module.named_modules(remove_duplicate=False):
        parent, _, key = path.rpartition(".")
        names[path] = prefix if not path else names[parent] if parent in compiled else f"{names[parent]}.{key}"
        if compiles_another(type(part)):
            compiled.add(path)
        yield names[path], part
