"""Schedulers, scalers and averages of the script that no commit contains."""

from __future__ import annotations

import logging
import textwrap

import pytest

from elasticstate import present_world
from elasticstate.state import forgotten
from elasticstate.worker import run

BEGIN = """
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel
import elasticstate as elastic

model = nn.Linear(2, 2)
optimizer = SGD(model.parameters(), lr=0.1)

def step(optimizer=optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""

FUNCTION = """
@elastic.run
def train(state):
    for _ in range(2):
        step()
        state.commit()
"""


@pytest.fixture(autouse=True)
def _warns_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgotten, "_warned", set())
    monkeypatch.setattr(run, "_used", False)
    monkeypatch.setattr(run, "_loop", None)
    monkeypatch.setattr(present_world, "_present", None)


def warnings_of(program: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, "elasticstate"):
        exec(BEGIN + textwrap.dedent(program), {"__name__": "__main__"})
    return [record.getMessage() for record in caplog.records if "is in no value of the state" in record.getMessage()]


COPY = "import copy\ntarget = copy.deepcopy(model)\n"
UPDATE = """
@elastic.run
def train(state):
    for _ in range(9):
        step()
        with torch.no_grad():
            for new, old in zip(target.parameters(), model.parameters()):
                new.{update}
        state.commit()

train(state)
"""
STATE = "state = elastic.TorchState(model=model, optimizer=optimizer)\n"


@pytest.mark.parametrize(
    ("program", "begin"),
    [
        (
            f"scheduler = StepLR(optimizer, 1)\n{STATE}{FUNCTION}train(state)",
            "scheduler (StepLR) changes",
        ),
        (
            f"plateau = ReduceLROnPlateau(optimizer)\n{STATE}{FUNCTION}train(state)",
            "plateau (ReduceLROnPlateau) changes the learning rates of state.optimizer",
        ),
        (
            f"scaler = torch.amp.GradScaler('cpu')\n{STATE}{FUNCTION}train(state)",
            "scaler (GradScaler) scales gradients",
        ),
        (f"ema = AveragedModel(model)\n{STATE}{FUNCTION}train(state)", "ema (AveragedModel) averages weights"),
        (
            f"{STATE}@elastic.run\ndef train(state, schedule):\n    step()\n\ntrain(state, StepLR(optimizer, 1))",
            "schedule (StepLR) changes",
        ),
        (
            f"{STATE}def main():\n    inner = StepLR(optimizer, 1)\n    @elastic.run\n    def train(state):\n"
            "        step()\n        inner.step()\n    train(state)\nmain()",
            "inner (StepLR) changes",
        ),
        (
            f"{STATE}class Training:\n    def __init__(self):\n        self.schedule = StepLR(optimizer, 1)\n"
            "    def fit(self):\n        @elastic.run\n        def train(state):\n            step()\n"
            "        train(state)\nTraining().fit()",
            "self.schedule (StepLR) changes",
        ),
        (f"{COPY}{STATE}{UPDATE.format(update='lerp_(old, 0.1)')}", "target (Linear) changes while the script trains"),
        (f"{COPY}{STATE}{UPDATE.format(update='data.copy_(old)')}", "target (Linear) changes while the script trains"),
    ],
)
def test_one_that_the_state_lacks_is_named_once(program: str, begin: str, caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(program, caplog)
    assert warning.startswith(begin)
    assert "Give it to the state: TorchState(..., " in warning


@pytest.mark.parametrize(
    "program",
    [
        "scheduler = StepLR(optimizer, 1)\n"
        f"state = elastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler)\n{FUNCTION}train(state)",
        "first, second = ConstantLR(optimizer), StepLR(optimizer, 1)\n"
        "both = SequentialLR(optimizer, [first, second], [1])\n"
        f"state = elastic.TorchState(model=model, optimizer=optimizer, both=both)\n{FUNCTION}train(state)",
        "scheduler = StepLR(optimizer, 1)\n"
        "state = elastic.TorchState(model=model, optimizer=optimizer, position=scheduler.state_dict())\n"
        f"{FUNCTION}train(state)",
        f"{STATE}@elastic.run\ndef train(state):\n    scheduler = StepLR(optimizer, 1)\n    step()\n\ntrain(state)",
        f"other = StepLR(SGD(nn.Linear(2, 2).parameters(), lr=0.1), 1)\n{STATE}{FUNCTION}train(state)",
        f"{COPY}{STATE}{UPDATE.format(update='sum()')}",
        f"import copy\nouter = nn.Sequential(model)\n{STATE}{FUNCTION}train(state)",
        f"scaler = torch.amp.GradScaler('cpu', enabled=False)\n{STATE}{FUNCTION}train(state)",
        "class Wrapper:\n    def __init__(self, of):\n        self.of = of\n"
        "    def state_dict(self):\n        return self.of.state_dict()\n"
        "    def load_state_dict(self, state):\n        self.of.load_state_dict(state)\n"
        "scheduler = StepLR(optimizer, 1)\n"
        "state = elastic.TorchState(model=model, optimizer=optimizer, wrapped=Wrapper(scheduler))\n"
        f"{FUNCTION}train(state)",
    ],
)
def test_what_the_state_has_or_the_function_makes_is_not(program: str, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(program, caplog) == []
