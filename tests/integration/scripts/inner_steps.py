"""Inner steps of local_sgd.py, which its test repeats."""

from __future__ import annotations

from typing import Any

import torch

LR, MOMENTUM = 0.05, 0.9
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def make_training(seed: int) -> tuple[torch.nn.Sequential, torch.optim.SGD]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def samples_of(slot: int, step: int) -> int:
    return 1 + (2 * slot + step) % 4


def inner_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, slot: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + slot)
    inputs = torch.randn(samples_of(slot, step), 4, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def flat(tensors: Any) -> list[float]:
    found: list[float] = torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()
    return found


def momentum_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return flat(optimizer.state.get(p, {}).get("momentum_buffer", torch.zeros_like(p)) for p in model.parameters())
