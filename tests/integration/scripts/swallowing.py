"""``swallowing.py LOG MODE``: a script that catches the errors of collectives. In world 1, rank 2 dies in step 10.

The state lists the steps that were trained on all ranks. At the end none may be missing.
"""

from __future__ import annotations

import fast_import  # noqa: F401  # isort: skip - first

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

folder, mode = Path(sys.argv[1]), sys.argv[2]
EVERY = 4 if mode.endswith("seldom") else 1
kind = mode.split("-")[0]
log = open(folder / f"{os.environ['ELASTICSTATE_WORKER'].replace(':', '-')}.jsonl", "a", buffering=1)  # noqa: SIM115
STEPS, FAULT_AT = 20, 10

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0, trained=[])


def note(what: str, **fields: object) -> None:
    shared = {"generation": elastic.generation(), "rank": elastic.rank(), "step": state.step}
    log.write(json.dumps({"what": what, "time": time.time(), **shared, **fields}) + "\n")


class World:
    """The collectives of one world."""

    def __init__(self) -> None:
        self.ddp = DistributedDataParallel(model, init_sync=False)
        self.group = dist.new_group(list(range(elastic.size())))

    def backward(self) -> None:
        optimizer.zero_grad()
        self.ddp(torch.ones(2, 4)).mean().backward()

    def reduce(self) -> None:
        dist.all_reduce(torch.ones(3))

    def late(self) -> None:
        """The wait for an operation that is running."""
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        assert work is not None
        time.sleep(0.01)
        work.wait()

    def subgroup(self) -> None:
        dist.all_reduce(torch.ones(3), group=self.group)

    def objects(self) -> None:
        dist.all_gather_object([None] * elastic.size(), {"rank": elastic.rank()})

    def monitored(self) -> None:
        dist.monitored_barrier()

    def thread(self) -> None:
        """An error on another thread, of which only the thread knows."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                dist.all_reduce(torch.ones(3))
            except RuntimeError as error:
                errors.append(error)

        other = threading.Thread(target=run)
        other.start()
        other.join()
        if errors:
            raise RuntimeError("a thread has failed") from None

    def point(self) -> None:
        size, rank = elastic.size(), elastic.rank()
        received = torch.zeros(3)
        if rank % 2:
            dist.recv(received, src=(rank - 1) % size)
            dist.send(torch.ones(3), dst=(rank + 1) % size)
        else:
            dist.send(torch.ones(3), dst=(rank + 1) % size)
            dist.recv(received, src=(rank - 1) % size)


def once(train_step: Callable[[], None]) -> None:
    train_step()
    optimizer.step()
    state.trained = [*state.trained, state.step]


def caught(train_step: Callable[[], None]) -> None:
    try:
        once(train_step)
    except RuntimeError as error:
        note("caught", error=str(error)[:60])


def suppressed(train_step: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):
        once(train_step)


def repeated(train_step: Callable[[], None]) -> None:
    for _ in range(3):
        try:
            return once(train_step)
        except RuntimeError as error:  # noqa: PERF203 - a script that tries again
            note("caught", error=str(error)[:60])
    return None


def tried(train_step: Callable[[], None]) -> None:
    """Try again until it works."""
    while True:
        with contextlib.suppress(RuntimeError):
            return once(train_step)
        time.sleep(0.1)


def end_tick() -> None:
    if kind != "commits":
        state.commit(every=EVERY)
        return
    try:
        state.commit()
    except elastic.CollectiveError:
        note("refused")
        state.commit()


@elastic.run
def train(state: Any) -> None:
    world = World()
    note("enter", trained=state.trained)
    is_first = elastic.generation() == 1
    names = {
        "commits": "backward",
        "suppress": "backward",
        "repeat": "backward",
        "ever": "backward",
        "gate": "reduce",
        "own": "reduce",
    }
    train_step = getattr(world, names.get(kind, "reduce" if kind in ("timeout", "ended") else kind))
    step = {"suppress": suppressed, "repeat": repeated, "ever": tried}.get(kind, caught)
    if kind == "ended" and is_first:
        end_a_group_early(world)
    while state.step < STEPS:
        if state.step == FAULT_AT and is_first and elastic.rank() == 2:
            if kind == "timeout":
                time.sleep(6)
            elif kind not in ("own", "ended"):
                os.kill(os.getpid(), signal.SIGKILL)
        if kind == "own" and state.step == FAULT_AT:
            caught(lambda: (_ for _ in ()).throw(RuntimeError("out of memory")))  # before any collective, on all ranks
        step(train_step)
        state.step += 1
        if kind == "gate" and state.step == FAULT_AT + 1 and is_first:
            state.step = STEPS
            note("returns")
            return
        end_tick()
    note("end", missing=sorted(set(range(state.step)) - set(state.trained)), trained=len(state.trained))


def end_a_group_early(world: World) -> None:
    """Destroy a group on one rank while the others still have it, as scripts may."""
    if elastic.rank() == 0:
        dist.destroy_process_group(world.group)
        del world.group
    time.sleep(0.3)


train(state)
