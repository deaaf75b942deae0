"""Training script whose model and optimizer are sharded: by FSDP2, HSDP, or FSDP and tensor parallelism.

It logs one line for each action, to ``<log>/<host>-<slot>-<pid>.jsonl``. ``digest`` is that of all full tensors of
parameters and optimizer state; in the line of a step rank 0 alone has it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elasticstate as elastic

BATCH, WIDTH, TOKENS = 12, 7, 8

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--how", choices=["fsdp", "hsdp", "fsdp+tp"], default="fsdp")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--step-seconds", type=float, default=0.0)
parser.add_argument("--ballast", type=int, default=0, help="megabytes more in the model")
parser.add_argument("--until", type=Path, help="train on until this file exists")
args = parser.parse_args()
torch.set_num_threads(1)
name = f"{os.environ['ELASTICSTATE_WORKER'].replace(':', '-')}-{os.getpid()}"
log = open(args.log / f"{name}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends


def note(what: str, **fields: object) -> None:
    line = {"what": what, "pid": os.getpid(), "time": time.time(), "rank": elastic.rank(), "size": elastic.size()}
    log.write(json.dumps({**line, "generation": elastic.generation(), **fields}) + "\n")


class Net(nn.Module):
    """Model with uneven and empty shards, tied and frozen parameters, and parameters that no rank shards."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * TOKENS), nn.Linear(2 * TOKENS, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(WIDTH, 3), requires_grad=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        self.ballast = nn.Parameter(torch.zeros(args.ballast << 10, 256)) if args.ballast else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = x + self.scale * self.down(torch.tanh(self.up(x)))
        more = 0.0 if self.ballast is None else self.ballast.sum()
        return self.head(x + self.frozen.mean() * 0.1) + more

    def init_weights(self) -> None:
        """Draw all weights on each rank, and keep this rank's shards."""
        for number, (_, parameter) in enumerate(self.named_parameters()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 3
            own = parameter.detach()
            if not isinstance(own, DTensor):
                own.copy_(drawn)
                continue
            size, begin = own.to_local().shape, _begin(own)
            own.to_local().copy_(drawn[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))])


def _begin(tensor: DTensor) -> tuple[int, ...]:
    chunks = tensor.__create_chunk_list__()
    return tuple(chunks[0].offsets) if chunks else (0,) * tensor.dim()


def mesh_of_world() -> tuple[DeviceMesh, int, int]:
    """Return the mesh of the world, and rank and size within the dimension that shares out the batch."""
    size = elastic.size()
    if args.how == "fsdp":
        return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",)), elastic.rank(), size
    if args.how == "hsdp":
        shape = (2, size // 2) if size % 2 == 0 else (1, size)
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")), elastic.rank(), size
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("shard", "tp"))
    return mesh, elastic.rank() // 2, size // 2


def sharded_model(mesh: DeviceMesh) -> Net:
    with torch.device("meta"):
        model = Net()
    if args.how == "fsdp+tp":
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["shard"]
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return model


def full(value: object) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)


def tensors_of(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {
        f"{name} {key}": value
        for name, parameter in model.named_parameters()
        for key, value in {"": parameter.detach(), **optimizer.state.get(parameter, {})}.items()
    }


def digest(model: Net, optimizer: torch.optim.Optimizer) -> str:
    """Return the digest of the tensors as torch makes them whole, on each rank."""
    found = hashlib.sha256()
    for name, value in tensors_of(model, optimizer).items():
        found.update(name.encode() + full(value).contiguous().numpy().tobytes())
    return found.hexdigest()


def digest_on_rank_0(model: Net, optimizer: torch.optim.Optimizer) -> str:
    """Return the same digest on rank 0 alone, which puts all parts in their places. Takes a tenth of the time."""
    tensors = tensors_of(model, optimizer)
    parts = [(_begin(v), v.to_local().numpy()) for v in tensors.values() if isinstance(v, DTensor)]
    gathered: list[list[tuple[tuple[int, ...], Any]]] = [[] for _ in range(elastic.size())]
    dist.gather_object(parts, gathered if elastic.rank() == 0 else None)
    if elastic.rank():
        return ""
    found, by_tensor = hashlib.sha256(), zip(*gathered, strict=True)
    for name, value in tensors.items():
        whole = torch.as_tensor(value).numpy() if not isinstance(value, DTensor) else np.empty(value.shape, np.float32)
        for begin, part in next(by_tensor) if isinstance(value, DTensor) else ():
            whole[tuple(slice(b, b + n) for b, n in zip(begin, part.shape, strict=True))] = part
        found.update(name.encode() + whole.tobytes())
    return found.hexdigest()


state = elastic.TorchState(step=0, until=-1)


@elastic.run
def train(state: elastic.TorchState) -> None:
    mesh, place, places = mesh_of_world()
    model = sharded_model(mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.7)
    state.attach(model=model, optimizer=optimizer, scheduler=scheduler, init=model.init_weights)
    note("enter", step=state.step, digest=digest(model, optimizer))
    while state.until < 0 or state.step < state.until:
        drawn = torch.Generator().manual_seed(state.step)
        tokens = torch.randint(0, TOKENS, (BATCH, 5), generator=drawn)[place::places]
        scores = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        loss = loss * places / (4 * BATCH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        time.sleep(args.step_seconds)
        state.step += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        note("step", step=state.step, loss=total.item() / elastic.size(), digest=digest_on_rank_0(model, optimizer))
        if state.until < 0 and (args.until is None or _all_see(args.until)):
            state.until = max(state.step, args.steps)
        state.commit()
        note("commit", step=state.step)


def _all_see(path: Path) -> bool:
    seen = torch.tensor(float(path.exists()))
    dist.all_reduce(seen, op=dist.ReduceOp.MIN)
    return bool(seen.item())


train(state)
note("final", step=state.step)
