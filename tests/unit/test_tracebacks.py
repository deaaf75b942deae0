"""Tracebacks of errors that a script has caused have no frames of the package; those inside it are complete."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from elasticstate import TorchState, tracebacks
from elasticstate.errors import UsageError
from elasticstate.options import kinds
from elasticstate.present_world import world
from elasticstate.state.step_check import StepCheck


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


def test_the_traceback_of_a_wrong_use_ends_in_the_script() -> None:
    text = tracebacks.text_of(raised(world))
    assert "test_tracebacks.py" in text
    assert "present_world.py" not in text
    assert text.splitlines()[-1].startswith("elasticstate.errors.NotInWorldError: ")


def test_the_traceback_of_an_optimizers_hook_ends_in_the_script() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError), StepCheck(TorchState(model=model), lambda: None):
        text = tracebacks.text_of(raised(optimizer.step))
    assert text.splitlines()[-2].strip() in ("call()", "^^^^^^")
    assert "optimizer.py" not in text


def test_the_traceback_of_another_error_is_complete() -> None:
    assert "kinds.py" in tracebacks.text_of(raised(lambda: kinds.SECONDS.parse("x")))


SCRIPT = """
import elasticstate as elastic

@elastic.run
def train(state):
    raise ValueError("bad sample")

train(elastic.ObjectState(step=0))
"""


def test_an_error_of_the_scripts_function_is_printed_without_the_loop_that_calls_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "ValueError: bad sample"
    assert "in train" in done.stderr
    assert "elasticstate" not in done.stderr


def test_without_a_frame_of_the_script_only_the_message_remains() -> None:
    assert tracebacks.text_of(UsageError("do that")) == "elasticstate.errors.UsageError: do that\n"


def test_the_error_file_has_the_short_traceback() -> None:
    message = tracebacks.describe(raised(world), 1)["message"]
    assert "present_world.py" not in message["extraInfo"]["py_callstack"]


def test_an_uncaught_error_is_printed_without_frames_of_the_package() -> None:
    script = "import elasticstate as elastic\nelastic.rank()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("elasticstate.errors.NotInWorldError: ")
    assert "present_world.py" not in done.stderr


def test_another_uncaught_error_is_printed_as_by_python() -> None:
    script = "import elasticstate as elastic\nelastic.local_rank(1)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].startswith("TypeError: ")
