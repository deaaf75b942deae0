"""Log: the points that a job has logged and rank 0 has not safely written yet. A value of the state.

The points are part of each commit, so any worker that becomes rank 0 has them. The ranks exchange two numbers from time
to time:

* the last step that *every* rank has committed. Rank 0 writes up to there: no failure can make the job repeat these
  steps with other values.
* the last step that is *durable*: rank 0 could die now, and it stays written. Up to there, all ranks drop the points.

A new rank 0 writes all points that it still has. Each sink skips those that it finds.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist

import elasticstate as elastic
from elasticstate.errors import UsageError
from elasticstate.extension import ticks, world_generation, world_rank
from elasticstate.loggers.sinks import Point, Sink

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
    The dashboard shows the values, too, as by ``report_metric``.
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
        self._hidden: set[str] = set()  # names that the dashboard does not show

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
        self._report(found)
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

    def _report(self, values: Mapping[str, float]) -> None:
        """Show values on the dashboard. A name that cannot be shown there is an ordinary one of the log."""
        for name, value in values.items():
            if name in self._hidden:
                continue
            try:
                elastic.report_metric(name, value)
            except UsageError as error:
                if not self._hidden:
                    logging.getLogger("elasticstate").warning(
                        "not all values of the log are on the dashboard: %s", error
                    )
                self._hidden.add(name)

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
            self._write([self._point(*point) for point in self._points if self._written < point[0] <= committed])
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
