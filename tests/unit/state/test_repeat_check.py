"""RepeatCheck warns of loops that begin again with a trained model, and of nothing else."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler, Subset, TensorDataset

from elasticstate.log import logger
from elasticstate.state import repeat_check
from elasticstate.state.base import State, committer_of
from elasticstate.state.loader import ElasticDataLoader
from elasticstate.state.repeat_check import RepeatCheck
from elasticstate.state.torch import TorchState
from elasticstate.worker.loop import release_exception
from tests.kit.state import Member, World

DATA = TensorDataset(torch.arange(64.0).unsqueeze(1))
EPOCHS = 20
ARGS = SimpleNamespace(epochs=EPOCHS, start=0)
Step = Callable[[], None]


class Lost(Exception):
    """A worker has failed."""


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: texts.append(text % values))
    return texts


def run(
    make: Callable[[], State],
    train: Callable[[State, Step], object],
    lost_at: tuple[int, ...] = (7, 5),
    is_replaced: bool = False,
) -> None:
    """Call ``train`` as ``run`` does, in worlds that end with the steps ``lost_at``.

    ``is_replaced``: a new process continues from the commit.
    """
    state = make()
    check = RepeatCheck(state)
    for generation, last in enumerate((*lost_at, None), 1):
        member = Member(World(2, generation))
        committer_of(state).use_session(member)
        state.sync()
        steps = itertools.count(1)

        def step(steps: Iterator[int] = steps, last: int | None = last) -> None:
            if next(steps) == last:
                raise Lost

        with contextlib.suppress(Lost), check:
            train(state, step)
        state.restore()
        commit = committer_of(state).commits[0]
        if is_replaced:
            held, state = state, make()
            committer_of(state).snapshot = committer_of(held).snapshot
            committer_of(state).use_session(member)
            state.restore()
            check = RepeatCheck(state)
        check.restored = commit


def counted() -> State:
    return TorchState(model=torch.nn.Linear(1, 1), epoch=0, batch=0, start=0)


def bare() -> State:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    return TorchState(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))


def with_loader() -> State:
    return TorchState(loader=ElasticDataLoader(DATA, batch_size=8), epoch=0, batch=0)


# ---------------------------------------------------------------------------------------------------- wrong programs


def ignores_the_counter(state: State, step: Step) -> None:
    for epoch in range(EPOCHS):
        step()
        state.epoch = epoch
        state.commit()


def counts_beside_the_loop(state: State, step: Step) -> None:
    for _epoch in range(ARGS.epochs):
        step()
        state.epoch += 1
        state.commit()


def assigns_the_counter_without_reading_it(state: State, step: Step) -> None:
    for state.epoch in range(EPOCHS):
        step()
        state.commit()


def begins_with_zero(state: State, step: Step) -> None:
    state.epoch = 0
    while state.epoch < EPOCHS:
        step()
        state.epoch += 1
        state.commit()


def counts_locally(state: State, step: Step) -> None:
    epoch = 0
    while epoch < EPOCHS:
        step()
        epoch += 1
        state.commit()


def commits_rarely(state: State, step: Step) -> None:
    for epoch in range(EPOCHS):
        step()
        if epoch % 2 == 0:
            state.commit()


def saves_rarely(state: State, step: Step) -> None:
    for _epoch in range(EPOCHS):
        step()
        state.commit(every=3)


def in_a_helper(state: State, step: Step) -> None:
    def fit(epochs: int) -> None:
        for epoch in range(1, epochs + 1):
            step()
            one(epoch)

    def one(epoch: int) -> None:
        state.commit()

    fit(EPOCHS)


class Fit:
    def __init__(self, state: State, step: Step) -> None:
        self.state, self.step, self.epochs = state, step, EPOCHS

    def __call__(self) -> None:
        for self.epoch in range(self.epochs):  # noqa: B020
            self.step()
            self.state.commit()


def in_an_object(state: State, step: Step) -> None:
    Fit(state, step)()


def over_epochs_of_an_elastic_loader(state: State, step: Step) -> None:
    for epoch in range(EPOCHS):
        state.loader.set_epoch(epoch)
        for _batch in state.loader:
            step()
            state.commit()


@pytest.mark.parametrize(
    ("make", "train", "says"),
    [
        (counted, ignores_the_counter, "for epoch in range(EPOCHS): has begun again at epoch = 0"),
        (bare, lambda state, step: commits_rarely(state, step), "has begun again at epoch = "),
        (counted, counts_beside_the_loop, "has begun again at _epoch = 0"),
        (counted, assigns_the_counter_without_reading_it, "has begun again at state.epoch = 0"),
        (counted, begins_with_zero, "has begun again at state.epoch = 1"),
        (bare, counts_locally, "while epoch < EPOCHS: has begun again at epoch = 1"),
        (counted, saves_rarely, "has begun again at _epoch = "),
        (bare, in_a_helper, "has begun again at epoch = 1"),
        (bare, in_an_object, "has begun again at self.epoch = 0"),
        (with_loader, over_epochs_of_an_elastic_loader, "has begun again at epoch = 0"),
    ],
)
def test_a_loop_that_begins_again_is_warned_of_once(
    logged: list[str], make: Callable[[], State], train: Callable[[State, Step], None], says: str
) -> None:
    run(make, train, lost_at=(20, 5))
    (text,) = logged
    assert says in text
    assert "is trained twice" in text


@pytest.mark.parametrize(
    ("make", "train"), [(bare, commits_rarely), (counted, begins_with_zero), (counted, ignores_the_counter)]
)
def test_a_new_process_that_begins_again_is_warned_of(
    logged: list[str], make: Callable[[], State], train: Callable[[State, Step], None]
) -> None:
    run(make, train, is_replaced=True)
    assert "has begun again at" in logged[0]


# -------------------------------------------------------------------------------------------------- correct programs


def continues(state: State, step: Step) -> None:
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020
        step()
        state.commit()


def continues_from_a_local(state: State, step: Step) -> None:
    first = state.epoch
    for epoch in range(first, EPOCHS):
        step()
        state.epoch = epoch + 1
        state.commit()


def does_what_remains(state: State, step: Step) -> None:
    remaining = EPOCHS - state.epoch
    for _ in range(remaining):
        step()
        state.epoch += 1
        state.commit()


def skips_what_is_done(state: State, step: Step) -> None:
    for epoch in range(EPOCHS):
        if epoch < state.epoch:
            continue
        step()
        state.epoch = epoch + 1
        state.commit()


def stops_itself(state: State, step: Step) -> None:
    for _ in range(1000):
        is_over = state.epoch >= EPOCHS
        if is_over:
            break
        step()
        state.epoch += 1
        state.commit()


def while_of_the_state(state: State, step: Step) -> None:
    count = 0
    while state.epoch < EPOCHS:
        count += 1
        step()
        state.epoch += 1
        state.commit(every=3)


def nested_counters(state: State, step: Step) -> None:
    while state.epoch < 5:
        while state.batch < 4:
            step()
            state.batch += 1
            state.commit()
        state.epoch, state.batch = state.epoch + 1, 0


def steps_within_an_epoch(state: State, step: Step) -> None:
    for state.epoch in range(state.epoch, 5):  # noqa: B020
        for _ in range(4):
            step()
        state.commit()


def phases(state: State, step: Step) -> None:
    for phase in range(4):
        while state.epoch < 5 * (phase + 1):
            step()
            state.epoch += 1
            state.commit()


def epochs_of_an_elastic_loader(state: State, step: Step) -> None:
    for _epoch in state.loader.epochs(3):
        for _index, _batch in enumerate(state.loader):
            step()
            state.batch += 1
            state.commit()
        state.batch = 0


def until_it_is_good(state: State, step: Step) -> None:
    tries = 0
    while random.random() < 0.95:
        step()
        tries += 1
        state.commit()


def of_a_plain_loader_once_per_epoch(state: State, step: Step) -> None:
    loader = DataLoader(DATA, 16, sampler=DistributedSampler(DATA, 1, 0))
    for state.epoch in range(state.epoch, 5):  # noqa: B020
        for batch, _ in enumerate(loader):
            step()
            if batch == len(loader) - 1:
                state.commit()


def of_a_plain_loader_at_its_end(state: State, step: Step) -> None:
    loader = DataLoader(DATA, 16)
    while state.epoch < 5:
        for batch, _ in enumerate(loader):
            step()
            if batch == len(loader) - 1:
                state.epoch += 1
                state.commit()


def of_a_plain_loader_that_skips(state: State, step: Step) -> None:
    loader = DataLoader(DATA, 16)
    for state.epoch in range(state.epoch, 5):  # noqa: B020
        for batch, _ in enumerate(loader):
            if batch < state.batch:
                continue
            step()
            state.batch = batch + 1
            state.commit()
        state.batch = 0


def of_the_rest(state: State, step: Step) -> None:
    rest = Subset(DATA, range(state.batch, len(DATA)))
    for _ in DataLoader(rest):
        step()
        state.batch += 1
        state.commit()


class From(Sampler[int]):
    def __init__(self, state: State) -> None:
        self._state = state

    def __iter__(self) -> Iterator[int]:
        yield from range(self._state.batch, len(DATA))

    def __len__(self) -> int:
        return len(DATA)


def with_a_sampler_of_its_own(state: State, step: Step) -> None:
    loader = DataLoader(DATA, sampler=From(state))
    for _ in loader:
        step()
        state.batch += 1
        state.commit()


class Trainer:
    """It keeps the counter, and a position that it reads from the state."""

    def __init__(self, state: State, step: Step) -> None:
        self.state, self.step, self.first, self.plan = state, step, state.epoch, SimpleNamespace(rest=state.epoch)

    def fit(self) -> None:
        for self.epoch in range(self.first, EPOCHS):  # noqa: B020
            self.step()
            self.state.epoch = self.epoch + 1
            self.state.commit()


def in_a_trainer(state: State, step: Step) -> None:
    Trainer(state, step).fit()


def with_a_tensor_as_counter(state: State, step: Step) -> None:
    patience = 3
    while int(state.count) < EPOCHS:
        patience = 0 if patience > 3 else patience + 1
        step()
        state.count += 1
        state.patience = patience
        state.commit()


def tensor() -> State:
    return TorchState(count=torch.tensor(0), patience=0)


def by_the_length_of_a_list(state: State, step: Step) -> None:
    while len(state.losses) < EPOCHS:
        step()
        state.losses.append(0.5)
        state.patience = len(state.losses) % 3
        state.commit()


def listed() -> State:
    return TorchState(losses=[], patience=0)


def with_a_nested_position(state: State, step: Step) -> None:
    place = state.place
    for place["epoch"] in range(place["epoch"], EPOCHS):  # noqa: B020
        step()
        state.commit()


def nested() -> State:
    return TorchState(place={"epoch": 0})


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize(
    ("make", "train"),
    [
        *[
            (counted, train)
            for train in (
                continues,
                continues_from_a_local,
                does_what_remains,
                skips_what_is_done,
                stops_itself,
                while_of_the_state,
                nested_counters,
                steps_within_an_epoch,
                phases,
                of_a_plain_loader_once_per_epoch,
                of_a_plain_loader_at_its_end,
                of_a_plain_loader_that_skips,
                of_the_rest,
                with_a_sampler_of_its_own,
                in_a_trainer,
            )
        ],
        (with_loader, epochs_of_an_elastic_loader),
        (bare, until_it_is_good),
        (tensor, with_a_tensor_as_counter),
        (listed, by_the_length_of_a_list),
        (nested, with_a_nested_position),
    ],
)
@pytest.mark.parametrize("lost_at", [(7, 5), (4, 4), (9, 10)])
def test_a_correct_program_is_not_warned_of(
    logged: list[str],
    make: Callable[[], State],
    train: Callable[[State, Step], None],
    lost_at: tuple[int, ...],
    is_replaced: bool,
) -> None:
    random.seed(sum(lost_at))
    run(make, train, lost_at, is_replaced)
    assert [
        line for line in logged if "has no batches left" not in line
    ] == []  # a commit at the last batch of an epoch


# ------------------------------------------------------------------------------------------- loaders, and global ranks


def of_a_plain_loader(state: State, step: Step) -> None:
    loader = DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 1, 0))
    for state.epoch in range(state.epoch, 3):  # noqa: B020
        for (_x,) in loader:
            step()
            state.commit()


def of_a_plain_loader_in_a_while(state: State, step: Step) -> None:
    loader = DataLoader(DATA, 4, shuffle=True)
    while state.epoch < 3:
        for (_x,) in loader:
            step()
            state.commit()
        state.epoch += 1


@pytest.mark.parametrize("train", [of_a_plain_loader, of_a_plain_loader_in_a_while])
def test_commits_within_an_epoch_of_a_plain_loader_are_warned_of(
    logged: list[str], train: Callable[[State, Step], None]
) -> None:
    run(counted, train)
    (text,) = logged
    assert "for (_x,) in loader: has begun an epoch of a DataLoader again in generation 2" in text


rank, WORLD_SIZE = 0, 3


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (
            ((0, 3), (1, 3)),
            ["the global variable rank is 0, but elasticstate.rank() of this worker is 1 in generation 2"],
        ),
        (((0, 3), (0, 2)), ["the global variable WORLD_SIZE is 3, but elasticstate.size() of this worker is 2 in"]),
        (
            (None, (1, 3)),
            ["the global variable rank is 0, but elasticstate.rank() of this worker is 1 in generation 2"],
        ),
        ((None, (0, 2)), []),
        (((2, 4), (1, 4)), []),
        (((0, 3), (0, 3)), []),
    ],
)
def test_global_variables_of_the_world_before_are_warned_of(
    logged: list[str], places: tuple[tuple[int, int] | None, ...], says: list[str]
) -> None:
    """``None``: this process begins in the second world."""
    state = counted()
    check = RepeatCheck(state)
    for generation, place in enumerate(places, 1):
        if place is None:
            continue
        committer_of(state).use_session(Member(World(place[1], generation, root=place[0]), place[0]))
        state.sync()
        with contextlib.suppress(Lost), check:
            continues(state, lambda: None) if generation == 2 else state.commit()
            raise Lost
        check.restored = committer_of(state).commits[0]
    assert len(logged) == len(says)
    assert all(text.startswith(begin) for text, begin in zip(logged, says, strict=True))


class Wrapper:
    """DDP, for example, which keeps the process group of its world alive."""


def test_nothing_of_a_world_is_kept_alive(logged: list[str]) -> None:
    wrappers: list[weakref.ref[Wrapper]] = []

    def train(state: State, step: Step) -> None:
        wrapper = Wrapper()
        wrappers.append(weakref.ref(wrapper))
        for epoch in range(EPOCHS):
            step()
            state.commit()
            if epoch == 2:
                del wrapper
                assert wrappers[-1]() is None
                wrapper = Wrapper()
                wrappers.append(weakref.ref(wrapper))

    state = counted()
    check = RepeatCheck(state)
    for generation in (1, 2):
        committer_of(state).use_session(Member(World(2, generation)))
        state.sync()
        steps = iter([lambda: None] * 9)
        with pytest.raises(StopIteration) as caught, check:
            train(state, lambda steps=steps: next(steps)())  # type: ignore[misc]
        held = caught.tb  # the script may keep it
        release_exception(caught.value)
        del caught
        assert [wrapper() for wrapper in wrappers] == [None] * len(wrappers)
        assert held is not None
        check.restored = committer_of(state).commits[0]
    assert len(logged) == 1


def test_a_dict_that_the_script_has_from_locals_stays_as_it_is() -> None:
    learning_rate = 0.1
    kept = locals()
    assert repeat_check._locals_of(inspect.currentframe())["learning_rate"] == 0.1  # type: ignore[arg-type]
    assert kept["learning_rate"] == learning_rate


def test_no_frame_keeps_its_local_variables() -> None:
    large = torch.zeros(3)
    kept = weakref.ref(large)
    repeat_check._locals_of(inspect.currentframe())  # type: ignore[arg-type]
    del large
    assert kept() is None
