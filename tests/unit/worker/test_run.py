"""The decorator ``run``: where it finds the state among the arguments."""

from __future__ import annotations

from typing import Any

import pytest

import elasticstate as elastic
from elasticstate import present_world
from elasticstate.worker import run


@pytest.fixture(autouse=True)
def _is_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_used", False)
    monkeypatch.setattr(present_world, "_present", None)
    monkeypatch.setattr(run, "_loop", None)


class Training:
    def __init__(self) -> None:
        self.state: Any = elastic.ObjectState(step=0)

    @elastic.run
    def fit(self, steps: int, state: Any) -> str:
        assert state is self.state
        while state.step < steps:
            state.step += 1
            state.commit()
        return "done"


@pytest.mark.parametrize("by_name", [False, True])
def test_a_method_and_any_argument(by_name: bool) -> None:
    training = Training()
    result = training.fit(3, state=training.state) if by_name else training.fit(3, training.state)
    assert (result, training.state.step) == ("done", 3)


def test_without_a_state_the_error_says_what_to_pass() -> None:
    with pytest.raises(elastic.UsageError, match=r"fit\(\) is decorated .* so one of its arguments must be a State"):
        Training().fit(3, {"step": 0})
