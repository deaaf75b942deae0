"""Slot 0 is killed before the first commit, and returns when the others have trained without it. Prints places."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import tqdm
from torch.utils.data import DataLoader, TensorDataset

import elasticstate as elastic
from elasticstate.huggingface import Accelerator, TrainingState, run

folder, kind = Path(sys.argv[1]), sys.argv[2]
if elastic.local_rank() == 0 and (folder / "killed").exists():
    while not (folder / "trained").exists():
        time.sleep(0.05)

inputs = torch.randn(480, 4, generator=torch.Generator().manual_seed(0))
targets = inputs.sum(1, keepdim=True)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


net = Net()


def note(is_local_main: bool) -> None:
    place = f"{os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}"
    print(f"world {elastic.generation()}: slot {elastic.local_rank()} place {place} main {is_local_main}", flush=True)


def end_of_step() -> None:
    time.sleep(0.02)
    if elastic.generation() == 2:
        (folder / "trained").touch()
        time.sleep(0.2)  # until slot 0 has returned


def with_accelerator(state: TrainingState) -> None:
    accelerator = Accelerator(state, cpu=True)
    if elastic.generation() == 1 and elastic.local_rank() == 0:
        die()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=2)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), loader)
    note(accelerator.is_local_main_process)
    accelerator.print(f"world {elastic.generation()}: printed by slot {elastic.local_rank()}")
    for _ in accelerator.epochs(1):
        for x, y in tqdm(loader, desc=f"world {elastic.generation()}: bar of slot {elastic.local_rank()}"):
            optimizer.zero_grad()
            accelerator.backward(model(x, y)["loss"])
            optimizer.step()
            state.commit()
            end_of_step()


def with_trainer(state: TrainingState) -> None:
    from transformers import TrainerCallback, TrainingArguments

    from elasticstate.huggingface import Trainer

    class EndOfStep(TrainerCallback):
        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            end_of_step()

    options = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    args = TrainingArguments(
        str(folder / "out"), num_train_epochs=1, per_device_train_batch_size=2, logging_steps=1, **options
    )
    if elastic.generation() == 1 and elastic.local_rank() == 0:
        die()
    data = [{"x": x, "labels": y} for x, y in zip(inputs, targets, strict=True)]
    trainer = Trainer(state, model=net, args=args, train_dataset=data, callbacks=[EndOfStep()])
    note(trainer.is_local_process_zero())
    with args.main_process_first():
        pass
    trainer.train()


def die() -> None:
    (folder / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


run(with_trainer if kind == "trainer" else with_accelerator)()
