"""The training of a sharded model that every system of bench_sharded.py runs: the same model, batch and step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Size(NamedTuple):
    """Size of a perceptron, and of the batch of each rank."""

    width: int
    layers: int
    batch: int

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters and both moments of AdamW, on all ranks together."""
        return 3 * 4 * self.layers * (self.width + 1) * self.width


SIZES = {
    "large": Size(2048, 20, 8),  # 1.007 GB, so much that a step mostly moves parameters
    "small": Size(1024, 5, 320),  # 63 MB, with enough to compute
}


def make_training(size: Size, device: torch.device, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that FSDP2 has sharded over the world, without its weights, and its optimizer."""
    torch.set_num_threads(1)
    mesh = init_device_mesh(device.type, (world_size,))
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(size.width, size.width), nn.ReLU()) for _ in range(size.layers)]
        model = nn.Sequential(*layers)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    model.to_empty(device=device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def init_weights(model: nn.Module, rank: int) -> None:
    """Let each rank draw its own shards."""
    torch.manual_seed(rank)
    for parameter in model.parameters():
        nn.init.normal_(parameter.detach().to_local(), std=0.02)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, size: Size, device: torch.device, step: int, rank: int
) -> float:
    """Make one step on a batch of its own. Return the loss, which waits for the device."""
    drawn = torch.Generator().manual_seed(step * 1000 + rank)
    batch = torch.randn(size.batch, size.width, generator=drawn).to(device)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    return loss.item()
