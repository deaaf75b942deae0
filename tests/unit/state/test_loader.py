from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from elasticstate.compat.modules import end_persistent_workers
from elasticstate.errors import UsageError
from elasticstate.state import loader as loader_module
from elasticstate.state.loader import ElasticDataLoader
from elasticstate.state.sampler import Order
from elasticstate.state.torch import TorchState

Trained = list[tuple[list[int], float, bool]]


def loader_at(n: int, rank: int, size: int, **options: object) -> ElasticDataLoader:
    return ElasticDataLoader(range(n), rank=lambda: rank, size=lambda: size, **options)


def trained(loader: ElasticDataLoader) -> Trained:
    return [(batch.tolist(), round(loader.weight, 6), loader.step_ends) for batch in loader]


def test_each_rank_gets_its_batches_of_the_epoch_in_turn() -> None:
    found = [trained(loader_at(10, rank, 2, batch_size=2, shuffle=False)) for rank in range(2)]
    assert found[0] == [([0, 2], 1.0, True), ([4, 6], 1.0, True), ([8], 1.0, True)]
    assert found[1] == [([1, 3], 1.0, True), ([5, 7], 1.0, True), ([9], 1.0, True)]


def test_the_tail_is_shared_out_evenly_and_weights_make_the_mean_of_means_the_mean() -> None:
    found = [trained(loader_at(9, rank, 2, batch_size=3, shuffle=False))[-1] for rank in range(2)]
    assert found == [([6, 8], round(2 * 2 / 3, 6), True), ([7], round(2 / 3, 6), True)]


def test_a_rank_without_a_sample_gets_one_that_does_not_count() -> None:
    found = [trained(loader_at(5, rank, 4, batch_size=1, shuffle=False))[-1] for rank in range(4)]
    assert found == [([4], 4.0, True), ([4], 0.0, True), ([4], 0.0, True), ([4], 0.0, True)]


def test_drop_last_leaves_out_what_is_no_whole_step() -> None:
    loader = loader_at(11, 0, 2, batch_size=2, drop_last=True)
    assert len(loader) == 2
    assert [len(batch) for batch, *_ in trained(loader)] == [2, 2]


def test_a_global_batch_has_the_same_samples_whatever_the_world() -> None:
    steps = {}
    for size in (1, 2, 3, 5):
        ranks = [trained(loader_at(50, rank, size, global_batch_size=16, seed=4)) for rank in range(size)]
        steps[size] = [
            sorted(i for batch, weight, _ in step if weight for i in batch) for step in zip(*ranks, strict=True)
        ]
    assert [len(step) for step in steps[1]] == [16, 16, 16, 2]
    assert steps[1] == steps[2] == steps[3] == steps[5]


def test_a_large_share_comes_in_micro_batches_of_one_step() -> None:
    loader = loader_at(12, 1, 2, global_batch_size=12, micro_batch_size=4, shuffle=False)
    assert len(loader) == 1
    assert trained(loader) == [([1, 5, 9], 0.5, False), ([3, 7, 11], 0.5, True)]


def test_all_ranks_have_as_many_micro_batches_in_a_step() -> None:
    """Otherwise a collective that a script calls in each batch would wait for ever, or match another one."""
    options = {"global_batch_size": 13, "micro_batch_size": 4, "shuffle": False}
    found = [trained(loader_at(14, rank, 3, **options)) for rank in range(3)]
    assert [[len(batch) for batch, weight, _ in rank if weight] for rank in found] == [[3, 2, 1], [2, 2], [2, 2]]
    assert [[ends for _, _, ends in rank] for rank in found] == [[False, True, True]] * 3
    found = [trained(loader_at(3, rank, 2, global_batch_size=3, micro_batch_size=1)) for rank in range(2)]
    assert [[weight for _, weight, _ in rank] for rank in found] == [
        [pytest.approx(2 / 3)] * 2,
        [pytest.approx(2 / 3), 0],
    ]


class Model(nn.Module):
    """Model that records if a backward pass would reduce gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.exchanges = False
        yield
        self.exchanges = True


def test_gradients_are_exchanged_with_the_last_micro_batch_of_a_step() -> None:
    loader, model, seen = loader_at(6, 0, 1, global_batch_size=3, micro_batch_size=1), Model(), []
    for _ in loader:
        with loader.accumulate(model):
            seen.append(model.exchanges)
    assert seen == [False, False, True, False, False, True]
    with loader.accumulate(nn.Linear(1, 1)):
        assert loader.step_ends


def test_what_was_handed_out_at_a_commit_counts_and_what_was_fetched_ahead_does_not() -> None:
    state = TorchState(loader=loader_at(20, 0, 1, batch_size=4, num_workers=2, shuffle=False))
    seen = []
    for batch in state.loader:
        seen += batch.tolist()
        if len(seen) == 8:
            state.commit()
        if len(seen) == 12:
            break
    state.restore()
    assert state.loader.state_dict() == {"epoch": 0, "consumed": 8, "seed": 0, "length": 20, "shuffle": False}
    again = [batch.tolist() for batch in state.loader]
    assert again == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]


def test_a_sample_counts_as_trained_with_the_last_micro_batch_of_its_step() -> None:
    loader = loader_at(8, 0, 1, global_batch_size=4, micro_batch_size=2)
    assert [loader.consumed for _ in loader] == [0, 4, 4, 8]


def test_the_epochs_go_on_from_the_present_one() -> None:
    state = TorchState(loader=loader_at(4, 0, 1, batch_size=4))
    seen: list[int] = []
    for epoch in state.loader.epochs(3):
        for _ in state.loader:
            seen.append(epoch)
            state.commit()
    assert seen == [0, 1, 2]
    state.restore()  # the last commit: all batches of the epoch are trained, but the epoch has not ended
    assert [epoch for epoch in state.loader.epochs(4) for _ in state.loader] == [3]


def steps_of(state: TorchState, epochs: int) -> list[list[int]]:
    """Train without commits. Return the epochs, and the number of batches in each."""
    return [[epoch, len(trained(state.loader))] for epoch in state.loader.epochs(epochs)]


@pytest.mark.parametrize("loop", [iter, enumerate, lambda loader: zip(loader, [None] * 9, strict=False)])
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"global_batch_size": 4, "micro_batch_size": 2}])
def test_an_epoch_that_was_committed_after_its_loop_does_not_come_back(
    loop: Callable[[ElasticDataLoader], Iterator[object]], options: dict[str, object]
) -> None:
    state = TorchState(loader=loader_at(9, 0, 1, **({"batch_size": 4} | options if len(options) < 2 else options)))
    state.commit()
    for epoch in state.loader.epochs(2):
        for _ in loop(state.loader):
            if epoch == 0:
                state.commit()
        if epoch == 0:
            state.commit()
    state.restore()  # the commit after the loop over epoch 0
    newcomer = TorchState(loader=loader_at(9, 0, 1, **({"batch_size": 4} | options if len(options) < 2 else options)))
    newcomer.loader.load_state_dict(state.loader.state_dict())
    for each in (state, newcomer):
        assert [epoch for epoch, _ in steps_of(each, 3)] == [1, 2]
        assert steps_of(each, 3) == []


def test_an_epoch_whose_last_epoch_is_over_yields_nothing() -> None:
    state = TorchState(loader=loader_at(8, 0, 1, batch_size=4))
    assert steps_of(state, 1) == [[0, 2]]
    state.loader.set_epoch(0)
    assert len(trained(state.loader)) == 2
    state.commit()
    state.restore()
    assert steps_of(state, 1) == []


def test_the_code_after_a_loop_runs_once_if_the_last_commit_was_made_in_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = loader_at(8, 0, 1, batch_size=4)
    state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, batches=0, means=[])
    fails = True
    while fails or not state.means:
        for _ in state.loader.epochs(2):
            for _ in state.loader:
                optimizer.step()
                state.batches += 1
                state.commit()
            scheduler.step()
            if fails:
                fails = False
                state.restore()
                assert not caplog.records
                break
            state.means = [*state.means, 8 / state.batches]
            state.batches = 0
            state.commit()
    assert (state.means, optimizer.param_groups[0]["lr"]) == ([4.0, 4.0], 0.25)
    (record,) = caplog.records
    assert record.message.startswith("the loop over epoch 0 has no batches left, because the last commit was made in")


def test_no_loop_comes_back_without_batches_if_no_commit_follows_the_last_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = TorchState(loader=loader_at(8, 0, 1, batch_size=4), ends=0)
    fails, batches = True, []
    while state.ends < 2:
        for _ in state.loader.epochs(2):
            batches.append(0)
            for _ in state.loader:
                batches[-1] += 1
                if state.loader.steps_left:
                    state.commit()
            state.ends += 1
            if fails:
                fails = False
                state.restore()
                break
            state.commit()
    assert (batches, caplog.records) == ([2, 1, 2], [])


def test_a_counter_of_epochs_that_is_committed_too_late_is_told(caplog: pytest.LogCaptureFixture) -> None:
    state = TorchState(loader=loader_at(8, 0, 1, batch_size=4), epoch=0)
    for epoch in range(state.epoch, 1):
        state.loader.set_epoch(epoch)
        trained(state.loader)
        state.commit()
        state.epoch += 1
    state.restore()
    for epoch in range(state.epoch, 1):
        state.loader.set_epoch(epoch)
        assert trained(state.loader) == []
    (record,) = caplog.records
    assert "runs again. To prevent that, use loader.epochs(n), or increase your counter" in record.message


@pytest.mark.parametrize("size", [1, 2])
def test_the_length_is_that_of_a_whole_epoch_in_the_present_world(size: int) -> None:
    ranks, whole = [size], -(-100 // (10 * size))
    loader = ElasticDataLoader(range(100), batch_size=10, rank=lambda: 0, size=lambda: ranks[0])
    assert (len(loader), loader.steps_left) == (whole, whole)
    for number, _ in enumerate(loader, 1):
        assert (len(loader), loader.steps_left) == (whole, whole - number)
    assert (len(loader), loader.steps_left) == (whole, 0)  # so that total / len(loader) is the mean
    loader.set_epoch(1)
    next(iter(loader))
    ranks[0] = 3
    assert (len(loader), loader.steps_left) == (4, -(-(100 - 10 * size) // 30))


def test_a_schedule_of_epochs_times_the_length_ends_with_the_last_step() -> None:
    loader = loader_at(50, 0, 1, batch_size=8)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    loader_part = iter(loader)
    next(loader_part)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, epochs=2, steps_per_epoch=len(loader))
    for _ in loader_part:
        pass
    loader.set_epoch(1)
    for _ in range(2):
        for _ in range(len(trained(loader))):
            optimizer.step()
            scheduler.step()
        loader.set_epoch(2)
    with pytest.raises(ValueError, match="Tried to step"):
        scheduler.step()


def test_an_epoch_that_is_over_must_not_be_taken_for_the_next_one() -> None:
    loader = loader_at(4, 0, 1, batch_size=4)
    assert len(trained(loader)) == 1
    with pytest.raises(UsageError, match=r"Epoch 0 is over.*set_epoch\(1\)"):
        trained(loader)
    loader.set_epoch(1)
    assert len(trained(loader)) == 1


def test_a_for_over_the_loader_ends_with_a_restore() -> None:
    loader = loader_at(8, 0, 1, batch_size=4)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict({"epoch": 0, "consumed": 0, "seed": 0})
    with pytest.raises(UsageError, match="Begin a new loop"):
        next(batches)
    assert loader.consumed == 0


class Noise(Dataset[int]):
    """Data set with augmentation: each sample has a random part."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 30, ()))


def test_random_numbers_of_fetching_follow_from_the_place_in_the_epoch() -> None:
    def fetched(consumed: int) -> list[list[int]]:
        loader = ElasticDataLoader(Noise(), 1, num_workers=1, rank=lambda: 0, size=lambda: 1)
        loader.load_state_dict({"epoch": 0, "consumed": consumed, "seed": 0})
        return [batch.tolist() for batch in loader]

    before = torch.get_rng_state()
    assert fetched(0) == fetched(0)
    assert fetched(0)[0] != fetched(3)[0]
    assert torch.equal(before, torch.get_rng_state()), "a rank's own random state belongs to its commit"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "give exactly one of the two"),
        ({"batch_size": 2, "global_batch_size": 2}, "give exactly one of the two"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"global_batch_size": 8, "micro_batch_size": 0}, "micro_batch_size=0: must be at least 1"),
        ({"batch_size": 8, "micro_batch_size": 2}, "requires global_batch_size"),
        ({"batch_size": 2.5}, "batch_size=2.5: must be a whole number"),
        ({"batch_size": 8, "sampler": []}, "sampler= cannot be given"),
        ({"batch_size": 8, "batch_sampler": [[0]]}, "batch_sampler= cannot be given"),
        ({"batch_size": 8, "generator": torch.Generator()}, "generator= cannot be given"),
        ({"batch_size": 8, "in_order": False, "num_workers": 2}, "in_order=False cannot be given with num_workers"),
        ({"batch_size": 8, "num_worker": 2}, "num_worker= is no option.*num_workers"),
        ({"batch_size": 8, "snapshot_every_n_steps": 2}, "snapshot_every_n_steps= is no option"),
        ({"batch_size": 8, "seed": -1}, r"seed=-1: must be a number from 0 to 2\*\*64 - 1"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ElasticDataLoader(range(3), **arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"in_order": False},
        {"sampler": None, "batch_sampler": None, "generator": None, "in_order": True, "shuffle": None},
        {"collate_fn": torch.tensor, "pin_memory": False, "timeout": 0, "worker_init_fn": None},
        {"num_workers": 2, "prefetch_factor": 4, "timeout": 60, "in_order": True, "multiprocessing_context": "fork"},
        {"num_workers": 2, "persistent_workers": True},
    ],
    ids=lambda options: "_".join(options),
)
def test_options_that_are_passed_on_change_no_sample(options: dict[str, object]) -> None:
    state = TorchState(loader=loader_at(20, 0, 1, **{"batch_size": 4, "shuffle": False, **options}))
    for n, _ in enumerate(state.loader, 1):
        if n == 2:
            state.commit()
        if n == 3:
            break
    state.restore()
    assert [batch.tolist() for batch in state.loader] == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    end_persistent_workers(state.loader._loader)


class Listed(Dataset[int]):
    """Data set whose length may change."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return range(self.n)[index]


class Together:
    """Data set that reads only whole batches."""

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * i for i in indices]


def test_a_data_set_may_read_whole_batches() -> None:
    loader = ElasticDataLoader(Together(), 2, shuffle=False, rank=lambda: 0, size=lambda: 1)
    assert [batch.tolist() for batch in loader] == [[0, 10], [20, 30]]


def test_a_data_set_without_indices_is_refused() -> None:
    with pytest.raises(UsageError, match="set has no length or no indices"):
        ElasticDataLoader({1, 2, 3}, 2)


def loader_of(dataset: Listed, **options: object) -> ElasticDataLoader:
    return ElasticDataLoader(dataset, 10, rank=lambda: 0, size=lambda: 1, **options)


@pytest.mark.parametrize("later", [120, 80, 40])
@pytest.mark.parametrize("steps", [0, 5, 10])
def test_a_process_with_a_data_set_of_another_length_is_refused(steps: int, later: int) -> None:
    loader = loader_of(Listed(100))
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    with pytest.raises(UsageError, match=f"has {later} samples, but epoch 0 began with 100"):
        loader_of(Listed(later)).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("later", [120, 80, 40])
def test_a_data_set_must_not_change_within_an_epoch(later: int) -> None:
    dataset = Listed(100)
    loader = loader_of(dataset)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    dataset.n = later
    message = f"has {later} samples, but epoch 0 began with 100"
    for use in (lambda: next(batches), lambda: len(loader), lambda: next(iter(loader))):
        with pytest.raises(UsageError, match=message):
            use()
    assert loader.state_dict()["length"] == 100
    loader.set_epoch(1)
    assert len(loader) == -(-later // 10)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["here", "in_a_process"])
def test_a_data_set_may_change_between_two_epochs(options: dict[str, object]) -> None:
    state = TorchState(loader=loader_of(Listed(20), **options))
    state.commit()
    seen: list[list[int]] = []
    for epoch in state.loader.epochs(2):
        state.loader.dataset.n = 20 + 13 * epoch
        seen.append([])
        for batch in state.loader:
            seen[-1] += batch.tolist()
            if epoch == 0:
                state.commit()
    assert [sorted(epoch) for epoch in seen] == [list(range(20)), list(range(33))]
    state.restore()  # the end of epoch 0, which began with 20 samples
    assert [epoch for epoch in state.loader.epochs(2) for _ in state.loader] == [1, 1, 1, 1]
    end_persistent_workers(state.loader._loader)


def test_the_end_of_an_epoch_without_its_last_samples_fits_a_data_set_that_has_changed_since() -> None:
    dataset = Listed(25)
    loader = loader_of(dataset, drop_last=True)
    assert sum(1 for _ in loader) == 2
    at_end = loader.state_dict()
    dataset.n = 40
    loader.load_state_dict(at_end)
    assert [epoch for epoch in loader.epochs(2) for _ in loader] == [1, 1, 1, 1]


def test_a_position_of_an_older_version_has_no_length() -> None:
    loader = loader_of(Listed(100))
    loader.load_state_dict({"epoch": 3, "consumed": 90, "seed": 0})
    assert len(trained(loader)) == 1


def test_the_order_must_not_change_within_an_epoch() -> None:
    loader = loader_of(Listed(100))
    next(iter(loader))
    with pytest.raises(UsageError, match="shuffle=False, but epoch 0 began with shuffle=True"):
        loader_of(Listed(100), shuffle=False).load_state_dict(loader.state_dict())
    loader.set_epoch(1)
    loader_of(Listed(100), shuffle=False).load_state_dict(loader.state_dict())


def test_a_loop_inside_a_loop_over_the_same_loader_ends_the_outer_one() -> None:
    loader = loader_of(Listed(100), shuffle=False)
    batches = iter(loader)
    next(batches)
    assert next(iter(loader)).tolist() == list(range(10, 20))
    with pytest.raises(UsageError, match="iterated over a second time"):
        next(batches)


def test_a_loader_of_no_state_begins_its_epoch_again_in_another_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a world interrupts a validation on the survivors; newcomers begin at the first sample."""
    generation = 1
    monkeypatch.setattr(loader_module, "world_generation", lambda: generation)
    for is_kept in (False, True):
        generation = 1
        loader = loader_at(8, 0, 1, batch_size=2, shuffle=False)
        if is_kept:
            TorchState(loader=loader).commit()
        loader.set_epoch(3)
        batches = iter(loader)
        next(batches)
        next(batches)
        generation = 2
        loader.set_epoch(3)
        assert next(iter(loader)).tolist() == ([4, 5] if is_kept else [0, 1])


def test_a_commit_inside_a_loop_over_a_loader_of_no_state_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    state, loader = TorchState(step=0), loader_at(8, 0, 1, batch_size=2)
    for _ in loader:
        state.commit()
    assert [record.message for record in caplog.records if "in no value of the state" in record.message] == [
        "commits are made inside a loop over an ElasticDataLoader that is in no value of the state, so its position is "
        "lost: in another world, or after a restart, it begins the epoch again. Give it to the state: "
        "TorchState(..., loader=loader)."
    ]
    caplog.clear()
    kept = TorchState(loader=loader_at(8, 0, 1, batch_size=2))
    for _ in kept.loader:
        kept.commit()
    for _ in loader_at(8, 0, 1, batch_size=2):
        pass
    assert not caplog.records


def test_the_data_set_cannot_be_replaced() -> None:
    with pytest.raises(AttributeError):
        loader_of(Listed(100)).dataset = Listed(120)  # type: ignore[misc]


def test_a_data_set_that_can_only_be_iterated_over_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="StatefulDataLoader"):
        ElasticDataLoader(Stream(), 2)  # type: ignore[arg-type]


def test_the_order_of_a_thousand_million_samples_takes_no_time_and_no_memory() -> None:
    n = 10**9
    order = Order(n, shuffle=True, seed=3)
    found = order.indices(7, n - 1000, 1000)
    assert len(set(found.tolist())) == 1000
    assert torch.equal(found[1::3], order.indices(7, n - 999, 333, step=3))
    assert Order(n, shuffle=False, seed=0).indices(0, 5, 3, 2).tolist() == [5, 7, 9]
    with pytest.raises(ValueError, match="of range"):
        order.indices(7, n - 1000, 1001)


def test_a_loader_draws_on_the_cpu_whatever_the_default_device_of_the_script() -> None:
    loader = ElasticDataLoader(list(map(str, range(6))), batch_size=2, shuffle=True, num_workers=0)
    with torch.device("meta"):
        found = [sample for batch in loader for sample in batch]
    assert sorted(found) == list(map(str, range(6)))
