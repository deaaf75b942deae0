"""Private attributes of the loaders of torch (checked with 2.13) and torchdata (0.11)."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from elasticstate.errors import UsageError


def end_persistent_workers(loader: DataLoader[Any]) -> None:
    """Let the next iterator of a DataLoader have new worker processes. No iterator of this loader may be in use."""
    loader._iterator = None


def is_loader(value: object) -> bool:
    """Return True for a StatefulDataLoader and for a Loader of nodes."""
    return is_stateful_loader(value) or _is_loader_of_nodes(value)


def is_stateful_loader(value: object) -> bool:
    """Return True for a StatefulDataLoader."""
    return _is(value, "torchdata.stateful_dataloader", "StatefulDataLoader")


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
    return _is(value, "torchdata.nodes", "Loader")


def _is(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)  # without the module there are no objects of its classes
    return kind is not None and isinstance(value, kind)
