"""A log through random deaths of rank 0, against an oracle: each step written once, in order, with its last value."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

import elasticstate as elastic
from elasticstate.errors import UsageError
from elasticstate.loggers import (
    Log,
    Point,
    Sink,
    log as log_module,
)

EVERY, COMMIT_EVERY, STEPS = 3, 2, 14
ALL = log_module._ALL


class Disk:
    """The rows that outlive all processes."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float]] = []


class Buffered(Sink):
    """A sink that puts rows on the disk late: ``flushed`` rows of those that it has at each call. Rows can be lost."""

    def __init__(self, disk: Disk, flushed: Callable[[int], int]) -> None:
        self._disk, self._flushed = disk, flushed
        self._buffer: list[tuple[int, float]] = []
        self._present: set[int] = set()

    def open(self, first: int) -> None:
        self._present = {step for step, _ in self._disk.rows if step >= first}

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.step not in self._present:
                self._buffer.append((point.step, point.values["loss"]))
        self._flush(self._flushed(len(self._buffer)))

    def durable(self, written: int) -> int:
        self._flush(self._flushed(len(self._buffer)))
        return max((step for step, _ in self._disk.rows), default=-1)

    def close(self) -> None:
        self._flush(len(self._buffer))

    def _flush(self, rows: int) -> None:
        self._disk.rows += self._buffer[:rows]
        del self._buffer[:rows]


class Worker:
    """One rank: its state and log. ``saved`` is its newest commit: its step and the content of its log."""

    def __init__(self, sink: Sink) -> None:
        self.state = elastic.TorchState(step=0, log=Log(sink, every=EVERY))
        self.saved: tuple[int, dict[str, object]] = (0, self.state.log.state_dict())
        self.contained = -1  # the last step in the commit
        self.calls = 0


class Fault(NamedTuple):
    """The step and the place at which rank 0 dies. Survivors may have committed the step, or not."""

    step: int
    place: str  # before the exchange, after it, or after the commit


PLACES = ("before", "after", "committed")
FAULTS = st.lists(
    st.builds(Fault, st.integers(1, STEPS), st.sampled_from(PLACES)), max_size=5, unique_by=lambda fault: fault.step
)


@settings(max_examples=300, deadline=None)
@given(faults=FAULTS, seed=st.randoms(use_true_random=False))
def test_each_step_is_written_once_whenever_rank_0_dies(faults: list[Fault], seed: Random) -> None:
    disk = Disk()
    workers = [Worker(Buffered(disk, lambda rows: seed.randint(0, rows))) for _ in range(len(faults) + 2)]
    remaining = {fault.step: fault.place for fault in faults}
    step, world = 0, 0
    values: dict[int, float] = {}
    while step < STEPS:
        step += 1
        values[step] = step + world / 100  # a step that is trained again has another value
        died = run_step(workers, step, values[step], remaining.pop(step, ""), seed)
        if died:
            del workers[0]
            step, world = restore(workers), world + 1
    exchange(workers, [ALL] * len(workers))
    workers[0].state.log._close_sinks()
    assert disk.rows == sorted(values.items())


def run_step(workers: list[Worker], step: int, value: float, place: str, seed: Random) -> bool:
    """Train one step on all ranks. Return True if rank 0 dies in it."""
    for worker in workers:
        add(worker, step, value)
    if place == "before":
        return True
    if step_is_due(workers, EVERY):
        exchange(workers, [worker.contained for worker in workers])
    if place == "after":
        return True
    # Ranks do not wait for each other in a commit: if rank 0 dies, some have made it.
    first = seed.randint(1, len(workers)) if place == "committed" else 0
    for number, worker in enumerate(workers):
        if step % COMMIT_EVERY == 0 and (number >= first or not first):
            worker.saved = step, copy.deepcopy(worker.state.log.state_dict())
            worker.contained = step
    return place == "committed"


def add(worker: Worker, step: int, value: float) -> None:
    """Log as ``Log.__call__`` does, without its exchange."""
    log = worker.state.log
    log._every = ALL
    log(step, loss=value)
    worker.calls += 1


def step_is_due(workers: list[Worker], every: int) -> bool:
    assert len({worker.calls for worker in workers}) == 1
    return workers[0].calls % every == 0


def exchange(workers: list[Worker], committed: list[int]) -> None:
    """Exchange as all ranks do at the same time. The first worker is rank 0."""
    logs = [worker.state.log for worker in workers]
    offers = [as_rank(rank, log._offer, step) for rank, (log, step) in enumerate(zip(logs, committed, strict=True))]
    least = [min(numbers) for numbers in zip(*offers, strict=True)]
    for rank, log in enumerate(logs):
        as_rank(rank, log._apply, *least)


def as_rank(rank: int, function: Callable[..., Any], *args: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module, "world_rank", lambda: rank)
        return function(*args)


def restore(workers: list[Worker]) -> int:
    """Let all begin with the newest commit among them. Return its step."""
    newest = max(workers, key=lambda worker: worker.saved[0])
    for worker in workers:
        worker.saved = copy.deepcopy(newest.saved)
        worker.contained = newest.saved[0]
        worker.state.log.load_state_dict(copy.deepcopy(newest.saved[1]))
        worker.calls = 0
    return newest.saved[0]


def test_what_no_failure_can_repeat_is_written() -> None:
    """Without a job: the step in hand may get more values."""
    disk = Disk()
    state = elastic.TorchState(step=0, log=Log(Buffered(disk, lambda rows: rows), every=1))

    for step in range(1, 4):
        state.log(step, loss=step)
        state.log(step, {"a/b": torch.tensor(0.5)})
        state.commit()
    assert disk.rows == [(1, 1.0), (2, 2.0)]
    state.log.close()
    assert disk.rows == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert state.log.state_dict() == {"points": [(3, {"loss": 3.0, "a/b": 0.5})]}


def test_a_worker_that_is_no_longer_rank_0_abandons_its_sinks() -> None:
    class Watched(Sink):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def write(self, points: Sequence[Point]) -> None:
            self.calls.append("write")

        def abandon(self) -> None:
            self.calls.append("abandon")

    sinks = [Watched(), Watched()]
    workers = [Worker(sink) for sink in sinks]
    as_rank(0, lambda: add(workers[0], 1, 0.5))
    as_rank(1, lambda: add(workers[1], 1, 0.5))
    exchange(workers, [1, 1])
    exchange(workers[::-1], [1, 1])
    exchange(workers[::-1], [1, 1])
    assert [sink.calls for sink in sinks] == [["write", "abandon"], ["write"]]


def test_bad_input_is_named() -> None:
    with pytest.raises(UsageError, match=r"every=0\): must be at least 1"):
        Log(every=0)
    with pytest.raises(UsageError, match=r"Log\(str\): must be a Sink"):
        Log("runs/digits")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="belongs to no state"):
        Log()(1, loss=1.0)
    state = elastic.TorchState(log=Log())
    state.log(3, loss=1.0)
    with pytest.raises(UsageError, match=r"log\(2\): the last step was 3"):
        state.log(2, loss=1.0)
    other = elastic.TorchState(log=Log())
    with pytest.raises(UsageError, match=r"log\(-1\)"):
        other.log(-1)


def test_a_state_with_a_log_is_freed_at_once() -> None:
    state = elastic.TorchState(log=Log())
    alive = weakref.ref(state)
    del state
    assert alive() is None
