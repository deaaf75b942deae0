"""Training script of the chaos test. It logs each tick, and its state allows a count of all steps and samples.

The lines of ``<log>/<host>-<slot>-<incarnation>.jsonl``: {"what": "enter" | "trained" | "tick" | "commit" | "final",
"pid": ..., "time": ..., "generation": g, "rank": r, "step": s, ...}. "enter" has "began", when the training began.
``<log>/<host>-<slot>.at``: "<generation> <rank> <pid>", the newest world that the slot has joined.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

ITEMS = 1000
BATCH = 4
COMMIT_EVERY = 3
ASK_EVERY = 10  # steps

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--stop", type=Path, required=True, help="train until this file exists")
parser.add_argument("--step-seconds", type=float, default=0.05)
args = parser.parse_args()
slot_id = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
log = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends


def note(what: str, **fields: object) -> None:
    log.write(json.dumps({"what": what, "pid": os.getpid(), "time": time.time(), **fields}) + "\n")


torch.manual_seed(os.getpid())  # newcomers start with other weights
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
state = elastic.TorchState(
    model=model,
    optimizer=optimizer,
    sampler=elastic.ElasticSampler(range(ITEMS)),
    seen=torch.zeros(ITEMS, dtype=torch.int64),  # number of times that each item was trained on, by any rank
    step=0,
    total=0,  # sum of the numbers of all steps
    ballast=torch.zeros(0),  # has another size at each step, so the commits have as well
)


def shrink() -> None:
    """Reset callback. Each member calls it once in each world, or receives its result with the state."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.999


state.register_reset_callbacks([shrink])


def digest() -> str:
    tensors = [p.detach() for p in model.parameters()]
    tensors += [optimizer.state[p]["exp_avg"] for p in model.parameters() if p in optimizer.state]
    numbers = (state.step, state.total, state.sampler.state_dict(), optimizer.param_groups[0]["lr"])
    data = [t.numpy().tobytes() for t in (*tensors, state.seen, state.ballast)] + [repr(numbers).encode()]
    return hashlib.sha256(b"".join(data)).hexdigest()


def batches() -> Iterator[list[int]]:
    """Yield the same number of batches on all ranks. The last batches may be short or empty."""
    indices = iter(state.sampler)
    each = -(-(ITEMS - state.sampler.consumed) // elastic.size())
    for _ in range(-(-each // BATCH)):
        yield list(islice(indices, BATCH))


def one_step(ddp: torch.nn.Module, batch: list[int]) -> None:
    x = torch.tensor(batch, dtype=torch.float32).reshape(-1, 1).expand(-1, 8) / ITEMS
    optimizer.zero_grad()
    (ddp(x) - x.sin().sum(1, keepdim=True)).square().sum().div(BATCH).backward()
    optimizer.step()
    done = torch.zeros(ITEMS + 1, dtype=torch.int64)
    done[batch] = 1
    done[ITEMS] = state.step
    dist.all_reduce(done)
    state.seen += done[:ITEMS]
    state.total += int(done[ITEMS]) // elastic.size()
    state.sampler.record_batch(BATCH * elastic.size())


def is_enough() -> bool:
    """Return True at the same step on all ranks. Every ASK_EVERY steps, rank 0 checks for the file."""
    if state.step % ASK_EVERY:
        return False
    flag = torch.tensor([int(args.stop.exists())])
    dist.broadcast(flag, 0)
    return bool(flag.item())


@elastic.run
def train(state: elastic.TorchState) -> int:
    began = time.time()
    where = {"generation": elastic.generation(), "rank": elastic.rank()}
    note("enter", **where, began=began, size=elastic.size(), step=state.step, digest=digest())
    fresh = args.log / f"{slot_id}.new"
    fresh.write_text(f"{elastic.generation()} {elastic.rank()} {os.getpid()}")
    fresh.replace(args.log / f"{slot_id.rpartition('-')[0]}.at")
    ddp = DistributedDataParallel(model, init_sync=False)
    while True:
        for batch in batches():
            if is_enough():
                return state.step
            one_step(ddp, batch)
            time.sleep(args.step_seconds)
            state.step += 1
            state.ballast = torch.full((state.step % 4 << 18,), float(state.step))
            note("trained", **where, step=state.step)
            before = state.commits[0]
            state.commit(every=COMMIT_EVERY)
            note("tick", **where, step=state.step)
            if state.commits[0] != before:
                note("commit", **where, step=state.step)
        state.sampler.set_epoch(state.sampler.epoch + 1)


step = train(state)
result = {
    "total": state.total,
    "epoch": state.sampler.epoch,
    "consumed": state.sampler.consumed,
    "items": ITEMS,
    "seen": int(state.seen.sum()),
    "least": int(state.seen.min()),
    "most": int(state.seen.max()),
}
note("final", generation=elastic.generation(), rank=elastic.rank(), step=step, digest=digest(), **result)
