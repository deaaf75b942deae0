"""``unwinding.py LOG MODE``: code of the script that runs after a tick has raised the interrupt of a planned change.

In most modes this code changes the state, each in another way. Each worker logs the state with which a world begins.
"""

from __future__ import annotations

import fast_import  # noqa: F401  # isort: skip - first

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

folder, mode = Path(sys.argv[1]), sys.argv[2]
log = open(folder / f"{os.environ['ELASTICSTATE_WORKER'].replace(':', '-')}.jsonl", "a", buffering=1)  # noqa: SIM115
EVERY = 3 if mode.endswith("between_commits") else 1
catches = 0
LAST_S = 1.0  # after the second world has begun

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0, scale=1.0, table=torch.ones(4), left=0)


def note(what: str, **fields: object) -> None:
    shared = {"generation": elastic.generation(), "rank": elastic.rank(), "step": state.step, "left": state.left}
    log.write(json.dumps({"what": what, "time": time.time(), **shared, **fields}) + "\n")


def digest() -> str:
    tensors = [
        *model.parameters(),
        *(optimizer.state[p]["momentum_buffer"] for p in model.parameters() if p in optimizer.state),
    ]
    content = b"".join(t.detach().numpy().tobytes() for t in [*tensors, state.table])
    return hashlib.sha256(content + repr((state.step, state.scale, state.left)).encode()).hexdigest()[:12]


class OtherWeights:
    """Other weights for a while, and a write that torch does not count."""

    def __enter__(self) -> None:
        self.kept = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.mul_(0.5)

    def __exit__(self, *_: object) -> None:
        for p, kept in zip(model.parameters(), self.kept, strict=True):
            p.data.copy_(kept)


class InCycle:
    """Changes the state when the garbage collector finds it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        state.table[0] += 1


def batches() -> Iterator[torch.Tensor]:
    """A loader that changes the state when the loop leaves it: after the exception has left the function."""
    try:
        while True:
            yield torch.randn(4, 8)
    finally:
        if mode.startswith("generator"):
            state.scale *= 0.99
            state.left += 1


def end_tick() -> None:
    state.commit(every=EVERY)


def changing(change: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        try:
            end_tick()
        finally:
            change()

    return run


def scale() -> None:
    state.scale *= 0.99


def average() -> None:
    """A collective of all ranks, which all leave together."""
    dist.all_reduce(state.table)
    state.table /= elastic.size()
    state.table += 0.25


def weights() -> None:
    with OtherWeights():
        end_tick()


def swallowed() -> None:
    """The loop goes on, and trains a step more. "always": again and again, also after the other rank has ended."""
    global catches
    try:
        end_tick()
    except:  # noqa: E722 - a script may do this
        note("caught")
        catches += 1
        if catches > 1 and not mode.startswith("always"):
            raise


def again() -> None:
    try:
        end_tick()
    except:
        state.scale += 1
        state.commit()  # raises the interrupt, too
        raise


ENDS: dict[str, Callable[[], None]] = {
    "finally": changing(scale),
    "numpy": changing(lambda: state.table.numpy().__iadd__(1)),
    "random": changing(lambda: torch.rand(3)),
    "collective": changing(average),
    "again": again,
    "weights": weights,
    "swallowed": swallowed,
    "always": swallowed,
    "generator": end_tick,
    "cycle": end_tick,
    "return": end_tick,
    "nothing": end_tick,
}


@elastic.run
def train(state: elastic.TorchState) -> None:
    ddp = DistributedDataParallel(model, init_sync=False)
    note("enter", digest=digest(), random=[torch.rand(1).item(), elastic.rank()])
    torch.manual_seed(state.step)
    until = time.time() + LAST_S
    kept = InCycle() if mode.startswith("cycle") else None  # garbage when the interrupt has left this function
    for batch in batches():
        stop = torch.tensor(float(elastic.generation() > 1 and time.time() > until))
        with contextlib.suppress(RuntimeError) if mode == "always" else contextlib.nullcontext():
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
            state.step += 1
            time.sleep(0.02)
            dist.all_reduce(stop)
        if stop:
            break
        if mode.startswith("return"):
            with contextlib.suppress(GeneratorExit):
                try:
                    end_tick()
                except elastic.HostsUpdatedInterrupt:
                    note("caught")
                    return
        else:
            ENDS[mode.split("-")[0]]()
    del kept
    note("end", digest=digest())


train(state)
