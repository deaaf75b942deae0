"""Sinks: places that rank 0 writes the points of a log to. TensorBoard, Weights & Biases, and a progress bar."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from elasticstate.errors import UsageError
from elasticstate.extension import job_id


class Point(NamedTuple):
    """The values of one step. ``time``: when this worker logged them, in Unix seconds."""

    step: int
    values: dict[str, float]
    time: float


class Sink:
    """Base class of sinks. Derive one of your own from it, with the methods that it needs.

    Only rank 0 calls the methods. After a change of rank 0, the sink of another process is opened. It gets the points
    again that were not durable, and must skip those that it finds already written.
    """

    def open(self, first: int) -> None:
        """Prepare to write. ``first``: no step before this one will be written."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points, in the order of their steps. They are committed: no later call replaces them."""

    def durable(self, written: int) -> int:
        """Return a step up to which the written points outlive this process. ``written``: the last step written."""
        return written

    def show(self, point: Point) -> None:
        """Show a point as soon as it is logged. It may be shown again after a failure."""

    def close(self) -> None:
        """Finish, so that all written points outlive this process. ``open`` may follow."""

    def abandon(self) -> None:
        """Stop writing, because another worker has become rank 0. ``open`` may follow."""
        self.close()


def job_name() -> str:
    """Return a name of this job for files: unique among all jobs, and the same in all its workers."""
    return re.sub(r"[^A-Za-z0-9]+", "-", job_id())


def required(module: str, package: str, user: str) -> Any:
    """Import a module. Raises UsageError if its package is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise UsageError(f"{user} needs the package {package}. Run: pip install {package}") from None


def sync_file(path: Path) -> None:
    """Write a file to its disk or server, so that it outlives this host."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class ProgressBar(Sink):
    """A bar of tqdm on stderr, which rank 0 alone shows. Needs the package tqdm.

    A new rank 0 continues the bar at its step.

    Args:
        total: the number of steps.
        options: those of ``tqdm.tqdm``, except ``total`` and ``initial``: desc, unit, mininterval, ….
    """

    def __init__(self, total: int, **options: Any) -> None:
        self._total = total
        self._options = options
        self._tqdm = required("tqdm", "tqdm", "ProgressBar").tqdm
        self._bar: Any = None

    def show(self, point: Point) -> None:
        if self._bar is None:
            self._bar = self._tqdm(total=self._total, initial=max(0, point.step - 1), **self._options)
        self._bar.set_postfix(point.values, refresh=False)
        self._bar.update(point.step - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


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


# ----------------------------------------------------------------------------------------------------- Weights & Biases


_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_CHUNK = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _LAST = 1, 4
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


class TransactionLog:
    """Reader of the steps in the file of an offline run, while wandb writes it.

    Each call of ``steps`` continues after the last whole record. The format is that of the log of LevelDB: blocks of
    32 KiB with chunks, of which a record has one or more. wandb adds seven bytes at the beginning. Checked with wandb
    0.31, which has no reader in Python.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = _HEADER_BYTES
        self._messages = required("wandb.proto.wandb_internal_pb2", "wandb", "WandB")

    def steps(self) -> Iterator[int]:
        """Yield the steps of the rows of the history that were written since the last call."""
        for values in self.rows():
            if "_step" in values:
                yield int(values["_step"])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the history that were written since the last call."""
        for data in self._records():
            record = self._messages.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}

    def fence(self) -> None:
        """Replace the file by a copy of the records that were read. Its writer writes to a file without a name then.

        The process of wandb outlives a worker that was killed, and writes its last rows late.
        """
        copy = self.path.with_suffix(".copy")
        with open(copy, "wb") as file:
            file.write(self.path.read_bytes()[: self._position])
            file.flush()
            os.fsync(file.fileno())
        copy.replace(self.path)

    def _records(self) -> Iterator[bytes]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self._position)
            data, start, record = file.read(), self._position, b""
        position = start
        while position + _CHUNK.size <= start + len(data):
            rest = _BLOCK_BYTES - position % _BLOCK_BYTES
            if rest < _CHUNK.size:  # too short for a chunk
                position += rest
                continue
            _, length, kind = _CHUNK.unpack_from(data, position - start)
            end = position + _CHUNK.size + length
            if kind == 0 or end > start + len(data):
                return  # not written yet
            record += data[position - start + _CHUNK.size : end - start]
            position = end
            if kind in (_FULL, _LAST):
                self._position = position
                yield record
                record = b""
