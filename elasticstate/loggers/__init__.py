"""Metrics and progress bars in an elastic job: one curve without gaps and without repeated steps, and one bar.

::

    from elasticstate.loggers import Log, ProgressBar, TensorBoard

    log = Log(TensorBoard("runs/digits"), ProgressBar(total=1000))
    state = elasticstate.TorchState(model=model, optimizer=optimizer, step=0, log=log)

    @elasticstate.run
    def train(state):
        while state.step < 1000:
            ...
            state.step += 1
            state.log(state.step, loss=loss)
            state.commit()
        state.log.close()

docs/guides/loggers.md has the guarantee and its limits.
"""

from __future__ import annotations

from elasticstate.loggers.log import Log
from elasticstate.loggers.sinks import Point, ProgressBar, Sink, TensorBoard, WandB

__all__ = ["Log", "Point", "ProgressBar", "Sink", "TensorBoard", "WandB"]
