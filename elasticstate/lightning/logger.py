"""LogLogger: what a LightningModule logs, in a Log of elasticstate."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from lightning.pytorch.loggers import Logger

from elasticstate.lightning.state import LightningState


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
