"""A training whose optimizer, or model, is not in the state ends at its first step, with or without elasticrun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit.forks import Started, Template
from tests.kit.job import Job

SCRIPT = """
import os, signal, torch, elasticstate as elastic
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
state = elastic.TorchState({values})

@elastic.run
def train(state):
    ddp = DistributedDataParallel(model, init_sync=False)
    {enter}
    while state.step < 60:
        generator = torch.Generator().manual_seed(1000 * state.step + elastic.rank())
        optimizer.zero_grad()
        ddp(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        state.step += 1
        {commit}
        state.commit()
        if state.step == 20 and elastic.rank() == 1 and not os.path.exists("{died}"):
            open("{died}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        while state.step == 40 and elastic.size() == 1:  # until the newcomer has come
            state.check_host_updates()
    print("sum", repr(sum(p.double().sum().item() for p in model.parameters())), flush=True)

train(state)
"""
FORGOTTEN = {
    "the optimizer": ("model=model, step=0", "AdamW steps on state.model.weight, but is in no value of the state"),
    "the model": (
        "optimizer=optimizer, step=0",
        "state.optimizer (AdamW) steps on a parameter of shape (1, 8) that is in no value of the state",
    ),
    "another optimizer": (
        "model=model, optimizer=torch.optim.AdamW(model.parameters()), step=0",
        "AdamW steps on state.model.weight, but is in no value of the state",
    ),
    "a plain value": ("model=model, moments=optimizer.state_dict(), step=0", "but is in no value of the state"),
}
KEPT = {
    "a value": ("model=model, optimizer=optimizer, step=0", "", ""),
    "a copy": (
        "model=model, moments=None, step=0",
        "state.moments and optimizer.load_state_dict(state.moments)",
        "state.moments = optimizer.state_dict()",
    ),
}
OPTIONS = ("-np", "2", "--min-np", "1", "--join-window", "30", "--verify-sync")


def command(folder: Path, values: str, enter: str = "", commit: str = "") -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(values=values, enter=enter, commit=commit, died=folder / "died"))
    return [sys.executable, str(script)]


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_step_of_an_optimizer_that_no_commit_can_restore_is_an_error(
    template: Template, tmp_path: Path, forgotten: str
) -> None:
    values, text = FORGOTTEN[forgotten]
    script = command(tmp_path, values)
    with Job(tmp_path, *OPTIONS, command=script) as job:
        job.finish(3)
    assert text in job.events("root_cause")[0]["error"].splitlines()[-1]
    assert len(job.events("world_formed")) == 1, "the job must not spin"
    status, _, error = Started(template, tmp_path / "alone", script[1:]).finish(60)
    assert status == 1
    assert text in error.splitlines()[-1]
    assert not (tmp_path / "died").exists()


@pytest.mark.parametrize("kept", KEPT)
def test_an_optimizer_in_the_state_survives_a_kill(tmp_path: Path, kept: str) -> None:
    with Job(tmp_path, *OPTIONS, command=command(tmp_path, *KEPT[kept])) as job:
        job.finish(0)
    sums = [line.split("sum ")[1] for line in job.output.splitlines() if "] sum " in line]
    assert len(sums) == 2, job.output
    assert len(set(sums)) == 1, "the ranks have different models"
