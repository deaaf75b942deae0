"""PyTorch Lightning in an elastic job: ``import elasticstate.lightning``. elasticrun starts the script.

::

    model = Digits()  # a LightningModule
    loader = elasticstate.ElasticDataLoader(dataset, global_batch_size=64)

    @elasticstate.run
    def train(state):
        trainer = elasticstate.lightning.Trainer(state, max_epochs=20)
        trainer.fit(model, loader)

    train(elasticstate.lightning.LightningState(model))

``run`` calls ``train`` in each new world, so each world has a Trainer of its own. It resumes from the state: the
module, and the checkpoint of the last world's Trainer, kept in memory.
"""

from __future__ import annotations

from importlib import import_module

from elasticstate.errors import UsageError

try:
    import_module("lightning.pytorch")
except ModuleNotFoundError as error:
    if error.name not in ("lightning", "lightning.pytorch"):
        raise
    raise UsageError(
        "elasticstate.lightning requires PyTorch Lightning. Install it with pip install 'elasticstate[lightning]'."
    ) from None

from elasticstate.lightning.state import LightningState
from elasticstate.lightning.strategy import DDPStrategy
from elasticstate.lightning.trainer import LogLogger, Trainer

__all__ = ["DDPStrategy", "LightningState", "LogLogger", "Trainer"]
