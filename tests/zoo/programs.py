"""The zoo: ordinary programs of many kinds. ``python programs.py NAME DIRECTORY`` runs one of them.

Each is what a user would write, except for its calls of the keeper ``z``: ``z.goes_on`` instead of a condition,
``z.commit`` instead of ``state.commit``, and ``z.at`` where a worker may die. Programs that share a job (``GROUPS``)
are parts of one training function, with one state, and train in turns.
"""

from __future__ import annotations

import collections
import copy
import itertools
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from keeper import DEVICE, STEPS, Keeper, read_plan
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, Dataset

import elasticstate as elastic

Program = Callable[[Any], None]
PROGRAMS: dict[str, Program] = {}
PLACES: dict[str, tuple[tuple[str, ...], ...]] = {}  # of each strike
BASE = ("forward", "backward", "before commit", "after commit")


def program(*places: str, usual: tuple[str, ...] = BASE) -> Callable[[Program], Program]:
    """Register a program. ``places``: those that it passes besides the ``usual`` ones."""

    def register(function: Program) -> Program:
        PROGRAMS[function.__name__] = function
        PLACES[function.__name__] = (places or usual, usual)
        return function

    return register


def inputs(step: int, *shape: int) -> torch.Tensor:
    """Return the inputs of a step, which are the same on all ranks and in each attempt at the step."""
    chosen = torch.Generator().manual_seed(1000 + step)
    return torch.randn(shape or (8, 4), generator=chosen, device="cpu").to(DEVICE)


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def ddp_of(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, init_sync=False, **options)


def descend(z: Keeper | Part, model: nn.Module, optimizer: Any, step: int, scheduler: Any = None) -> torch.Tensor:
    """Make the usual step. Return the loss."""
    optimizer.zero_grad()
    z.at("forward")
    loss = model(inputs(step)).square().mean()
    z.backward(loss).backward()
    optimizer.step()
    if scheduler is not None:
        z.at("between")
        scheduler.step()
    return loss.detach()


class Part:
    """A keeper for one of several programs that share a job. It keeps what the program gives to :func:`loop`."""

    def __init__(self, z: Keeper, name: str) -> None:
        self._z, self.name = z, name
        self.values: dict[str, Any] = {}
        self.step: Callable[[Any], None]
        self.state: Any = None  # of all parts

    def at(self, place: str) -> None:
        self._z.at(place)
        self._z.at(f"{self.name}, {place}")

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        return self._z.backward(loss)


class StateOfPart:
    """The values of one part in the state of all parts."""

    def __init__(self, part: Part) -> None:
        self.__dict__["part"] = part

    def __getattr__(self, name: str) -> Any:
        return self.part.state.step if name == "step" else getattr(self.part.state, f"{self.part.name}_{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.part.state, f"{self.part.name}_{name}", value)


def state_of(z: Keeper | Part, **values: Any) -> Any:
    """Return a state with these values, and with ``step``."""
    if isinstance(z, Keeper):
        return elastic.TorchState(**values, step=0)
    z.values = values
    return StateOfPart(z)


def loop(z: Keeper | Part, state: Any, step: Callable[[Any], None]) -> None:
    """Train a state with a ``model``. ``step`` gets the wrapped model."""
    if isinstance(z, Part):
        z.step = step
        return

    @elastic.run
    def train(state: Any) -> None:
        model = ddp_of(state.model)
        while z.goes_on(state):
            step(model)
            state.step += 1
            z.commit(state)

    train(state)
    z.finish(state)


def together(z: Keeper, names: Sequence[str]) -> None:
    """Run several programs as parts of one training function. Another one begins in each step."""
    parts = [Part(z, name) for name in names]
    for part in parts:
        PROGRAMS[part.name](part)
    state = elastic.TorchState(
        step=0, **{f"{part.name}_{name}": value for part in parts for name, value in part.values.items()}
    )

    @elastic.run
    def train(state: Any) -> None:
        models = [ddp_of(getattr(state, f"{part.name}_model")) for part in parts]
        while z.goes_on(state):
            for number in range(len(parts)):
                turn = (number + state.step) % len(parts)
                parts[turn].step(models[turn])
            state.step += 1
            z.commit(state)

    for part in parts:
        part.state = state
    train(state)
    z.finish(state)


def with_optimizer(z: Keeper | Part, make: Callable[[list[nn.Parameter]], Any], model: nn.Module | None = None) -> None:
    model = net() if model is None else model
    optimizer = make(list(model.parameters()))
    state = state_of(z, model=model, optimizer=optimizer)
    loop(z, state, lambda ddp: void(descend(z, ddp, optimizer, state.step)))


def void(_: object) -> None:
    """Drop a result."""


# ---------------------------------------------------------------------------------------------------------- optimizers


@program()
def sgd_with_nesterov(z: Keeper) -> None:
    with_optimizer(z, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01))


@program()
def adamw_foreach(z: Keeper) -> None:
    with_optimizer(z, lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True))


@program()
def adam_fused(z: Keeper) -> None:
    with_optimizer(z, lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True))


@program()
def adamw_fused_with_channels_last(z: Keeper) -> None:
    torch.manual_seed(0)
    image = nn.Sequential(nn.Linear(4, 32), nn.Unflatten(1, (2, 4, 4)))
    model = nn.Sequential(*image, nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1))
    model.to(memory_format=torch.channels_last)
    with_optimizer(z, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), model)


@program()
def rmsprop_centred(z: Keeper) -> None:
    with_optimizer(z, lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5))


@program()
def adagrad(z: Keeper) -> None:
    with_optimizer(z, lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1))


@program()
def averaged_sgd(z: Keeper) -> None:
    with_optimizer(z, lambda p: torch.optim.ASGD(p, lr=0.05, t0=10))


class Sign(torch.optim.Optimizer):
    """Sign of the momentum (Lion, Chen 2023, arXiv 2302.06675, simplified): an optimizer that users write."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(momentum.sign(), alpha=group["lr"])


@program()
def own_optimizer(z: Keeper) -> None:
    with_optimizer(z, lambda p: Sign(p, 0.01))


@program("closure")
def lbfgs(z: Keeper | Part) -> None:
    model = net(4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    state = state_of(z, model=model, optimizer=optimizer)

    def step(ddp: nn.Module) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            z.at("closure")
            loss: torch.Tensor = ddp(inputs(state.step)).square().mean()
            z.backward(loss).backward()
            return loss

        z.at("forward")
        optimizer.step(closure)

    loop(z, state, step)


@program()
def sparse_embedding(z: Keeper | Part) -> None:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(50, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
    state = state_of(z, model=model, optimizer=optimizer)

    def step(ddp: nn.Module) -> None:
        optimizer.zero_grad()
        z.at("forward")
        words = torch.arange(12).mul(state.step + 7).remainder(50).view(4, 3)
        z.backward(ddp(words).square().mean()).backward()
        optimizer.step()

    loop(z, state, step)


@program("between")
def dense_and_sparse(z: Keeper | Part) -> None:
    """Two optimizers for the parts of one model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50, 4), nn.Linear(4, 1))
    rows, dense = torch.optim.Adagrad(model[0].parameters()), torch.optim.AdamW(model[1].parameters())
    state = state_of(z, model=model, rows=rows, dense=dense)

    def step(ddp: nn.Module) -> None:
        rows.zero_grad()
        dense.zero_grad()
        z.at("forward")
        words = torch.arange(12).mul(state.step + 7).remainder(50).view(4, 3)
        z.backward(ddp(words).square().mean()).backward()
        rows.step()
        z.at("between")
        dense.step()

    loop(z, state, step)


# ---------------------------------------------------------------------------------------------------------- schedulers


def with_scheduler(z: Keeper | Part, make: Callable[[Any], Any]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    state = state_of(z, model=model, optimizer=optimizer, scheduler=scheduler)
    loop(z, state, lambda ddp: void(descend(z, ddp, optimizer, state.step, scheduler)))


@program("between")
def one_cycle(z: Keeper) -> None:
    with_scheduler(z, lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=STEPS + 1))


@program("between")
def warm_restarts(z: Keeper) -> None:
    with_scheduler(z, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7))


@program("between")
def warmup_then_steps(z: Keeper) -> None:
    def make(optimizer: Any) -> Any:
        warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.StepLR(optimizer, 9)], [6])

    with_scheduler(z, make)


@program("between")
def scheduler_of_a_lambda(z: Keeper) -> None:
    with_scheduler(z, lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)))


@program("validation")
def plateau(z: Keeper | Part) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.5)
    state = state_of(z, model=model, optimizer=optimizer, scheduler=scheduler)

    def step(ddp: nn.Module) -> None:
        loss = descend(z, ddp, optimizer, state.step)
        if state.step % 3 == 0:
            z.at("validation")
            scheduler.step(loss)

    loop(z, state, step)


# ------------------------------------------------------------------------------------------ modes and frozen parameters


class Halved(nn.Module):
    """Differs between train and eval, as dropout does, without random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (0.5 if self.training else 1.0)


@program("validation")
def validation_in_eval_mode(z: Keeper | Part) -> None:
    model = nn.Sequential(*net(), Halved())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = state_of(z, model=model, optimizer=optimizer, best=float("inf"))

    def step(ddp: nn.Module) -> None:
        descend(z, ddp, optimizer, state.step)
        if state.step % 4 == 0:
            model.eval()
            for part in range(2):
                z.at("validation")
                score = model(inputs(part)).square().mean().detach()
                dist.all_reduce(score)
            state.best = min(state.best, score.item() / dist.get_world_size())
            model.train()

    loop(z, state, step)


@program("validation")
def validation_without_gradients(z: Keeper | Part) -> None:
    """Gradients are switched off by a function, not by a context."""
    model = nn.Sequential(*net(), Halved())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = state_of(z, model=model, optimizer=optimizer)

    def step(ddp: nn.Module) -> None:
        descend(z, ddp, optimizer, state.step)
        if state.step % 4 == 0:
            torch.set_grad_enabled(False)
            model.eval()
            z.at("validation")
            dist.all_reduce(model(inputs(0)).mean())
            model.train()
            torch.set_grad_enabled(True)

    loop(z, state, step)


@program("validation")
def frozen_statistics(z: Keeper | Part) -> None:
    """One batch norm stays in eval mode while the rest trains; validations switch the other one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].eval().requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    state = state_of(z, model=model, optimizer=optimizer)

    def step(ddp: nn.Module) -> None:
        descend(z, ddp, optimizer, state.step)
        if state.step % 5 == 0:
            model[4].eval()
            z.at("validation")
            dist.all_reduce(model(inputs(1)).mean().detach())
            model[4].train()

    loop(z, state, step)


@program("between", "toggled")
def two_networks_in_turn(z: Keeper) -> None:
    """The generator is frozen while the discriminator trains, and the other way round."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.02)
    state = elastic.TorchState(g=generator, c=critic, og=of_generator, oc=of_critic, step=0)

    @elastic.run
    def train(state: Any) -> None:
        while z.goes_on(state):
            for trained, frozen, optimizer, sign in (
                (critic, generator, of_critic, -1),
                (generator, critic, of_generator, 1),
            ):
                frozen.requires_grad_(False)
                trained.requires_grad_(True)
                z.at("toggled")
                optimizer.zero_grad()
                z.backward(sign * critic(generator(inputs(state.step))).mean()).backward()
                for p in trained.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
                optimizer.step()
                z.at("between")
            state.step += 1
            z.commit(state)

    train(state)
    z.finish(state)


@program()
def wrapper_as_a_value(z: Keeper) -> None:
    """The script puts the wrapper of each world into the state, around what is there."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state: Any) -> None:
        state.model = ddp_of(state.model)
        while z.goes_on(state):
            descend(z, state.model, optimizer, state.step)
            state.step += 1
            z.commit(state)

    train(state)
    state.model = model
    z.finish(state)


@program("between")
def networks_in_containers(z: Keeper) -> None:
    """The script uses its own references to the objects in the containers."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)]
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]
    schedulers = tuple(lr_scheduler.StepLR(optimizer, 5, 0.7) for optimizer in optimizers)
    models = {"encoder": parts[0], "head": parts[1]}
    state = elastic.TorchState(models=models, optimizers=optimizers, schedulers=schedulers, step=0)

    @elastic.run
    def train(state: Any) -> None:
        while z.goes_on(state):
            z.at("forward")
            z.backward(parts[1](parts[0](inputs(state.step))).square().mean()).backward()
            for part, optimizer, scheduler in zip(parts, optimizers, schedulers, strict=True):
                for p in part.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
                optimizer.step()
                optimizer.zero_grad()
                z.at("between")
                scheduler.step()
            state.step += 1
            z.commit(state)

    train(state)
    contents = [each.state_dict() for each in (*parts, *optimizers, *schedulers)]
    z.finish(state, omit=("models", "optimizers", "schedulers"), contents=contents)


@program()
def layers_unfrozen_one_by_one(z: Keeper) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for part in model[:3]:
        part.requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": list(model[3].parameters()), "lr": 0.01}])
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state: Any) -> None:
        ddp = ddp_of(model)
        while z.goes_on(state):
            wanted = 1 + min(3, state.step // 8)
            while len(optimizer.param_groups) < wanted:
                part = model[3 - len(optimizer.param_groups)]
                part.requires_grad_(True)
                optimizer.add_param_group({"params": list(part.parameters()), "lr": 0.001 * wanted})
                ddp = ddp_of(model)
            descend(z, ddp, optimizer, state.step)
            state.step += 1
            z.commit(state)

    train(state)
    z.finish(state)


@program()
def cast_in_mid_training(z: Keeper) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state: Any) -> None:
        ddp = ddp_of(model)
        while z.goes_on(state):
            if state.step == 12 and model[0].weight.dtype is torch.float32:
                model.double()
                ddp = ddp_of(model)
            optimizer.zero_grad()
            z.at("forward")
            z.backward(ddp(inputs(state.step).to(model[0].weight.dtype)).square().mean()).backward()
            optimizer.step()
            state.step += 1
            z.commit(state)

    train(state)
    z.finish(state)


class LowRank(nn.Module):
    """A frozen layer with a trained addition of rank 2 (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(inputs(7, 2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + x @ self.down.T @ self.up.T


@program()
def wrapped_layer_of_low_rank(z: Keeper) -> None:
    """A layer is wrapped in mid-training, and the groups are made anew. A hook does the same in a new process."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0, is_wrapped=False)

    def wrap(values: dict[str, Any]) -> None:
        if values["is_wrapped"] and not isinstance(model[0], LowRank):
            model[0] = LowRank(model[0])

    state.register_restore_pre_hook(wrap)

    @elastic.run
    def train(state: Any) -> None:
        ddp = ddp_of(model)
        while z.goes_on(state):
            if state.step == 9 and not state.is_wrapped:
                state.is_wrapped = True
                wrap({"is_wrapped": True})
                optimizer.state.clear()
                optimizer.param_groups.clear()
                optimizer.add_param_group({"params": [p for p in model.parameters() if p.requires_grad]})
                ddp = ddp_of(model)
            descend(z, ddp, optimizer, state.step)
            state.step += 1
            z.commit(state)

    train(state)
    z.finish(state)


@program("validation")
def writable_buffer_with_gradients(z: Keeper | Part) -> None:
    """A buffer is trained, except during a validation."""
    model = net()
    model.register_buffer("scale", torch.ones(1, requires_grad=True))
    optimizer = torch.optim.SGD([*model.parameters(), model.scale], lr=0.05, momentum=0.9)
    state = state_of(z, model=model, optimizer=optimizer)

    def step(ddp: nn.Module) -> None:
        optimizer.zero_grad()
        z.at("forward")
        z.backward((ddp(inputs(state.step)) * model.scale).square().mean()).backward()
        if model.scale.grad is not None:
            dist.all_reduce(model.scale.grad)
            model.scale.grad /= dist.get_world_size()
        optimizer.step()
        if state.step % 3 == 0:
            model.scale.requires_grad_(False)
            z.at("validation")
            dist.all_reduce(model(inputs(0)).mean().detach())
            model.scale.requires_grad_(True)

    loop(z, state, step)


# ------------------------------------------------------------------------------------------- parts of a training step


@program("accumulated")
def accumulated_gradients(z: Keeper | Part) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = state_of(z, model=model, optimizer=optimizer)

    def step(ddp: Any) -> None:
        for part in range(3):
            with ddp.no_sync():
                z.at("accumulated")
                ddp(inputs(4 * state.step + part)).square().mean().backward()
        z.at("forward")
        z.backward(ddp(inputs(4 * state.step + 3)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    loop(z, state, step)


@program("clipped")
def clipped_gradients(z: Keeper | Part) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = state_of(z, model=model, optimizer=optimizer, norms=[])

    def step(ddp: nn.Module) -> None:
        optimizer.zero_grad()
        z.at("forward")
        z.backward(ddp(inputs(state.step)).square().mean()).backward()
        state.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        z.at("clipped")
        optimizer.step()

    loop(z, state, step)


@program()
def bfloat16_autocast(z: Keeper | Part) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = state_of(z, model=model, optimizer=optimizer)

    def step(ddp: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            descend(z, ddp, optimizer, state.step)

    loop(z, state, step)


@program("unscaled")
def scaled_gradients(z: Keeper | Part) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)
    state = state_of(z, model=model, optimizer=optimizer, scaler=scaler)

    def step(ddp: nn.Module) -> None:
        optimizer.zero_grad()
        z.at("forward")
        z.backward(scaler.scale(ddp(inputs(state.step)).square().mean())).backward()
        scaler.unscale_(optimizer)
        z.at("unscaled")
        scaler.step(optimizer)
        scaler.update()

    loop(z, state, step)


@program("swapped", "finally")
def weights_swapped_for_a_validation(z: Keeper | Part) -> None:
    """An average of the weights takes their place inside a context."""
    model = net()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = state_of(z, model=model, average=average, optimizer=optimizer)

    @contextmanager
    def averaged() -> Iterator[None]:
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        try:
            yield
        finally:
            z.at("finally")
            model.load_state_dict(kept)

    def step(ddp: nn.Module) -> None:
        descend(z, ddp, optimizer, state.step)
        average.update_parameters(model)
        if state.step % 4 == 1:
            with averaged():
                z.at("swapped")
                dist.all_reduce(model(inputs(0)).mean().detach())

    loop(z, state, step)


@program("finally")
def a_finally_that_changes_a_value(z: Keeper) -> None:
    """The value changes with each commit, also while an interrupt unwinds."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0, scale=1.0)

    @elastic.run
    def train(state: Any) -> None:
        ddp = ddp_of(model)
        while z.goes_on(state):
            state.scale = 0.5 ** (state.step % 4)
            try:
                descend(z, ddp, optimizer, state.step)
                state.step += 1
                z.commit(state)
            finally:
                z.at("finally")
                state.scale = -1.0

    train(state)
    state.scale = 0.0
    z.finish(state)


@program()
def skipped_bad_batches(z: Keeper | Part) -> None:
    """A loop that catches the errors of a step, and counts the steps that were trained."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = state_of(z, model=model, optimizer=optimizer, trained=[])

    def step(ddp: nn.Module) -> None:
        try:
            descend(z, ddp, optimizer, state.step)
            state.trained = [*state.trained, state.step]
        except RuntimeError as error:
            print("skipped a bad batch:", str(error)[:60])

    loop(z, state, step)


# -------------------------------------------------------------------------------------------- values besides the model


@program()
def best_weights(z: Keeper | Part) -> None:
    """Early stopping: the best weights so far are a value of their own."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = state_of(z, model=model, optimizer=optimizer, best={}, score=float("inf"), patience=0)

    def step(ddp: nn.Module) -> None:
        score = descend(z, ddp, optimizer, state.step).item()
        state.patience = 0 if score < state.score else state.patience + 1
        if score < state.score:
            state.score, state.best = score, copy.deepcopy(model.state_dict())

    loop(z, state, step)


@program("counted")
def counts_in_numpy(z: Keeper | Part) -> None:
    """A confusion matrix of more than 256 KB that numpy fills and resets."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    counts = np.zeros((300, 300), np.int64)
    state = state_of(z, model=model, optimizer=optimizer, counts=torch.from_numpy(counts), sums=[])

    def step(ddp: nn.Module) -> None:
        counts[state.step % 300] += 1
        z.at("counted")
        if state.step % 6 == 5:
            state.sums.append(int(counts.sum()))
            counts[:] = 0
        descend(z, ddp, optimizer, state.step)

    loop(z, state, step)


@program("counted")
def table_written_through_data(z: Keeper | Part) -> None:
    """A large buffer that is written in a way that torch does not count."""
    model = net()
    model.register_buffer("table", torch.zeros(300, 300))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = state_of(z, model=model, optimizer=optimizer)

    def step(ddp: nn.Module) -> None:
        model.table.data.fill_(state.step)
        z.at("counted")
        descend(z, ddp, optimizer, state.step)
        model.table.data[state.step] = -1

    loop(z, state, step)


@program()
def replay_buffer(z: Keeper | Part) -> None:
    """Experiences in a deque, drawn with a random generator that is a value of the state."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = state_of(z, model=model, optimizer=optimizer, buffer=collections.deque(maxlen=9), dice=random.Random(3))

    def step(ddp: nn.Module) -> None:
        state.buffer.append(inputs(state.step))
        batch = state.dice.choice(list(state.buffer))
        optimizer.zero_grad()
        z.at("forward")
        z.backward(ddp(batch).square().mean()).backward()
        optimizer.step()

    loop(z, state, step)


@program()
def hidden_state_of_a_recurrent_net(z: Keeper | Part) -> None:
    torch.manual_seed(0)
    model = nn.GRUCell(4, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = state_of(z, model=model, optimizer=optimizer, hidden=torch.zeros(8, 8))

    def step(ddp: nn.Module) -> None:
        optimizer.zero_grad()
        z.at("forward")
        hidden = ddp(inputs(state.step), state.hidden)
        z.backward(hidden.square().mean()).backward()
        optimizer.step()
        state.hidden = hidden.detach()

    loop(z, state, step)


@program()
def another_default_device(z: Keeper) -> None:
    """All that names no device is on another one than the model: for the script, as for all that it calls."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state: Any) -> None:
        ddp = ddp_of(model)
        torch.set_default_device("meta")
        while z.goes_on(state):
            descend(z, ddp, optimizer, state.step)
            state.step += 1
            z.commit(state)

    torch.set_default_device("meta")
    train(state)
    torch.set_default_device("cpu")
    z.finish(state)


@program()
def loss_weights(z: Keeper | Part) -> None:
    """A parameter of the state that belongs to no module, in an optimizer of its own."""
    model = net()
    weights = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), weights], lr=0.05)
    state = state_of(z, model=model, optimizer=optimizer, weights=weights)

    def step(ddp: nn.Module) -> None:
        optimizer.zero_grad()
        z.at("forward")
        found = ddp(inputs(state.step))
        losses = torch.stack([found.square().mean(), found.abs().mean()])
        z.backward((losses * torch.exp(-weights) + weights).sum()).backward()
        dist.all_reduce(weights.grad)
        weights.grad /= dist.get_world_size()
        optimizer.step()

    loop(z, state, step)


class Normalizer:
    """Running mean and variance of what it has seen, with a state_dict of its own."""

    def __init__(self) -> None:
        self.count, self.mean, self.square = 0, torch.zeros(4), torch.ones(4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean += (x.mean(0) - self.mean) / self.count
        self.square = self.square + (x.square().mean(0) - self.square) / self.count
        return (x - self.mean) / (self.square + 1).sqrt()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "square": self.square}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@program()
def normalized_inputs(z: Keeper | Part) -> None:
    model, normalizer = net(), Normalizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = state_of(z, model=model, optimizer=optimizer, normalizer=normalizer)

    def step(ddp: nn.Module) -> None:
        optimizer.zero_grad()
        z.at("forward")
        z.backward(ddp(normalizer(inputs(state.step))).square().mean()).backward()
        optimizer.step()

    loop(z, state, step)


@program()
def curriculum(z: Keeper | Part) -> None:
    """Nested plain values that are changed in place."""
    model = net()
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.05)
    state = state_of(z, model=model, optimizer=optimizer, plan={"level": 1, "history": [[0, 1.0]]})

    def step(ddp: nn.Module) -> None:
        loss = descend(z, ddp, optimizer, state.step).item()
        if state.step % 7 == 6:
            state.plan["level"] += 1
            state.plan["history"].append([state.step, loss])
            optimizer.param_groups[state.plan["level"] % 4]["lr"] *= 0.5

    loop(z, state, step)


class Noam:
    """Learning rates around an optimizer, as in the Annotated Transformer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(self.steps**-0.5, self.steps / 8)
        self.optimizer.step()


class Average:
    """A moving average of a model that has no state_dict."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.detach()


@program()
def objects_with_other_references(z: Keeper | Part) -> None:
    """The script uses its own references to plain values. Two of them refer to the model, or to its optimizer, and one
    is taken from a list of the script."""
    model = net()
    schedule = Noam(torch.optim.Adam(model.parameters()))
    average, losses, dice = Average(model), [0.0], random.Random(1)
    phases = [{"scale": 1.0 + number} for number in range(3)]
    state = state_of(z, model=model, schedule=schedule, average=average, losses=losses, dice=dice, phase=phases[0])

    def step(ddp: nn.Module) -> None:
        schedule.optimizer.zero_grad()
        z.at("forward")
        state.phase = phases[state.step % 3]
        loss = ddp(inputs(state.step)).square().mean() * dice.random() * state.phase["scale"]
        z.backward(loss).backward()
        schedule.step()
        average.update()
        losses.append(loss.item())

    loop(z, state, step)


class OwnState(elastic.State):
    """A state that a user defines with ``capture`` and ``apply``."""

    def __init__(self, model: nn.Module, momentum: dict[str, torch.Tensor]) -> None:
        super().__init__(step=0)
        self._model, self._momentum = model, momentum

    def capture(self) -> dict[str, Any]:
        momentum = {f"momentum.{name}": value for name, value in self._momentum.items()}
        return {"step": self.step, **self._model.state_dict(), **momentum}

    def apply(self, values: Any) -> None:
        self.step = values["step"]
        with torch.no_grad():
            for name, tensor in [*self._model.state_dict().items()]:
                tensor.copy_(values[name])
            for name, tensor in self._momentum.items():
                tensor.copy_(values[f"momentum.{name}"])


@program()
def a_state_of_its_own(z: Keeper) -> None:
    """A class derived from State, and a descent without any optimizer."""
    model = net()
    momentum = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    state = OwnState(model, momentum)

    @elastic.run
    def train(state: Any) -> None:
        while z.goes_on(state):
            model.zero_grad()
            z.at("forward")
            z.backward(model(inputs(state.step)).square().mean()).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                momentum[name].mul_(0.9).add_(p.grad / dist.get_world_size())
                p.data.sub_(momentum[name], alpha=0.05)
            state.step += 1
            z.commit(state)

    train(state)
    z.finish(state, model=model.state_dict(), momentum=momentum)


# -------------------------------------------------------------------------------------------------------------- modules


@program()
def tied_weights(z: Keeper) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    with_optimizer(z, lambda p: torch.optim.AdamW(p, lr=0.01), model)


@program()
def parametrized_weights(z: Keeper) -> None:
    """Spectral norm has buffers that change in each forward pass in train mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))
    with_optimizer(z, lambda p: torch.optim.SGD(p, lr=0.05), model)


@program()
def batch_norm(z: Keeper) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    with_optimizer(z, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), model)


@program()
def dropout_with_a_seed_for_each_step(z: Keeper | Part) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = state_of(z, model=model, optimizer=optimizer)

    def step(ddp: nn.Module) -> None:
        torch.manual_seed(state.step)
        descend(z, ddp, optimizer, state.step)

    loop(z, state, step)


@program()
def transformer_layer(z: Keeper | Part) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = state_of(z, model=model, optimizer=optimizer)

    def step(ddp: nn.Module) -> None:
        optimizer.zero_grad()
        z.at("forward")
        z.backward(ddp(inputs(state.step, 2, 3, 4)).square().mean()).backward()
        optimizer.step()

    loop(z, state, step)


@program()
def compiled_model(z: Keeper | Part) -> None:
    """The compiler's first stage only: compiling for real would take most of the time of the tests."""
    model = torch.compile(net(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = state_of(z, model=model, optimizer=optimizer)
    loop(z, state, lambda ddp: void(descend(z, ddp, optimizer, state.step)))


@program("group")
def groups_of_the_script(z: Keeper) -> None:
    """A group of its own for a second average, made in each world."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0, sum=torch.zeros(1))

    @elastic.run
    def train(state: Any) -> None:
        group = dist.new_group()
        ddp = ddp_of(model, process_group=group)
        while z.goes_on(state):
            descend(z, ddp, optimizer, state.step)
            z.at("group")
            share = torch.full((1,), float(state.step))
            dist.all_reduce(share, group=group)
            state.sum += share / dist.get_world_size()
            state.step += 1
            z.commit(state)

    train(state)
    z.finish(state)


# ----------------------------------------------------------------------------------------------------------------- data


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 16 * STEPS

    def __getitem__(self, index: int) -> int:
        return index


def all_samples(batch: Any) -> list[int]:
    """Return the samples of all ranks in this step, sorted."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(map(int, batch)))
    return sorted(itertools.chain(*found))


OF_LOADERS = ("forward", "before commit", "after commit")


def with_loader(z: Keeper, loader: Any, record: Callable[[int], None] = lambda size: None) -> None:
    """Learn a sum of samples that is exact in any order, and write down which samples were seen."""
    total = torch.zeros(1, dtype=torch.int64)
    state = elastic.TorchState(loader=loader, total=total, seen=[], step=0)
    batches = loader if isinstance(loader, elastic.ElasticDataLoader) else DataLoader(Numbers(), 8, sampler=loader)

    @elastic.run
    def train(state: Any) -> None:
        z.goes_on(state)
        for batch in batches:
            z.at("forward")
            state.seen += all_samples(batch)
            share = batch.sum().view(1)
            dist.all_reduce(share)
            state.total += share
            state.step += 1
            record(len(batch))
            z.commit(state)
            z.goes_on(state)

    train(state)
    assert sorted(state.seen) == list(range(16 * STEPS)), "each sample must be seen once"
    state.seen = sorted(state.seen)
    z.finish(state, omit=("loader", "step"))


@program(usual=OF_LOADERS)
def elastic_loader(z: Keeper) -> None:
    with_loader(z, elastic.ElasticDataLoader(Numbers(), batch_size=8, seed=5))


@program(usual=OF_LOADERS)
def elastic_loader_with_a_worker_process(z: Keeper) -> None:
    with_loader(z, elastic.ElasticDataLoader(Numbers(), batch_size=8, num_workers=1, shuffle=False))


@program(usual=OF_LOADERS)
def elastic_sampler(z: Keeper) -> None:
    sampler = elastic.ElasticSampler(Numbers(), seed=5)
    with_loader(z, sampler, lambda size: sampler.record_batch(size * elastic.size()))


@program(usual=OF_LOADERS)
def stateful_loader(z: Keeper) -> None:
    """torchdata's loader: each rank reads all samples, in their order."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Numbers(), batch_size=16, shuffle=False)
    state = elastic.TorchState(loader=loader, step=0, seen=[])

    @elastic.run
    def train(state: Any) -> None:
        z.goes_on(state)
        for batch in state.loader:
            z.at("forward")
            dist.all_reduce(batch)
            state.seen += [int(sample) // dist.get_world_size() for sample in batch]
            state.step += 1
            z.commit(state)
            z.goes_on(state)

    train(state)
    assert state.seen == list(range(16 * STEPS)), "each sample must be seen once, in order"
    z.finish(state, omit=("loader",))


@program("validation", usual=OF_LOADERS)
def yet_another_loader_for_a_validation(z: Keeper) -> None:
    """It is in no state, and each validation reads all of it."""
    loader = elastic.ElasticDataLoader(Numbers(), global_batch_size=16, seed=5)
    held_out = elastic.ElasticDataLoader(range(48), global_batch_size=16, shuffle=False)
    state = elastic.TorchState(loader=loader, step=0, seen=[], validated=[])

    @elastic.run
    def train(state: Any) -> None:
        z.goes_on(state)
        for batch in state.loader:
            z.at("forward")
            state.seen += all_samples(batch)
            if state.step % 3 == 2:
                held_out.set_epoch(state.step)
                found: list[int] = []
                for others in held_out:
                    z.at("validation")
                    found += all_samples(others)
                state.validated.append(found)
            state.step += 1
            z.commit(state)
            z.goes_on(state)

    train(state)
    z.finish(state, omit=("loader",))


class Stream:
    """Batches come from a method, which begins once where the state was loaded."""

    def __init__(self) -> None:
        self.start, self.position = 0, 0

    def batches(self) -> Iterator[torch.Tensor]:
        self.position, self.start = self.start, 0
        while self.position < 16 * STEPS:
            self.position += 16
            yield torch.arange(self.position - 16, self.position)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.position = state["position"]


@program(usual=OF_LOADERS)
def yielding_method(z: Keeper) -> None:
    state = elastic.TorchState(stream=Stream(), step=0, seen=[])

    @elastic.run
    def train(state: Any) -> None:
        z.goes_on(state)
        for batch in state.stream.batches():
            z.at("forward")
            dist.all_reduce(batch)
            state.seen += [int(sample) // dist.get_world_size() for sample in batch]
            state.step += 1
            z.commit(state)
            z.goes_on(state)

    train(state)
    assert state.seen == list(range(16 * STEPS)), "each sample must be seen once, in order"
    z.finish(state, omit=("stream",))


GROUPS = {
    "optimizers": (
        *("sgd_with_nesterov", "adamw_foreach", "adam_fused", "rmsprop_centred", "adagrad", "averaged_sgd"),
        *("adamw_fused_with_channels_last", "own_optimizer"),
    ),
    "closures_and_sparse_gradients": ("lbfgs", "sparse_embedding", "dense_and_sparse", "loss_weights"),
    "schedulers": ("one_cycle", "warm_restarts", "warmup_then_steps", "scheduler_of_a_lambda", "plateau"),
    "modes": (
        *("validation_in_eval_mode", "validation_without_gradients", "frozen_statistics"),
        *("writable_buffer_with_gradients", "weights_swapped_for_a_validation"),
    ),
    "steps": (
        *("accumulated_gradients", "clipped_gradients", "bfloat16_autocast", "scaled_gradients"),
        "skipped_bad_batches",
    ),
    "values": (
        *("best_weights", "counts_in_numpy", "table_written_through_data", "replay_buffer"),
        *("hidden_state_of_a_recurrent_net", "normalized_inputs", "curriculum", "objects_with_other_references"),
    ),
    "modules": (
        *("tied_weights", "parametrized_weights", "batch_norm", "dropout_with_a_seed_for_each_step"),
        "transformer_layer",
    ),
}
"""Programs that share a job. Each place of their own gets a strike, and the last strike is at a usual place."""
for group, names in GROUPS.items():
    PLACES[group] = (*((f"{n}, {place}",) for n in names for place in PLACES[n][0] if place not in BASE), BASE, BASE)
TESTED = sorted({*PROGRAMS, *GROUPS} - set(itertools.chain(*GROUPS.values())))


def main() -> None:
    name, directory = sys.argv[1:]
    warnings.simplefilter("default")
    if DEVICE != "cpu":
        os.environ["NCCL_HOSTID"] = str(os.getpid())  # several ranks on one device
        torch.set_default_device(DEVICE)
        torch.cuda.set_device(DEVICE)
    keeper = Keeper(Path(directory), read_plan(Path(directory) / "plan.json"))
    if name in GROUPS:
        together(keeper, GROUPS[name])
    else:
        PROGRAMS[name](keeper)


if __name__ == "__main__":
    main()
