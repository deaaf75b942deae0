"""Describe the attributes of torch in a worker that trains: ``replaced.py FILE``; without FILE, in a plain process."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.dlpack
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

OWNERS: dict[str, Any] = {
    "torch": torch,
    "torch._C": torch._C,
    "torch._C.TensorBase": torch._C.TensorBase,
    "torch.Tensor": torch.Tensor,
    "torch.utils.dlpack": torch.utils.dlpack,
    "torch.nn.Module": torch.nn.Module,
    "torch.nn.Parameter": torch.nn.Parameter,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.optim.lr_scheduler.LRScheduler": torch.optim.lr_scheduler.LRScheduler,
    "torch.autograd": torch.autograd,
    "torch.distributed": dist,
    "torch.distributed.distributed_c10d": distributed_c10d,
    "ProcessGroup": dist.ProcessGroup,
    "ProcessGroupGloo": dist.ProcessGroupGloo,
    "Backend": torch._C._distributed_c10d.Backend,
    "Work": dist.Work,
    "DistributedDataParallel": DistributedDataParallel,
}


def description(value: Any) -> str:
    function = value.fget if isinstance(value, property) else value
    code = function.__code__ if isinstance(function, FunctionType) else None
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return f"{type(value).__qualname__} {place}"


def descriptions() -> dict[str, str]:
    importlib.import_module("torch._dynamo")  # which the first step of an optimizer imports; it replaces a function
    return {
        f"{name} {key}": description(value)
        for name, owner in OWNERS.items()
        for key, value in vars(owner).items()
        if callable(value) or isinstance(value, property)
    }


def main(path: Path) -> None:
    import elasticstate as elastic

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        ddp = DistributedDataParallel(model, init_sync=False)
        for _ in range(3):
            optimizer.zero_grad()
            ddp(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit(every=2)
        if elastic.rank() == 0:
            path.write_text(json.dumps(descriptions()))

    train(state)


if len(sys.argv) > 1:
    main(Path(sys.argv[1]))
else:
    print(json.dumps(descriptions()))
