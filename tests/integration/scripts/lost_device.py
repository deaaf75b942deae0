"""A worker that can no longer use its device after the real failure of another member. The loss is simulated on a CPU.

With ``--cuda`` the loss is real: a kernel of one worker triggers a device-side assert.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elasticstate as elastic
from elasticstate.worker.contexts.gloo import GlooContext

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--lose", type=int, default=-1, help="the slot whose device is lost when another member has failed")
parser.add_argument("--cuda", type=int, default=0, help="the step at which slot 0 loses its device on its own account")
args = parser.parse_args()
os.environ["NCCL_HOSTID"] = str(os.getpid())  # several ranks may share a device
slot_id = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
slot = elastic.local_rank()
log = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends


def note(what: str, **fields: object) -> None:
    log.write(json.dumps({"what": what, "pid": os.getpid(), "time": time.time(), **fields}) + "\n")


def once(name: str) -> bool:
    """Return True for the first caller in the whole job."""
    try:
        os.close(os.open(args.log / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def usable(context: GlooContext) -> bool:
    return not (slot == args.lose and once("fired-lost"))


GlooContext.usable = usable  # type: ignore[method-assign]
device = torch.device("cpu") if args.lose >= 0 else elastic.device()
state = elastic.TorchState(weight=torch.zeros(4, device=device), step=0)


@elastic.run
def train(state: elastic.TorchState) -> int:
    g, rank = elastic.generation(), elastic.rank()
    # The size of the world is fixed: its members differ by one step at most.
    note("enter", generation=g, rank=rank, size=elastic.size(), step=state.step, digest=str(state.weight.tolist()))
    while state.step < args.steps:
        total = torch.ones(4, device=device)
        dist.all_reduce(total)
        if args.cuda == state.step + 1 and slot == 0 and once("fired-assert"):
            torch.zeros(2, device=device)[torch.tensor([7], device=device)] += 1
            torch.cuda.synchronize()
        state.weight += total
        state.step += 1
        time.sleep(0.01)
        state.commit()
        note("commit", generation=g, rank=rank, step=state.step)
    note("gate", generation=g, rank=rank, step=state.step)
    return state.step


result = train(state)
note("final", generation=elastic.generation(), rank=elastic.rank(), step=result, digest=str(state.weight.tolist()))
