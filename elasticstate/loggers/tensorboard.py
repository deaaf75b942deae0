"""TensorBoard: a sink that writes scalars to event files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elasticstate.loggers.log import (
    Point,
    Sink,
    job_name,
    required,
)


class TensorBoard(Sink):
    """Event files in ``folder``, for TensorBoard: one of each process that was rank 0. Needs the package tensorboard.

    On a folder that all hosts share, each point is written once. Otherwise each host has the points that it has written
    as rank 0. Together they have all points, some twice, with the same values.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._suffix = f".{job_name()}"
        self._writer: Any = None
        self._present: set[tuple[str, int]] = set()
        self._events = required("torch.utils.tensorboard", "tensorboard", "TensorBoard")

    def open(self, first: int) -> None:
        self._present = {(tag, step) for tag, step in self._read() if step >= first}

    def write(self, points: Sequence[Point]) -> None:
        new = [
            (name, value, point)
            for point in points
            for name, value in point.values.items()
            if (name, point.step) not in self._present
        ]
        if not new:
            return
        if self._writer is None:
            self._writer = self._events.SummaryWriter(str(self._folder), filename_suffix=self._suffix)
        for name, value, point in new:
            self._writer.add_scalar(name, value, point.step, walltime=point.time)
        self._writer.flush()
        for path in self._files(f".{os.getpid()}."):
            sync_file(path)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _files(self, part: str = "") -> list[Path]:
        return [path for path in self._folder.glob(f"events.out.tfevents.*{self._suffix}") if part in path.name]

    def _read(self) -> Iterator[tuple[str, int]]:
        """Yield tag and step of each scalar that this job has written."""
        loaders = required("tensorboard.backend.event_processing.event_file_loader", "tensorboard", "TensorBoard")
        for path in self._files():
            for event in loaders.EventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    yield value.tag, event.step


def sync_file(path: Path) -> None:
    """Write a file to its disk or server, so that it outlives this host."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
