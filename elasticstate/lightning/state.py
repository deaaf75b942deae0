"""LightningState: a LightningModule, and the checkpoint of the Trainer that trains it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

import elasticstate as elastic
from elasticstate.errors import UsageError
from elasticstate.extension import random_state

METRICS = "elasticstate_metrics"
"""Key of the metrics for callbacks, which Lightning does not save."""


class Part:
    """A part of a Trainer's checkpoint as of the last tick. A value of the state.

    Its tensors are the live ones of the optimizers. A restore writes into them, and the next Trainer's optimizers use
    them.
    """

    def __init__(self) -> None:
        self.content: dict[str, Any] | None = None
        """None before the first tick of the job."""

    def state_dict(self) -> dict[str, Any]:
        return {"content": self.content}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict["content"]


class LightningState(elastic.TorchState):
    """The state of a training with Lightning: a module, and the checkpoint of its Trainer without the module.

    ``state.trainer`` contains the progress of all loops, optimizers, schedulers, precision plugin, data module and the
    position of the loader. ``state.callbacks`` contains the states of the callbacks and the metrics that they use.
    The latter may differ by rank, so ``check()`` leaves them out. :class:`Trainer` keeps the state up to date.

    Args:
        model: the module.
        values: further values that the training changes, such as ``log=Log(...)``. They become attributes.

    Raises UsageError if ``model`` is not a LightningModule.
    """

    def __init__(self, model: pl.LightningModule, **values: Any) -> None:
        if not isinstance(model, pl.LightningModule):
            raise UsageError(
                f"LightningState({type(model).__name__}): must be a LightningModule of the package lightning.pytorch. "
                "Derive the model from lightning.pytorch.LightningModule."
            )
        super().__init__(model=model, trainer=Part(), callbacks=Part(), **values)
        self.exclude_from_check("callbacks")
        self._random_state = random_state()
        self._fitted_in = 0

    def sync(self) -> None:
        super().sync()
        self._random_state = random_state()

    @property
    def resumes(self) -> bool:
        """True if a Trainer has begun to train: the next one continues from its checkpoint."""
        return self.trainer.content is not None

    @property
    def checkpoint(self) -> dict[str, Any]:
        """The checkpoint from which a Trainer resumes."""
        return {**self.trainer.content, **self.callbacks.content}

    def keep(self, checkpoint: dict[str, Any]) -> None:
        """Let the next Trainer resume from ``checkpoint``."""
        self.callbacks.content = {key: checkpoint[key] for key in ("callbacks", METRICS)}
        self.trainer.content = {key: value for key, value in checkpoint.items() if key not in self.callbacks.content}

    @property
    def random_state(self) -> bytes:
        """The random state with which this world begins."""
        return self._random_state

    def begin_fit(self) -> None:
        """Raise UsageError at the second ``fit`` of a world: both would have the same checkpoint."""
        if self._fitted_in == elastic.generation():
            raise UsageError(
                "Trainer.fit() was called twice in the function decorated with @elasticstate.run, and a state has the "
                "progress of one fit(). Train with one fit(), or begin another job."
            )
        self._fitted_in = elastic.generation()

    def _step_sources(self) -> None:
        """Return None: the optimizers are the Trainer's, and ``state.trainer`` gets their state at each tick."""

    def _owned(self) -> set[int]:
        """Also the tensors of the optimizers, which ``step`` alone writes."""
        found = set(super()._owned())
        for optimizer in (self.trainer.content or {}).get("optimizer_states", ()):
            for entry in optimizer["state"].values():
                found.update(map(id, entry.values() if isinstance(entry, dict) else ()))
        return found
