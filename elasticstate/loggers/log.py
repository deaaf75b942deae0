"""Log: the points that a job has logged and rank 0 has not safely written yet. A value of the state.

The points are part of each commit, so any worker that becomes rank 0 has them. The ranks exchange two numbers from time
to time:

* the last step that *every* rank has committed. Rank 0 writes up to there: no failure can make the job repeat these
  steps with other values.
* the last step that is *durable*: rank 0 could die now, and it stays written. Up to there, all ranks drop the points.

A new rank 0 writes all points that it still has. Each sink skips those that it finds.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

import torch
import torch.distributed as dist

import elasticstate as elastic
from elasticstate.errors import UsageError
from elasticstate.extension import job_id, ticks, world_generation, world_rank

# ----------------------------------------------------------------------------------------------------------------- sink
# Sink: a place that rank 0 writes the points of a log to.


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


# ------------------------------------------------------------------------------------------------------------------ log


_ALL = torch.iinfo(torch.int64).max
_NONE = -1


class Log:
    """Log of one job. Give it to the state under any name, and call it once or more in each step, *on all ranks*::

        state = elastic.TorchState(model=model, optimizer=optimizer, step=0, log=Log(TensorBoard("runs/digits")))
        ...
        state.log(state.step, loss=loss, accuracy=accuracy)
        state.log(state.step, {"loss/train": loss})
        state.commit()

    Rank 0 writes the values of its own calls: all-reduce a loss to log its mean. ``check()`` leaves the log out.
    Several calls with the same step are one point. At the end of the training, call ``close()`` on all ranks.

    Args:
        sinks: where to write: ``TensorBoard``, ``WandB``, ``ProgressBar``, or a ``Sink`` of your own.
        every: exchange with the other ranks at each so many calls. One small collective, after which rank 0 writes.

    Raises UsageError if ``every`` is less than 1, or a sink is not a Sink.
    """

    def __init__(self, *sinks: Sink, every: int = 10) -> None:
        if every < 1:
            raise UsageError(f"Log(every={every}): must be at least 1")
        for sink in sinks:
            if not isinstance(sink, Sink):
                raise UsageError(f"Log({type(sink).__name__}): must be a Sink, such as TensorBoard(folder)")
        self._sinks = sinks
        self._every = every
        self._points: list[tuple[int, dict[str, float]]] = []  # not durable, or the last one
        self._times: dict[int, float] = {}  # of this worker, by step
        self._made: dict[int, tuple[int, int]] = {}  # step -> (generation, tick) whose commit has it, if made here
        self._state: weakref.ref[elastic.State] | None = None
        self._world = (0, 0)  # generation, and calls in it
        self._is_used = self._is_open = False  # by this process, as rank 0
        self._written = _NONE  # last step that this process has written

    # ------------------------------------------------------------------------------------------------ a value of State

    def attach_to_state(self, state: elastic.State, name: str) -> None:
        """Remember the state whose commits contain this log. ``State`` calls it."""
        self._state = weakref.ref(state)
        state.exclude_from_check(name)  # ranks may log values of their own

    def state_dict(self) -> dict[str, Any]:
        return {"points": list(self._points)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._points = list(state_dict["points"])
        self._made.clear()  # they come from a commit

    # --------------------------------------------------------------------------------------------------------- logging

    def __call__(self, step: int, values: Mapping[str, SupportsFloat] | None = None, /, **more: SupportsFloat) -> None:
        """Log values at a step. Call it on all ranks, before the commit that ends the step.

        Raises UsageError if ``step`` is negative or less than that of an earlier call, or without a state.
        """
        state = self._state() if self._state is not None else None
        if state is None:
            raise UsageError("This Log belongs to no state. Pass it to the state: TorchState(..., log=Log(...)).")
        last = self._points[-1][0] if self._points else 0
        if step < last:
            raise UsageError(f"log({step}): the last step was {last}. Log steps that do not decrease, from 0.")
        found = {name: float(value) for name, value in {**(values or {}), **more}.items()}
        if self._points and last == step:
            self._points[-1] = step, {**self._points[-1][1], **found}
        else:
            self._points.append((step, found))
        self._times.setdefault(step, time.time())
        self._made[step] = world_generation(), ticks(state) + 1
        if world_rank() == 0:
            self._is_used = True
            for sink in self._sinks:
                sink.show(self._point(*self._points[-1]))
        generation, calls = self._world
        self._world = world_generation(), (calls + 1 if generation == world_generation() else 1)
        if self._world[1] % self._every == 0:
            self._exchange(self._committed(state))

    def close(self) -> None:
        """Write all points, and close the sinks. Call it on all ranks, after the last commit of the training."""
        self._exchange(_ALL)
        self._close_sinks()
        _least(0)  # no rank goes on before all is written
        self._drop(_ALL)

    # -------------------------------------------------------------------------------------------------------- exchange

    def _exchange(self, committed: int) -> None:
        self._apply(*_least(*self._offer(committed)))

    def _offer(self, committed: int) -> tuple[int, int]:
        """Return what this rank contributes to an exchange: the last steps committed here, and durable at rank 0."""
        return committed, (self._durable() if world_rank() == 0 else _ALL)

    def _apply(self, committed: int, durable: int) -> None:
        """Drop and, on rank 0, write the points that the exchange allows."""
        self._drop(durable)
        if world_rank() == 0:
            self._write([point for point in self._unwritten() if point.step <= committed])
        elif self._is_used:  # this worker was rank 0 in an earlier world
            self._is_used = self._is_open = False
            for sink in self._sinks:
                sink.abandon()

    def _committed(self, state: elastic.State) -> int:
        """Return the last step that this rank has committed. The point of the last call may still get more values."""
        newest = state.commits[0]
        steps: Iterable[int] = (step for step, _ in self._points[:-1])
        if newest is not None and newest.generation == 0:  # there is no job
            return max(steps, default=_NONE)
        made = self._made
        committed = (step for step in steps if step not in made or (newest is not None and made[step] <= newest))
        return max(committed, default=_NONE)

    def _durable(self) -> int:
        if not self._is_open:
            return self._written
        return min((sink.durable(self._written) for sink in self._sinks), default=self._written)

    def _drop(self, durable: int) -> None:
        self._points = [point for point in self._points[:-1] if point[0] > durable] + self._points[-1:]
        kept = {step for step, _ in self._points}
        self._made = {step: tick for step, tick in self._made.items() if step in kept}
        self._times = {step: at for step, at in self._times.items() if step in kept}

    def _unwritten(self) -> list[Point]:
        return [self._point(*point) for point in self._points if point[0] > self._written]

    def _write(self, points: Sequence[Point]) -> None:
        if not points:
            return
        for sink in self._sinks:
            if not self._is_open:
                sink.open(points[0].step)
            sink.write(points)
        self._is_used = self._is_open = True
        self._written = points[-1].step

    def _close_sinks(self) -> None:
        if not self._is_used:
            return
        self._is_used = self._is_open = False
        for sink in self._sinks:
            sink.close()

    def _point(self, step: int, values: dict[str, float]) -> Point:
        return Point(step, values, self._times.get(step, time.time()))


def _least(*numbers: int) -> list[int]:
    """Return the least of each of the numbers over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(numbers)
    device = elastic.device() if dist.get_backend() == dist.Backend.NCCL else torch.device("cpu")
    tensor = torch.tensor(numbers, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return [int(number) for number in tensor.tolist()]


# ------------------------------------------------------------------------------------------------------ transaction log
# TransactionLog: the file of an offline run of Weights & Biases, read while wandb writes it.
#
# The format is that of the log of LevelDB: blocks of 32 KiB with chunks, of which a record has one or more. wandb
# adds seven bytes at the beginning. Checked with wandb 0.31, which has no reader in Python.


_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_CHUNK = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _LAST = 1, 4


class TransactionLog:
    """Reader of the steps in one file. Each call of ``steps`` continues after the last whole record."""

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


# --------------------------------------------------------------------------------------------------------- progress bar
# ProgressBar: a sink that shows the step and the values of rank 0 in a bar of tqdm.


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
