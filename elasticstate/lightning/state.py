"""LightningState: a LightningModule, and the checkpoint of the Trainer that trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


# --------------------------------------------------------------------------------------------------------------- loader
# The training loader as Lightning sees it.


class TrainingBatches:
    """Adapter between Lightning's loops and an ElasticDataLoader. It ends the ticks.

    Lightning requests a batch when all that belongs to the previous batch is done: optimizer step, schedulers,
    callbacks, validation, logs. So this is the one place where the loops' progress is that of whole batches.

    Lightning counts the batches of an epoch from its beginning, the loader those that are left. ``len()`` returns the
    sum of the batches fetched before and those left. ``end_tick`` is called before each batch is fetched.

    Raises UsageError if ``loader`` cannot be used with Lightning.
    """

    def __init__(self, loader: object, end_tick: Callable[[], None]) -> None:
        if isinstance(loader, TrainingBatches):  # a CombinedLoader of the user keeps the one of the last epoch
            loader = loader._loader
        if not isinstance(loader, elastic.ElasticDataLoader):
            raise UsageError(
                f"The training loader is a {type(loader).__name__}, which would begin the epoch again in each new "
                "world. Replace it with one elasticstate.ElasticDataLoader(dataset, global_batch_size=...)."
            )
        if loader.micro_batch_size is not None:
            raise UsageError(
                f"ElasticDataLoader(micro_batch_size={loader.micro_batch_size}): Lightning steps after each batch. "
                "Remove micro_batch_size, and give the Trainer accumulate_grad_batches=."
            )
        self._loader: elastic.ElasticDataLoader = loader
        self._end_tick = end_tick
        self._fetched = 0  # batches of the present epoch

    @property
    def sampler(self) -> TrainingBatches:
        """This object: Lightning calls ``set_epoch`` of a loader's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``. Do nothing if it is the present epoch."""
        if epoch != self._loader.epoch:
            self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """Go to the first batch of ``epoch``, also from a later one: the job may have failed before its first tick."""
        self.load_state_dict({"loader": {"epoch": epoch, "consumed": 0, "seed": self._loader.seed}, "fetched": 0})

    @property
    def weight(self) -> float:
        """Factor for the mean loss of the current batch, see ElasticDataLoader."""
        return self._loader.weight

    def __len__(self) -> int:
        return self._fetched + self._loader.steps_left

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            self._end_tick()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._fetched += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict(), "fetched": self._fetched}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader.load_state_dict(state_dict["loader"])
        self._fetched = state_dict["fetched"]
