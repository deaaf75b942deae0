"""WandB: a sink that writes an offline run of Weights & Biases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elasticstate.errors import UsageError
from elasticstate.loggers.log import (
    Point,
    Sink,
    TransactionLog,
    job_name,
    required,
)
from elasticstate.loggers.tensorboard import sync_file

_FINISH_S = 30.0
_INTERVAL_S = 0.01


class WandB(Sink):
    """An offline run of Weights & Biases: a folder ``offline-run-…-<id>`` of each process that was rank 0.

    All of them have the same run id, so ``wandb sync`` makes one run of them. Needs the package wandb.

    Args:
        folder: where wandb makes its folder ``wandb``. Let all hosts share it.
        id: of the run. Default: the id of the job.
        options: those of ``wandb.init``, except ``dir``, ``mode`` and ``resume``: project, name, config, settings, ….
    """

    def __init__(self, folder: str = ".", *, id: str | None = None, **options: Any) -> None:
        for name in ("dir", "mode", "resume"):
            if name in options:
                raise UsageError(f"WandB({name}=...): remove it. The runs are in WandB(folder), offline, and resumed.")
        self._folder = folder
        self._id = id or job_name()
        self._options = options
        self._wandb = required("wandb", "wandb", "WandB")
        self._run: Any = None
        self._file: TransactionLog | None = None
        self._present: set[int] = set()
        self._durable = -1
        self._last = -1  # the last row that wandb was given

    def open(self, first: int) -> None:
        self._present = set()
        for path in Path(self._folder, "wandb").glob(f"offline-run-*/run-{self._id}.wandb"):
            log = TransactionLog(path)
            self._present.update(step for step in log.steps() if step >= first)
            log.fence()
        self._durable = max(self._present, default=-1)

    def write(self, points: Sequence[Point]) -> None:
        new = [point for point in points if point.step not in self._present]
        if new and self._run is None:
            self._start()
        for point in new:
            self._run.log(point.values, step=point.step, commit=True)
            self._last = point.step if point.values else self._last  # wandb writes no empty row

    def _start(self) -> None:
        Path(self._folder).mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            dir=self._folder, id=self._id, mode="offline", resume="allow", reinit="create_new", **self._options
        )
        self._file = TransactionLog(Path(self._run.dir).parent / f"run-{self._id}.wandb")

    def durable(self, written: int) -> int:
        """Read the file of the run: wandb writes to it in a process of its own, with a delay of up to 15 s."""
        if self._file is not None and (new := max(self._file.steps(), default=-1)) > self._durable:
            sync_file(self._file.path)
            self._durable = new
        return self._durable

    def close(self) -> None:
        """Finish the run. Raises OSError if wandb has not written the last row after a while."""
        if self._run is None:
            return
        self._run.finish()
        deadline = time.monotonic() + _FINISH_S
        while self.durable(self._last) < self._last:
            if time.monotonic() > deadline:
                raise OSError(f"wandb has finished the run, but {self._run.dir} has no row of step {self._last}.")
            time.sleep(_INTERVAL_S)
        self._run = self._file = None

    def abandon(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = self._file = None
