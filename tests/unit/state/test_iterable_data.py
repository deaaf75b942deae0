"""torchdata's StatefulDataLoader as a value of the state, with iterable-style data sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticstate.state import TorchState

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13


class Numbers(IterableDataset[int]):
    """Data set without a state."""

    def __iter__(self) -> Iterator[int]:
        yield from range(1000)


class PlacedNumbers(IterableDataset[int]):
    """Data set with a state."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 1000:
            self.place += 1
            yield self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def first_after_two_resumes(state: TorchState) -> int:
    """Take 20 batches, resume, take 5 batches, resume. Return the first sample after that."""
    for count in (20, 5):
        batches = iter(state.loader)
        for _ in range(count):
            next(batches)
        state.commit()
        state.restore()
    return int(next(iter(state.loader))[0])


def test_a_data_set_without_a_state_is_warned_of_as_its_second_resume_skips_samples() -> None:
    """A failure means that torchdata skips no samples any more: remove the warning and the text in README."""
    told = r"state\.loader: Numbers has no state_dict\(\).*examples/stream\.py"
    with pytest.warns(UserWarning, match=told) as warned:
        state = TorchState(loader=StatefulDataLoader(Numbers(), batch_size=8))
    assert [w.filename for w in warned if "no state_dict" in str(w.message)] == [__file__]
    assert first_after_two_resumes(state) == (20 + 20 + 5) * 8


def test_a_data_set_with_a_state_goes_on_where_it_was() -> None:
    state = TorchState(loader=StatefulDataLoader(PlacedNumbers(), batch_size=8))
    assert first_after_two_resumes(state) == (20 + 5) * 8


def test_other_values_are_not_warned_of() -> None:
    TorchState(loader=StatefulDataLoader(list(range(9))), dataset=Numbers())
