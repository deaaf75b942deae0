"""Private names of optimizers, schedulers and gradient scalers. Checked with torch 2.13.

``GradScaler._per_optimizer_states``: the optimizers that ``unscale_`` was called for since the last ``update``. No
public method resets it without changing the scale.
"""

from __future__ import annotations

from typing import Any

import torch

from elasticstate.compat.absent_names import warn_absent


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
    """Return True if a learning rate scheduler of torch was made for this optimizer.

    ``LRScheduler`` replaces ``optimizer.step`` by a function with this private mark. torch has no public name for it.
    """
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
