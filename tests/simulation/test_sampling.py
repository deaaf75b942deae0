"""Every sample counts exactly once per epoch: real loaders and commits of real states, with random world changes.

Replay a failure with ``run_schedule(seed)``: hypothesis prints the number.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import repeat

from hypothesis import strategies as st

from elasticstate.state.loader import ElasticDataLoader
from elasticstate.state.torch import TorchState
from tests.kit.simulation.schedules import explore_all

MUST_BE_REACHED = ("death", "interrupt", "join", "rollback", "tail", "stand-in", "micro-batch", "epoch", "dropped")
reached: Counter[str] = Counter()


class World:
    """The ranks of successive generations, each rank with a state of its own, in lockstep."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.n, self.seed = rng.randint(0, 30), rng.getrandbits(64)
        self.options: dict[str, object] = {"shuffle": rng.random() < 0.7, "drop_last": rng.random() < 0.2}
        if rng.random() < 0.5:
            self.options["batch_size"] = rng.randint(1, 5)
        else:
            self.options["global_batch_size"] = rng.randint(1, 12)
            self.options["micro_batch_size"] = rng.choice((None, 1, 2, 3))
        self.states = [self._state() for _ in range(rng.randint(1, 5))]
        self.pending: list[tuple[int, int]] = []  # (epoch, sample) since the last commit
        self.trained: Counter[tuple[int, int]] = Counter()
        self.stood_still = 0

    def _state(self) -> TorchState:
        loader = ElasticDataLoader(
            range(self.n),
            seed=self.seed,
            rank=lambda: self._rank_of[id(loader)],
            size=lambda: len(self.states),
            **self.options,
        )
        return TorchState(loader=loader)

    @property
    def _rank_of(self) -> dict[int, int]:
        return {id(state.loader): rank for rank, state in enumerate(self.states)}

    def train(self, epochs: int, ticks: int) -> bool:
        """Run ``train`` on all ranks. Return True if it returned, False if it stopped after ``ticks`` steps."""
        every = self.rng.randint(1, 3)
        for epoch in zip(*(state.loader.epochs(epochs) for state in self.states), strict=True):
            assert len(set(epoch)) == 1
            reached["epoch"] += epoch[0] > 0
            for _ in self._steps(epoch[0]):
                if ticks % every == every - 1:
                    self.commit()
                if ticks == 0:
                    return False
                ticks -= 1
        return True

    def _steps(self, epoch: int) -> Iterator[None]:
        iterators = [iter(state.loader) for state in self.states]
        left = [state.loader.steps_left for state in self.states]
        assert len(set(left)) == 1, "all ranks have as many steps to go"
        for _ in range(left[0]):
            weights = sum(map(self._one_step, self.states, iterators, repeat(epoch)))
            assert abs(weights - len(self.states)) < 1e-9, "the mean over ranks is the mean over samples"
            assert len({state.loader.consumed for state in self.states}) == 1
            yield
        for batches in iterators:
            assert next(batches, None) is None

    def _one_step(self, state: TorchState, batches: Iterator[object], epoch: int) -> float:
        weights, count = 0.0, 0
        while not count or not state.loader.step_ends:
            batch = next(batches).tolist()  # type: ignore[attr-defined]
            count += 1
            weights += state.loader.weight
            reached["stand-in"] += state.loader.weight == 0
            reached["tail"] += state.loader.weight not in (0.0, 1.0)
            if state.loader.weight:
                self.pending += [(epoch, sample) for sample in batch]
        reached["micro-batch"] += count > 1
        return weights

    def commit(self) -> None:
        for state in self.states:
            state.commit()
        self.trained.update(self.pending)
        self.pending = []

    def change(self) -> None:
        """Change the world: some ranks die or leave, some join, the others continue."""
        if self.rng.random() < 0.5:
            reached["death"] += 1
            reached["rollback"] += bool(self.pending)
            self.pending = []
            for state in self.states:
                state.restore()
        else:
            reached["interrupt"] += 1
            self.commit()  # the save at the tick; the live state stays, and only the world changes
        stay = self.rng.sample(self.states, self.rng.randint(1, len(self.states)))
        survivors = [state for state in self.states if state in stay]
        self.states = survivors + [self._state() for _ in range(self.rng.randint(0, 3))]
        reached["join"] += len(self.states) > len(survivors)
        for state in self.states:  # the sync for newcomers, a new generation for survivors
            state.loader.load_state_dict(survivors[0].loader.state_dict())
            state.commit()


def run_schedule(seed: int) -> None:
    rng = random.Random(seed)
    world, epochs = World(rng), rng.randint(1, 2)
    world.commit()
    for _ in range(rng.randint(0, 4)):
        if world.train(epochs, rng.randint(0, 4)):
            break
        world.change()
    else:
        assert world.train(epochs, 10_000)
    world.commit()
    assert set(world.trained.values()) <= {1}, "no sample twice in an epoch"
    everything = {(epoch, sample) for epoch in range(epochs) for sample in range(world.n)}
    left_out = everything - set(world.trained)
    assert set(world.trained) <= everything
    if world.options["drop_last"]:
        reached["dropped"] += bool(left_out)
    else:
        assert not left_out, "no sample is missing"


def explore(seed: int) -> None:
    reached["schedules"] += 1
    run_schedule(seed)


def test_every_sample_counts_once_in_an_epoch_over_all_changes_of_the_world(schedules: range) -> None:
    explore_all(explore, schedules, reached, MUST_BE_REACHED, seed=st.integers(0, 2**64 - 1))
