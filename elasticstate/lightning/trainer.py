"""Trainer: Lightning's Trainer in the present world, with a commit after each optimizer step."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import Logger

import elasticstate as elastic
from elasticstate.compat import libraries
from elasticstate.errors import NotInWorldError, UsageError
from elasticstate.extension import set_random_state
from elasticstate.lightning.state import METRICS, LightningState
from elasticstate.lightning.strategy import IN_MEMORY, DDPStrategy


class Trainer(pl.Trainer):
    """Lightning's Trainer for one world. Build it inside the function decorated with ``@elasticstate.run``.

    ``fit`` resumes where the state stands, also in the middle of an epoch. It ends a tick after each optimizer step,
    when callbacks, validation and logs of the batch are done.

    Args:
        state: the state that ``run`` passed to the function.
        commit_every: commit at each ``commit_every``-th tick of a world, see ``State.commit``.
        strategy: "auto", "ddp", or an ``elasticstate.lightning.DDPStrategy``.
        options: for ``lightning.pytorch.Trainer``, except ``devices``, ``num_nodes`` and
            ``reload_dataloaders_every_n_epochs``. ``use_distributed_sampler`` is False by default.

    Raises:
        UsageError: an option cannot work in an elastic job, or there is no world. The message names the remedy.
    """

    def __init__(
        self,
        state: LightningState,
        *,
        commit_every: int = 1,
        strategy: str | pl.strategies.Strategy = "auto",
        **options: Any,
    ) -> None:
        if not isinstance(state, LightningState):
            raise UsageError(
                f"Trainer({type(state).__name__}): the first argument must be the LightningState that the function "
                "decorated with @elasticstate.run gets."
            )
        if commit_every < 1:
            raise UsageError(f"commit_every={commit_every}: must be at least 1 (1 commits after each optimizer step)")
        try:
            self._generation = elastic.generation()
        except NotInWorldError:
            raise UsageError(
                "There is no world yet. Build the Trainer inside the function decorated with @elasticstate.run."
            ) from None
        _check_options(options)
        self._elastic_state, self._commit_every = state, commit_every
        self._last_step: int | None = None
        self._files_at: dict[object, int] = {}  # for the last commits: how many changes to files they know
        self._ddp = _elastic_ddp(strategy, state)
        self._ddp.set_world_ranks()  # Lightning prints on rank 0, from now on
        options["callbacks"] = [*_checked_callbacks(options.get("callbacks")), _Resume(self._ddp)]
        options.setdefault("use_distributed_sampler", False)
        # Lightning asks for the number of batches when it loads the loader: it changes with the world, in mid-epoch.
        options["reload_dataloaders_every_n_epochs"] = 1
        super().__init__(strategy=self._ddp, devices=1, num_nodes=elastic.size(), **options)
        libraries.keep_signal_handlers(self)

    def fit(
        self,
        model: pl.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train ``model``, the module of the state. Arguments: see ``lightning.pytorch.Trainer.fit``.

        ``ckpt_path`` counts at the beginning of a job; later, the state has the newer checkpoint.

        Raises UsageError if the Trainer was built in another world, or at a second call in the same world.
        """
        if self._generation != elastic.generation():
            raise UsageError(
                f"This Trainer was built in world {self._generation}, and this is world {elastic.generation()}. Build "
                "a new Trainer in each world, inside the function decorated with @elasticstate.run."
            )
        if model is not self._elastic_state.model:
            raise UsageError(
                f"fit({type(model).__name__}): not the module of the state. Pass the module that was given to "
                "LightningState, not a compiled one."
            )
        self._elastic_state.begin_fit()
        if self._elastic_state.resumes:
            ckpt_path, weights_only = IN_MEMORY, False
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
        self._ddp.files.settle(self._ddp.files.count)

    def end_tick(self) -> None:
        """End the tick of the previous batch. Do nothing if no optimizer has stepped since the last tick."""
        state, step = self._elastic_state, self.global_step
        if self._last_step is None and state.resumes:
            libraries.end_restart(self, state.checkpoint["elasticstate"]["logger_step"])
        elif step != self._last_step:
            checkpoint = self._ddp.take_checkpoint(self)
            assert self._ddp.batches is not None
            checkpoint[METRICS] = dict(self.callback_metrics)
            checkpoint["elasticstate"] = {
                "batches": self._ddp.batches.state_dict(),
                "dirpaths": [callback.dirpath for callback in _model_checkpoints(self)],
                "logger_step": libraries.logger_step(self),
                "files": self._ddp.files.state_dict(),
            }
            state.keep(checkpoint)
            count, before = self._ddp.files.count, state.commits[0]
            state.commit(every=self._commit_every)
            newest, previous = state.commits
            if newest != before:
                self._files_at = {newest: count, previous: self._files_at.get(previous, 0)}
                self._ddp.files.settle(self._files_at[previous])  # the others may lack the newest one
        self._last_step = step


class _Resume(pl.Callback):
    """Brings back, in a Trainer that resumes, what Lightning does not load from a checkpoint. Reports progress."""

    def __init__(self, ddp: DDPStrategy) -> None:
        self._ddp = ddp

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let each ModelCheckpoint write to the directory that it had in the first world."""
        state = self._ddp.elastic_state
        if stage == "fit" and state.resumes:
            directories = state.checkpoint["elasticstate"]["dirpaths"]
            for callback, directory in zip(_model_checkpoints(trainer), directories, strict=False):
                callback.dirpath = callback.dirpath or directory

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Undo what an attempt that was given up has done to checkpoint files."""
        state, files, known = self._ddp.elastic_state, self._ddp.files, set[str]()
        if state.resumes and "files" in state.checkpoint["elasticstate"]:  # not in commits of older versions
            files.load_state_dict(state.checkpoint["elasticstate"]["files"])
            known = _paths(state.checkpoint["callbacks"])
        if trainer.is_global_zero:
            files.undo([str(one.dirpath) for one in _model_checkpoints(trainer) if one.dirpath], known)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Continue the random numbers where the commit stands: Lightning has set the seed of seed_everything again.

        Callbacks and schedulers use the metrics of the last validation until the next one.
        """
        state = self._ddp.elastic_state
        if state.resumes:
            trainer.callback_metrics.update(state.checkpoint[METRICS])
            set_random_state(state.random_state)

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        self._ddp.elastic_state.progress()  # there are no ticks during these loops

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


def _paths(callbacks: dict[str, Any]) -> set[str]:
    """Return the paths of files in the states of callbacks, among other texts."""
    found: set[str] = set()
    for state in callbacks.values():
        for value in state.values() if isinstance(state, dict) else ():
            texts = value if isinstance(value, dict) else [value]
            found.update(os.path.abspath(text) for text in texts if text and isinstance(text, str))
    return found


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _elastic_ddp(strategy: str | pl.strategies.Strategy, state: LightningState) -> DDPStrategy:
    if isinstance(strategy, DDPStrategy):
        if strategy.elastic_state is not state:
            raise UsageError("strategy=: the DDPStrategy has another state than the Trainer. Pass the same to both.")
        return strategy
    if strategy in ("auto", "ddp"):
        return DDPStrategy(state)
    name = repr(strategy) if isinstance(strategy, str) else type(strategy).__name__
    raise UsageError(
        f"strategy={name} is not supported in an elastic job. Use 'ddp', or DDPStrategy(state, ...) of "
        "elasticstate.lightning to pass options to DDP."
    )


def _checked_callbacks(callbacks: Iterable[pl.Callback] | pl.Callback | None) -> list[pl.Callback]:
    found = [callbacks] if isinstance(callbacks, pl.Callback) else list(callbacks or ())
    for callback in found:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise UsageError(
                f"{type(callback).__name__} trains on its own before fit() does, and the state has the progress of one "
                "training. Search in another job, with Lightning's own Trainer."
            )
    return found


def _check_options(options: dict[str, Any]) -> None:
    """Raise UsageError for an option of Lightning's Trainer that cannot work in an elastic job."""
    for name in ("devices", "num_nodes"):
        if name in options:
            raise UsageError(
                f"{name}={options[name]!r}: elasticrun starts the workers, each with one device. Remove {name}=, and "
                "start the script with elasticrun -np N."
            )
    if "reload_dataloaders_every_n_epochs" in options:
        raise UsageError("reload_dataloaders_every_n_epochs is always 1 in an elastic job. Remove it.")
    plugins = options.get("plugins") or []
    for plugin in plugins if isinstance(plugins, Iterable) and not isinstance(plugins, str) else [plugins]:
        if isinstance(plugin, ClusterEnvironment):
            raise UsageError(f"plugins={type(plugin).__name__}: elasticstate is the cluster environment. Remove it.")


class LogLogger(Logger):
    """Logger of Lightning that passes metrics to a ``Log`` in the state, so that each step is written once::

        state = LightningState(model, log=Log(TensorBoard("runs")))
        ...
        trainer = Trainer(state, logger=LogLogger(state))

    All ranks log; rank 0 writes its own values. Hyperparameters are not logged.

    Args:
        state: the state that ``run`` passes to the function.
        name: name of the log in the state.
    """

    def __init__(self, state: LightningState, name: str = "log") -> None:
        super().__init__()
        self._log, self._name = getattr(state, name), name

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step is not None:
            self._log(int(step), metrics)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a log has numbers only."""

    def finalize(self, status: str) -> None:
        if status == "success":
            self._log.close()
