"""Data loaders and other objects with iterators as values of the state."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.nodes import IterableWrapper, Loader, Prefetcher
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from elasticstate.errors import UsageError
from elasticstate.present_world import NotInWorldError, rank
from elasticstate.state.base import ObjectState, State, committer_of
from elasticstate.state.loader import ElasticDataLoader, has_iterators
from elasticstate.state.sampler import ElasticSampler
from elasticstate.state.torch import TorchState
from elasticstate.state.values import Captured

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


# ------------------------------------------------------------------------------------------- iterators of a new world


class Counter:
    """Iterable object whose iterator alone begins at the loaded position, like an IterableDataset of ``datasets``."""

    def __init__(self) -> None:
        self.start, self.position = 0, 0

    def __iter__(self) -> Iterator[int]:
        self.position, self.start = self.start, 0
        while self.position < 1000:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


class Wrapper:
    """Object with a loader inside, which is not iterable itself."""

    def __init__(self) -> None:
        self.loader = numbers()

    def batches(self) -> Iterator[Any]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


class Deep(Wrapper):
    """The same, with the loader in a container of an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {"train": [self.loader]}
        del self.loader

    def batches(self) -> Iterator[Any]:
        return iter(self.parts["train"][0])

    def state_dict(self) -> dict[str, Any]:
        return self.parts["train"][0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts["train"][0].load_state_dict(state)


class Method:
    """Object with a method that is a generator, which begins at the loaded position once."""

    def __init__(self) -> None:
        self.start, self.position = 0, 0

    def batches(self) -> Iterator[int]:
        self.position, self.start = self.start, 0
        while self.position < 1000:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.position = state["position"]


def numbers(**options: Any) -> Any:
    return StatefulDataLoader(list(range(1000)), **{"batch_size": None, **options})


SOURCES: dict[str, Callable[[], Any]] = {
    "map": numbers,
    "shuffled": lambda: numbers(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "elastic_sampler": lambda: numbers(
        batch_size=1, sampler=StatefulDistributedSampler(range(1000), num_replicas=1, rank=0, seed=3)
    ),
    "process": lambda: numbers(num_workers=1),
    "two_processes": lambda: numbers(batch_size=2, num_workers=2),
    "persistent": lambda: numbers(batch_size=2, num_workers=1, persistent_workers=True),
    "seldom_snapshots": lambda: numbers(batch_size=2, num_workers=1, snapshot_every_n_steps=3),
    "iterable": lambda: StatefulDataLoader(PlacedNumbers(), batch_size=2),
    "iterable_in_a_process": lambda: StatefulDataLoader(PlacedNumbers(), batch_size=2, num_workers=1),
    "nodes": lambda: Loader(IterableWrapper(range(1000))),
    "nodes_ahead": lambda: Loader(Prefetcher(IterableWrapper(range(1000)), prefetch_factor=2)),
    "own": Counter,
    "inside": Wrapper,
    "deep": Deep,
    "method": Method,
    "elastic": lambda: ElasticDataLoader(range(1000), 2, rank=lambda: 0, size=lambda: 1),
}


def begin(state: TorchState) -> Iterator[str]:
    """Begin ``train`` in a new world. Yield the samples as text."""
    committer_of(state).continue_iterators()
    source = state.source
    return map(str, source.batches() if isinstance(source, Wrapper | Method) else source)


def leave(state: TorchState) -> None:
    """Do what a worker does between two worlds, before a restore."""
    committer_of(state).loaded = {}


def taken(batches: Iterator[str], count: int) -> list[str]:
    return [next(batches) for _ in range(count)]


@pytest.fixture
def _threads_end() -> Iterator[None]:
    """Collect nodes, whose threads end then."""
    yield
    gc.collect()


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.usefixtures("_threads_end")
@pytest.mark.filterwarnings("ignore:state.source. its StatefulDistributedSampler")
def test_iterators_of_a_new_world_begin_at_the_position_of_the_state(kind: str) -> None:
    undisturbed = TorchState(source=SOURCES[kind]())
    expected = taken(begin(undisturbed), 20)

    survivor = TorchState(source=SOURCES[kind]())
    assert taken(begin(survivor), 4) == expected[:4]
    survivor.commit()
    leave(survivor)  # a planned change
    batches = begin(survivor)
    assert taken(batches, 4) == expected[4:8]
    survivor.commit()
    assert taken(batches, 2) == expected[8:10]
    leave(survivor)  # a failure, two batches after the commit
    survivor.restore()
    batches = begin(survivor)
    assert taken(batches, 2) == expected[8:10]
    survivor.commit()

    newcomer = TorchState(source=SOURCES[kind]())
    committer_of(newcomer).loaded = {}
    newcomer.apply(survivor.capture())
    assert taken(begin(newcomer), 4) == expected[10:14]
    leave(survivor)  # a planned change, in the same world as the newcomer's first one
    assert taken(begin(survivor), 4) == expected[10:14]


@pytest.mark.parametrize("kind", ["map", "process", "iterable", "nodes"])
def test_a_commit_before_the_first_batch_of_a_world_keeps_the_position(kind: str) -> None:
    state = TorchState(source=SOURCES[kind]())
    expected = taken(begin(TorchState(source=SOURCES[kind]())), 8)
    assert taken(begin(state), 4) == expected[:4]
    state.commit()
    for change in (lambda: None, state.restore):
        leave(state)
        change()
        begin(state)
        state.commit()
        state.restore()
    assert taken(map(str, state.source), 4) == expected[4:]


def test_a_restore_of_the_script_counts_no_more_in_the_next_world() -> None:
    state = TorchState(source=Counter())
    batches = begin(state)
    taken(batches, 4)
    state.commit()
    state.restore()
    batches = map(str, state.source)
    assert taken(batches, 4) == ["4", "5", "6", "7"]
    leave(state)  # a planned change
    assert taken(begin(state), 1) == ["8"]


@pytest.mark.parametrize("kind", ["map", "process", "nodes", "own", "elastic"])
def test_reset_callbacks_leave_the_position_and_may_change_it(kind: str) -> None:
    expected = taken(begin(TorchState(source=SOURCES[kind]())), 8)
    state = TorchState(source=SOURCES[kind]())
    batches = begin(state)
    at_start = state.source.state_dict()
    taken(batches, 4)
    state.commit()
    taken(batches, 2)
    leave(state)
    state.restore()
    state.register_reset_callbacks([lambda: None])
    state.on_reset()
    state.commit()  # a sync seals the changes of callbacks
    newcomer = TorchState(source=SOURCES[kind]())
    newcomer.apply(state.capture())
    assert taken(begin(state), 4) == expected[4:]
    assert taken(map(str, newcomer.source), 4) == expected[4:]
    if kind == "own":  # this class cannot return a position before an iterator begins there
        return
    leave(state)
    state.restore()
    state.register_reset_callbacks([functools.partial(state.source.load_state_dict, at_start)])
    state.on_reset()
    assert taken(begin(state), 4) == expected[:4]


@pytest.mark.parametrize("kind", ["map", "process", "persistent", "nodes"])
@pytest.mark.usefixtures("_threads_end")
def test_an_iterator_from_before_a_load_is_refused(kind: str) -> None:
    """It would go on at a position of its own, and each commit would have that of the load."""
    state = TorchState(source=SOURCES[kind]())
    batches = begin(state)
    taken(batches, 2)
    state.commit()
    leave(state)  # a planned change
    fresh = begin(state)
    with pytest.raises(UsageError, match="Begin a new loop over the loader"):
        next(batches)
    taken(fresh, 1)
    state.restore()  # by the script
    with pytest.raises(UsageError, match="Begin a new loop over the loader"):
        next(fresh)
    expected = taken(begin(TorchState(source=SOURCES[kind]())), 3)
    assert taken(map(str, state.source), 1) == expected[2:]


def test_the_first_call_leaves_a_position_that_the_script_has_loaded() -> None:
    state = TorchState(source=Counter())
    state.source.load_state_dict({"position": 7})
    assert taken(begin(state), 1) == ["7"]


def test_batches_taken_before_the_first_call_count_on_all_ranks() -> None:
    root = TorchState(source=numbers())
    next(iter(root.source))
    newcomer = TorchState(source=numbers())
    committer_of(newcomer).loaded = {}
    newcomer.apply(root.capture())
    assert taken(begin(root), 2) == taken(begin(newcomer), 2)


class Record:
    """Object with an open file, which is no loader."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")
        self.loaded = 0

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded += 1


def test_other_objects_do_not_load_their_own_state(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    record = Record(tmp_path / "record")
    values = {"model": model, "optimizer": optimizer, "schedule": schedule, "record": record}
    assert not [name for name, value in values.items() if has_iterators(value)]
    state = TorchState(**values)
    for _ in range(2):
        committer_of(state).continue_iterators()
    record.file.close()
    assert record.loaded == 0


class Own(State):
    """State of a user's own class."""

    def capture(self) -> dict[str, Any]:
        return {"source": self.source.state_dict()}

    def apply(self, values: Captured) -> None:
        self.source.load_state_dict(values["source"])


def test_a_state_of_the_users_own_continues_its_iterators() -> None:
    state = Own(source=numbers())
    taken(begin(state), 4)
    state.commit()
    leave(state)
    assert taken(begin(state), 2) == ["4", "5"]


class Ranked(IterableDataset[int]):
    """Data set that needs a world as soon as an iterator is made."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        rank()
        return iter(range(self.position, 9))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_position_is_loaded_before_the_first_world_without_making_an_iterator() -> None:
    state = TorchState(source=StatefulDataLoader(Ranked(), batch_size=None))
    with pytest.raises(NotInWorldError):
        state.source.state_dict()
    saved = TorchState(source=numbers())
    next(iter(saved.source))
    state.apply(saved.capture())


# ------------------------------------------------------------------------------------------ values that are refused


@pytest.mark.parametrize("kind", [TorchState, ObjectState])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DataLoader(range(9)), r"state\.loader is a DataLoader, which has no state_dict.*ElasticDataLoader"),
        (lambda: DistributedSampler(range(9), 2, 0), r"state\.loader is a DistributedSampler.*ElasticSampler"),
        (lambda: [DataLoader(range(9))], r"state\.loader contains a DataLoader.*a value of its own"),
        (lambda: {"train": numbers()}, r"state\.loader contains a StatefulDataLoader.*a value of its own"),
    ],
    ids=["loader", "sampler", "in_a_list", "in_a_dict"],
)
def test_loaders_that_would_be_pickled_are_refused(kind: type[State], make: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        kind(loader=make())


def test_a_loader_without_a_state_is_refused_later_too() -> None:
    state = TorchState(loader=None)
    with pytest.raises(UsageError, match="ElasticDataLoader"):
        state.loader = DataLoader(range(9))
    assert state.loader is None


class Stateful(DataLoader[int]):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_loaders_and_samplers_with_a_state_are_values() -> None:
    TorchState(a=Stateful(range(9)), b=ElasticSampler(range(9)), c=ElasticDataLoader(range(9), 2), d=numbers())


class Chosen(TorchState):
    """State that commits no loader."""

    def capture(self) -> dict[str, Any]:
        return {"step": self.step}

    def apply(self, values: Captured) -> None:
        self.step = values["step"]


def test_a_state_that_commits_no_loader_may_have_one() -> None:
    Chosen(loader=DataLoader(range(9)), step=1).commit()


def test_a_sampler_for_a_world_of_one_size_is_warned_of() -> None:
    sampler = StatefulDistributedSampler(range(9), num_replicas=2, rank=0)
    with pytest.warns(UserWarning, match=r"state\.loader: its StatefulDistributedSampler divides"):
        TorchState(loader=StatefulDataLoader(range(9), sampler=sampler))
