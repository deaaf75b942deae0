"""Log of the scripts that use elasticstate.huggingface; see test_huggingface.py. It has the lines that job.Job checks.

Each line also has the generation, the rank, the size and the time::

    {"what": "enter" | "final", "step": s, "digest": d, "pid": p}      start of a world, with the commit; end
    {"what": "commit", "step": s}                                      this many steps are committed
    {"what": "trained", "step": s, "epoch": e, "ids": [...]}           samples of this rank, before the step trains them
    {"what": "loss", "step": s, "loss": x}                             mean loss of this step over all ranks
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elasticstate as elastic

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--stop", type=Path, required=True, help="training ends with the step that finds this file")
parser.add_argument("--steps", type=int, default=1_000_000, help="training ends with this step")
parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step")
parser.add_argument("--workers", type=int, help="the workers that the global batch is for")
parser.add_argument("--commit-every", type=int, default=1)
args = parser.parse_args()
slot_id = os.environ.get("ELASTICSTATE_WORKER", "alone").replace(":", "-")
log = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
torch.set_num_threads(1)
torch.manual_seed(0)


def note(what: str, **fields: object) -> None:
    world = {"generation": elastic.generation(), "rank": elastic.rank(), "size": elastic.size(), "time": time.time()}
    log.write(json.dumps({"what": what, **world, **fields}) + "\n")


def note_model(what: str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Log a digest of the bytes of all parameters and of the optimizer's state."""
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *_tensors(optimizer.state_dict())]:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    note(what, step=step, digest=digest.hexdigest(), pid=os.getpid(), lr=optimizer.param_groups[0]["lr"])


_newest: object = None


def note_commit(state: elastic.State, step: int) -> None:
    """Log that ``step`` is committed, if there is a new commit since the last call."""
    global _newest
    if state.commits[0] != _newest:
        _newest = state.commits[0]
        note("commit", step=step)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for item in items for tensor in _tensors(item)]


def is_last(step: int) -> bool:
    """Return True on all ranks if a rank has found the file, or if this step is the last one."""
    time.sleep(args.pace)
    found = torch.tensor(float(args.stop.exists() or step >= args.steps))
    dist.all_reduce(found)
    return bool(found)
