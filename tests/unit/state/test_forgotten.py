"""Schedulers, scalers and averages of the script that no commit contains."""

from __future__ import annotations

import gc
import logging
import runpy
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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
    forgotten.WARNED.clear()
    monkeypatch.setattr(run, "_used", False)
    monkeypatch.setattr(run, "_loop", None)
    monkeypatch.setattr(present_world, "_present", None)


def warnings_of(
    program: str, directory: Path, caplog: pytest.LogCaptureFixture, words: str = "is in no value of the state"
) -> list[str]:
    script = directory / "train.py"
    script.write_text(BEGIN + textwrap.dedent(program))
    with caplog.at_level(logging.WARNING, "elasticstate"):
        runpy.run_path(str(script), run_name="train_script")
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


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
SCHEDULE = """
class Schedule:
    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        self.optimizer.step()

schedule = Schedule(optimizer)

@elastic.run
def train(state):
    for _ in range(5):
        model(torch.ones(1, 2)).sum().backward()
        schedule.step()
        state.commit()
"""
COUNT = """
steps = 0

def count():
    global steps
    steps += 1

@elastic.run
def train(state, each):
    for _ in range(5):
        step()
        each()
        state.commit()
"""
AVERAGE = """
class Average:
    def __init__(self, parameters):
        self.shadow = [p.detach().clone() for p in parameters]

    def update(self, parameters):
        for shadow, p in zip(self.shadow, parameters):
            shadow.lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]

average = Average(model.parameters())

@elastic.run
def train(state):
    for _ in range(5):
        step()
        average.update(model.parameters())
        state.commit()
"""


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
        (f"schedulers = [StepLR(optimizer, 1)]\n{STATE}{FUNCTION}train(state)", "schedulers[0] (StepLR) changes"),
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
            "            self.schedule.step()\n        train(state)\nTraining().fit()",
            "self.schedule (StepLR) changes",
        ),
        (
            f"{STATE}class Training:\n    def __init__(self):\n        self.schedule = StepLR(optimizer, 1)\n"
            "    @elastic.run\n    def fit(self, state):\n        step()\nTraining().fit(state)",
            "self.schedule (StepLR) changes",
        ),
        (
            f"{STATE}class Job: pass\njob = Job()\njob.scaler = torch.amp.GradScaler('cpu')\n{FUNCTION}train(state)",
            "job.scaler (GradScaler) scales gradients",
        ),
        (
            f"{STATE}def helper():\n    inner = StepLR(optimizer, 1)\n    def each():\n        step()\n"
            "        inner.step()\n    return each\neach = helper()\n@elastic.run\ndef train(state):\n    each()\n"
            "train(state)",
            "inner (StepLR) changes",
        ),
        (f"{SCHEDULE}{STATE}train(state)", "schedule (Schedule) changes while the script trains"),
        (f"{SCHEDULE}schedule.model = model\n{STATE}train(state)", "schedule.steps (int) changes"),
        (f"{COUNT}{STATE}train(state, count)", "steps (int) changes while the script trains"),
        (
            f"{STATE}def main():\n    best = 0.0\n    @elastic.run\n    def train(state):\n        nonlocal best\n"
            "        for _ in range(5):\n            step()\n            best = max(best, best + 1)\n"
            "            state.commit()\n    train(state)\nmain()",
            "best (float) changes while the script trains",
        ),
        (
            f"{STATE}def main():\n    seen = 0\n    @elastic.run\n    def train(state):\n        def count():\n"
            "            nonlocal seen\n            seen += 1\n        for _ in range(5):\n            step()\n"
            "            count()\n            state.commit()\n    train(state)\nmain()",
            "seen (int) changes while the script trains",
        ),
        (
            f"{STATE}seen = 0\n@elastic.run\ndef train(state):\n    def count():\n        global seen\n"
            "        seen += 1\n    for _ in range(5):\n        step()\n        count()\n        state.commit()\n"
            "train(state)",
            "seen (int) changes while the script trains",
        ),
        (f"{AVERAGE}{STATE}train(state)", "average (Average) changes while the script trains"),
        (f"{COPY}{STATE}{UPDATE.format(update='lerp_(old, 0.1)')}", "target (Linear) changes while the script trains"),
        (f"{COPY}{STATE}{UPDATE.format(update='data.copy_(old)')}", "target (Linear) changes while the script trains"),
    ],
)
def test_one_that_the_state_lacks_is_named_once(
    program: str, begin: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (warning,) = warnings_of(program, tmp_path, caplog)
    assert warning.startswith(begin)
    value = begin.partition(" ")[0].partition("[")[0]
    name = value.rpartition(".")[2]
    instead = f", and use state.{name} instead" if "(int)" in warning or "(float)" in warning else ""
    assert warning.endswith(f"Give it to the state: TorchState(..., {name}={value}){instead}.")


@pytest.mark.parametrize("is_outside", [True, False])
def test_what_belongs_to_one_world_is_named_if_the_function_does_not_make_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_outside: bool
) -> None:
    made = "hook = PowerSGDState(None)\n"
    program = f"""
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

{STATE}
{made if is_outside else ""}
@elastic.run
def train(state):
    {"" if is_outside else made}
    for _ in range(5):
        step()
        hook.iter += 1
        state.commit()

train(state)
"""
    found = warnings_of(program, tmp_path, caplog, "was created outside of the function")
    assert len(found) == is_outside
    for warning in found:
        assert warning.startswith("hook (PowerSGDState) was created outside of the function, but belongs to one world")
        assert warning.endswith("Create it in the function that is decorated with run, anew in each world.")


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
        f"{SCHEDULE}state = elastic.TorchState(model=model, optimizer=optimizer, schedule=schedule)\ntrain(state)",
        f"{SCHEDULE}schedule.model = model  # a trainer, whose numbers may be figures\n{STATE}".replace("+= 1", "= 1.5")
        + "train(state)",
        f"{COUNT}state = elastic.TorchState(model=model, optimizer=optimizer, steps=0)\n"
        "def each():\n    count()\n    state.steps = steps\ntrain(state, each)",
        f"{COUNT}{STATE}train(state, lambda: None)",
        f"{COUNT}{STATE}last = 0\ndef each():\n    global last\n    last = 1.5\ntrain(state, each)",
        f"{SCHEDULE}{STATE}schedule.steps = 'none'\nSchedule.step = lambda self: self.optimizer.step()\ntrain(state)",
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
def test_what_the_state_has_or_the_function_makes_is_not(
    program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(program, tmp_path, caplog) == []


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(model)
        self.average, self.temperature, self.seen = torch.zeros(2), 1.0, None
        self.setting, self.batches, self.last = 3, 0, torch.zeros(1)

    def forward(self, x):
        {update}
        return self.layers(x)

net = Net()
state = elastic.TorchState(net=net, optimizer=optimizer, batches=0)

@elastic.run
def train(state):
    net.setting = elastic.size()
    for _ in range(5):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.batches += 1
        state.commit()

train(state)
"""


@pytest.mark.parametrize(
    ("update", "begin"),
    [
        ("self.average = 0.9 * self.average + 0.1 * x[0]", "state.net.average: plain"),
        ("self.average.mul_(0.9).add_(x[0])", "state.net.average: plain"),
        ("self.temperature *= 0.9", "state.net.temperature: plain"),
        ("self.average += 1; self.temperature += 1", "state.net.average, state.net.temperature: plain"),
        ("self.layers[0].in_features += 1", "state.net.layers.0.in_features: plain"),
        ("self.seen = x", ""),  # not there at the begin: a result of the step
        ("self.last = self.layers(x).sum()", ""),
        ("self.batches += 1", ""),  # the state has the same number
        ("pass", ""),
    ],
)
def test_plain_attributes_of_modules_that_change_are_named(
    update: str, begin: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = warnings_of(NET.format(update=update), tmp_path, caplog, "plain attributes")
    assert len(found) == bool(begin)
    assert "".join(found).startswith(begin)


@pytest.mark.parametrize(("attribute", "begin"), [("steps", "state.optimizer.steps: plain"), ("_", "")])
def test_plain_attributes_of_an_optimizer_that_change_are_named(
    attribute: str, begin: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = f"""
    class Counting(SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self.steps, self.rank = 0, 0

        def step(self):
            self.{attribute} = self.param_groups[0].get("steps", 0) + 1
            self.param_groups[0]["steps"] = self.{attribute}
            super().step()

    optimizer = Counting(model.parameters())
    state = elastic.TorchState(model=model, optimizer=optimizer)

    @elastic.run
    def train(state):
        optimizer.rank = elastic.rank()
        for _ in range(5):
            step(optimizer)
            state.commit()

    train(state)
    """
    found = warnings_of(textwrap.dedent(program), tmp_path, caplog, "plain attributes")
    assert "".join(found).startswith(begin)
    assert len(found) == bool(begin)


def test_a_module_with_an_extra_state_of_its_own_and_a_weight_that_is_computed_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_its_own = NET.format(update="self.temperature *= 0.9").replace(
        "    def forward",
        "    def get_extra_state(self):\n        return self.temperature\n\n"
        "    def set_extra_state(self, value):\n        self.temperature = value\n\n    def forward",
    )
    computed = NET.format(update="pass").replace("net = Net()", "net = Net()\nnn.utils.spectral_norm(model)\n")
    assert warnings_of(of_its_own, tmp_path, caplog, "plain attributes") == []
    run._used = False
    assert warnings_of(computed, tmp_path, caplog, "plain attributes") == []


def test_a_training_function_and_its_variables_are_not_kept() -> None:
    class Large:
        pass

    def make() -> tuple[Callable[[], None], weakref.ref[Large]]:
        held, count = Large(), 0

        def train() -> None:
            nonlocal count
            count += bool(held)

        return train, weakref.ref(held)

    train, reference = make()
    assert [found.variable for found in forgotten._counts(train, ())] == ["count"]
    del train
    gc.collect()
    assert reference() is None


def test_no_code_of_the_scripts_objects_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stand-ins compute their class when they are asked for it, and what they stand for when anything is asked."""
    program = """
    class StandIn:
        def __getattribute__(self, name):
            raise ValueError(name)

    stand_in = StandIn()
    schedule = StepLR(optimizer, 1)
    state = elastic.TorchState(model=model, optimizer=optimizer)

    @elastic.run
    def train(state):
        for _ in range(2):
            step()
            schedule.step()
            state.commit()

    train(state)
    """
    (warning,) = warnings_of(program, tmp_path, caplog)
    assert warning.startswith("schedule (StepLR) changes")


def test_modules_that_import_something_when_they_are_asked_are_not_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lazy modules import what they stand for at the first use of an attribute, which may be missing."""
    monkeypatch.setitem(sys.modules, "lazy", ModuleType("lazy"))  # removed when the test is over
    program = """
    import inspect
    import sys
    from types import ModuleType

    inspect.modulesbyfile.clear()  # torch has looked for the script in this process

    class Lazy(ModuleType):
        def __getattr__(self, name):
            raise ImportError("lazy needs a package that is not installed")

    sys.modules["lazy"] = Lazy("lazy")
    seen = 0

    class Meter:
        count = 0

        def add(self):
            self.count += 1

    meter = Meter()
    meter.add()
    state = elastic.TorchState(model=model, optimizer=optimizer)

    @elastic.run
    def train(state):
        global seen
        for _ in range(4):
            step()
            seen += 1
            meter.add()
            state.commit()

    train(state)
    """
    found = warnings_of(program, tmp_path, caplog)
    assert sorted(text.split()[0] for text in found) == ["meter.count", "seen"]


def test_the_first_step_is_not_kept_in_memory(tmp_path: Path) -> None:
    """A look at the local variables of a frame would keep them until the function returns."""
    script = tmp_path / "train.py"
    script.write_text(
        f"{BEGIN}import gc, weakref\nscheduler = StepLR(optimizer, 1)\n{STATE}"
        "@elastic.run\ndef train(state):\n    loss = model(torch.ones(1, 2)).sum()\n    loss.backward()\n"
        "    optimizer.step()\n    first = weakref.ref(loss)\n    loss = None\n    gc.collect()\n"
        "    assert first() is None\n\ntrain(state)\n"
    )
    runpy.run_path(str(script), run_name="train_script")
