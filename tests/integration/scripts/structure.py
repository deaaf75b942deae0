"""A training that changes its structure: it unfreezes a layer, grows a module, casts it, or toggles modes.

``structure.py FOLDER WHAT WHO STEPS``: the change is made at step 10. WHO ("all", "one" or "nobody") dies at step 20.
With WHO = "root", the first worker dies at step 12, and only each eighth step is committed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import elasticstate as elastic

folder, (what, who), steps = Path(sys.argv[1]), sys.argv[2:4], int(sys.argv[4])
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
net[0].requires_grad_(False)
optimizer = torch.optim.SGD(net[1].parameters(), lr=0.01, momentum=0.9)
state = elastic.TorchState(net=net, optimizer=optimizer, step=0, depth=2)


def grow(values: dict[str, Any]) -> None:
    while len(net) < values["depth"]:
        net.append(torch.nn.Linear(1, 1))


if what == "hook":
    state.register_restore_pre_hook(grow)


def change() -> None:
    if what == "unfreeze":
        net[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.02})
    elif what == "cast":
        net.double()
    elif what in ("grow", "hook"):
        state.depth = 3
        grow({"depth": 3})
        torch.nn.init.constant_(net[2].weight, 0.5)
        torch.nn.init.constant_(net[2].bias, 0.5)
        optimizer.add_param_group({"params": list(net[2].parameters())})
        print("has grown", flush=True)


@elastic.run
def train(state: elastic.TorchState) -> None:
    print("world", elastic.size(), "starts at step", state.step, flush=True)
    while state.step < steps:
        time.sleep(0.05)
        if state.step == 10 and len(optimizer.param_groups) == 1 and next(net.parameters()).dtype == torch.float32:
            change()
        optimizer.zero_grad()
        net(torch.ones(1, 2, dtype=next(net.parameters()).dtype)).sum().backward()
        optimizer.step()
        torch.distributed.barrier()
        state.step += 1
        state.commit(every=8 if who == "root" else 1)
        mark = folder / f"died-{elastic.cross_rank()}-{elastic.local_rank()}"
        dies = who == "all" or (who == "one" and elastic.local_rank() == 1)
        is_due = state.step == 20 and dies
        is_due |= state.step == 12 and who == "root" and elastic.rank() == 0
        if is_due and not mark.exists():
            mark.touch()
            while who == "all" and len(list(folder.glob("died-*"))) < elastic.size():
                time.sleep(0.001)  # until all have committed this step
            os.kill(os.getpid(), signal.SIGKILL)


train(state)
if elastic.rank() == 0:
    print("trained:", [p.tolist() for p in net.parameters()], flush=True)
