"""LogCallback: what a Trainer logs, in a Log of elasticstate."""

from __future__ import annotations

from typing import Any

import transformers

from elasticstate.huggingface.state import TrainingState


class LogCallback(transformers.TrainerCallback):
    """Passes what the Trainer logs to a ``Log`` in the state, so that each step is written once::

        @run(log=Log(TensorBoard("runs")))
        def main(state):
            args = TrainingArguments(..., report_to="none")
            trainer = Trainer(state, ..., callbacks=[LogCallback(state)])

    The tags are those of Transformers: ``train/loss``, ``eval/loss``, … Values that differ by rank, such as times, are
    those of rank 0.

    Args:
        state: the state that ``run`` passes to the function.
        name: name of the log in the state.
    """

    def __init__(self, state: TrainingState, name: str = "log") -> None:
        self._log = getattr(state, name)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        numbers = {_tag(name): value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        self._log(state.global_step, numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._log.close()


def _tag(name: str) -> str:
    for kind in ("eval", "test"):
        if name.startswith(f"{kind}_"):
            return f"{kind}/{name[len(kind) + 1 :]}"
    return f"train/{name}"
