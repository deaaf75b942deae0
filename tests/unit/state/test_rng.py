from __future__ import annotations

import random
from itertools import pairwise, product

import numpy as np
import torch

from elasticstate.state import rng


def draw() -> tuple[float, ...]:
    return random.random(), random.gauss(0, 1), float(np.random.randn()), *torch.rand(3).tolist()


def test_what_was_captured_comes_back() -> None:
    random.gauss(0, 1)
    np.random.randn()  # both generators keep a second normal number
    packed = rng.capture()
    first = [draw() for _ in range(3)]
    rng.apply(packed)
    assert [draw() for _ in range(3)] == first


def test_a_derived_state_is_a_function_of_seed_key_and_generation() -> None:
    streams = set()
    for seed, key, generation in product((0, 2**64 - 1), ("a:0#1", "a:1#1", "a:0#2"), (1, 2)):
        rng.apply(rng.derived(seed, key, generation))
        first = draw()
        rng.apply(rng.derived(seed, key, generation))
        assert draw() == first
        streams.add(first)
    assert len(streams) == 12
    for one, other in zip(*[iter(sorted(streams))] * 2, strict=True):
        assert all(a != b for a, b in zip(one, other, strict=True)), "python, numpy and torch differ, each of them"


def test_a_derived_state_has_its_own_seed_to_derive_from() -> None:
    seeds = []
    for generation in range(1, 4):
        rng.apply(rng.derived(torch.initial_seed(), "a:0#1", generation))
        seeds.append(torch.initial_seed())
    assert all(a != b for a, b in pairwise(seeds))


def test_each_copy_is_the_present_state() -> None:
    """Copies of python's and numpy's state are reused, but not after a draw, even if it is the second of a pair."""
    chance = random.Random(5)
    operations = [
        lambda: random.random(),
        lambda: random.gauss(0, 1),
        lambda: random.seed(chance.randrange(3)),
        lambda: random.getrandbits(1),
        lambda: np.random.randn(),
        lambda: np.random.rand(),
        lambda: np.random.seed(chance.randrange(3)),
        lambda: np.random.shuffle([1, 2, 3]),
        lambda: None,
    ]
    for _ in range(600):
        chance.choice(operations)()
        copied = rng.copy()
        assert copied.python == random.getstate()
        packed = rng.pack(copied)
        first = [draw() for _ in range(2)]
        rng.apply(packed)
        assert [draw() for _ in range(2)] == first
        rng.apply(packed)


def test_a_restored_second_normal_number_is_copied() -> None:
    np.random.seed(1)
    np.random.randn()
    with_second = rng.capture()
    np.random.randn()
    rng.copy()
    rng.apply(with_second)
    expected = np.random.randn()
    rng.apply(with_second)
    rng.apply(rng.pack(rng.copy()))
    assert np.random.randn() == expected


def test_pythons_second_normal_number_is_a_part_of_the_state() -> None:
    random.seed(3)
    random.gauss(0, 1)
    assert rng.copy().python == random.getstate()
    version, numbers, _ = random.getstate()
    random.setstate((version, numbers, 0.25))
    assert rng.copy().python == (version, numbers, 0.25)


def test_numpys_second_normal_number_is_a_part_of_the_state() -> None:
    np.random.seed(3)
    np.random.randn()
    copied = rng.pack(rng.copy())
    kind, key, position, _, _ = np.random.get_state()
    np.random.set_state((kind, key, position, 1, 0.25))
    changed = rng.pack(rng.copy())
    assert changed != copied
    np.random.randn()
    rng.apply(changed)
    assert np.random.randn() == 0.25
