"""Elastic training with ``transformers.Trainer``, and with a loop that uses ``accelerate.Accelerator``.

::

    from elasticstate.huggingface import Trainer, run

    @run
    def main(state):
        args = TrainingArguments(...)
        trainer = Trainer(state, model=model, args=args, train_dataset=dataset)
        trainer.train()

    main()

docs/guides/huggingface.md has both ways, and what is not supported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from elasticstate.errors import UsageError

if TYPE_CHECKING:
    from elasticstate.huggingface.accelerator import Accelerator
    from elasticstate.huggingface.state import TrainingState, run
    from elasticstate.huggingface.trainer import ElasticTrainer, LogCallback, Trainer

_HOMES = {
    "Accelerator": "accelerator",
    "ElasticTrainer": "trainer",
    "LogCallback": "trainer",
    "Trainer": "trainer",
    "TrainingState": "state",
    "run": "state",
}

__all__ = ["Accelerator", "ElasticTrainer", "LogCallback", "Trainer", "TrainingState", "run"]


def __getattr__(name: str) -> object:
    """Import a name when it is first used: only the Trainer needs Transformers, whose import takes a second."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("accelerate", "transformers"):
            raise
        raise UsageError(
            f"elasticstate.huggingface.{name} needs {error.name}, which is not installed. Run: pip install "
            "'elasticstate[huggingface]'"
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
