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
