"""Memory that commits will need once optimizers have made their first steps: before, most of them have no state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from elasticstate.compat import dtensors

# Tensors of an optimizer of torch.optim that are as large as the parameter, by the name of its class.
_TENSORS: dict[str, Callable[[dict[str, Any]], int]] = {
    "ASGD": lambda _: 1,
    "Adadelta": lambda _: 2,
    "Adafactor": lambda _: 0,  # one row and one column of each parameter
    "Adam": lambda group: 3 if group.get("amsgrad") else 2,
    "AdamW": lambda group: 3 if group.get("amsgrad") else 2,
    "Adamax": lambda _: 2,
    "LBFGS": lambda group: 2 * int(group.get("history_size", 0)) + 2,
    "Muon": lambda _: 1,
    "NAdam": lambda _: 2,
    "RAdam": lambda _: 2,
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "Rprop": lambda _: 2,
    "SGD": lambda group: int(bool(group.get("momentum"))),
    "SparseAdam": lambda _: 2,
}


def bytes_to_come(values: Iterable[object]) -> int | None:
    """Return the bytes that the first steps of the optimizers among the values will add to a commit; None: not known.

    An optimizer that has a state has made its first step, or has created its whole state at once.
    """
    total = 0
    for value in values:
        if not isinstance(value, torch.optim.Optimizer) or value.state:
            continue
        names = (kind.__name__ for kind in type(value).__mro__ if f"{kind.__module__}.".startswith("torch.optim."))
        tensors = next((_TENSORS[name] for name in names if name in _TENSORS), None)
        if tensors is None:
            return None
        total += sum(tensors(group) * sum(map(_bytes_of, group["params"])) for group in value.param_groups)
    return total


def _bytes_of(parameter: Any) -> int:
    if not parameter.requires_grad:
        return 0
    local: torch.Tensor = parameter.to_local() if dtensors.is_dtensor(parameter) else parameter
    return local.numel() * local.element_size()
