"""Trains on digits in a loop with an Accelerator, and logs what test_huggingface.py checks."""

from __future__ import annotations

import torch
from huggingface_log import args, is_last, note, note_commit, note_model
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from elasticstate.huggingface import Accelerator, TrainingState, run

SAMPLES = 253
digits = load_digits()
images = torch.tensor(digits.data[:SAMPLES], dtype=torch.float32) / 16
dataset = TensorDataset(images, torch.tensor(digits.target[:SAMPLES]), torch.arange(SAMPLES))


@run(workers=args.workers, step=0)
def main(state: TrainingState) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))  # a new one in each world
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(dataset, batch_size=2, shuffle=True)
    scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=600)
    accelerator = Accelerator(state, cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    is_first = True
    for epoch in accelerator.epochs(1000):
        if is_first:
            note_model("enter", state.step, state.model, state.optimizer)
            is_first = False
        loss_sum = torch.zeros(())
        for inputs, targets, numbers in loader:
            note("trained", step=state.step, epoch=epoch, ids=numbers.tolist() if state.loader.weight else [])
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                loss_sum += loss.detach() * state.loader.weight
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                state.step += 1
                mean = accelerator.reduce(loss_sum, "mean").item()
                note("loss", step=state.step, loss=mean, lr=scheduler.get_last_lr()[0], epoch=epoch)
                loss_sum = torch.zeros(())
                if is_last(state.step):
                    note_model("final", state.step, state.model, state.optimizer)
                    return
            state.commit(every=args.commit_every)
            note_commit(state, state.step)


main()
