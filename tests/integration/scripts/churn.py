"""Endless regroups: rank 1 kills itself soon after it has joined. The oldest worker logs the resources it holds."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

log = open(sys.argv[1], "a", buffering=1)  # noqa: SIM115 - open until the process ends
generations = int(sys.argv[2])
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
state = elastic.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), step=0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@elastic.run
def train(state: elastic.TorchState) -> None:
    pair = dist.new_group(list(range(elastic.size())))
    ddp = DistributedDataParallel(model, init_sync=False)
    ticks = 0
    while elastic.generation() < generations:
        ddp(torch.ones(2, 64)).sum().backward()
        dist.all_reduce(torch.ones(1), group=pair)
        state.optimizer.step()
        state.step += 1
        ticks += 1
        state.commit()
        if ticks == 5 and elastic.rank() == 0:
            holds = {
                "generation": elastic.generation(),
                "size": elastic.size(),
                "threads": len(os.listdir("/proc/self/task")),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "bytes": resident_bytes(),
            }
            log.write(json.dumps(holds) + "\n")
        if ticks == 20 and elastic.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


train(state)
