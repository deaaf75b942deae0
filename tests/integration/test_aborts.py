"""A generation is cut while the main thread is in the middle of queued kernels, graphs, or compiled code."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elasticstate.worker.contexts import torch_name
from tests.kit.forks import Template
from tests.kit.ranks import SOON_S, Rank, Ranks

INIT_S = 10  # limit of an init
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NCCL2 = pytest.mark.skipif(not torch_name("nccl2"), reason="this torch has no nccl2")
FAKES = {
    "fake nccl-legacy": ("nccl", {"names": ["nccl-legacy"]}),
    "fake nccl2": ("nccl2", {"names": ["nccl-legacy", "nccl2", "nccl"], "nccl_is": "nccl2"}),
}
REAL = [pytest.param("nccl", marks=GPU), pytest.param("nccl2", marks=[GPU, NCCL2])]
NCCL = [*FAKES, *REAL]


@pytest.fixture(params=["gloo", *NCCL])
def ranks(request: pytest.FixtureRequest, template: Template, tmp_path: Path) -> Iterator[Ranks]:
    """Two ranks in a world."""
    backend, *fake = FAKES.get(request.param, (request.param,))
    made = Ranks(template, "context_rank.py", backend, "STORE", str(tmp_path), *map(json.dumps, fake))
    made.create("first", made.boot(2), INIT_S)
    yield made
    made.end()


def all_do(ranks: Ranks, command: str) -> None:
    for rank in ranks.all:
        rank.begin(command)
    for rank in ranks.all:
        answer = rank.hear("done", 4 * SOON_S)
        assert answer["error"] is None, answer


def hang(ranks: Ranks, command: str) -> None:
    """Let the first rank hang in a command in which the other has no part, and cut both."""
    ranks.all[0].tell(command)
    ranks.all[0].hear("queued")
    for rank in ranks.all:
        rank.tell("sever")


def check_it_was_cut(rank: Rank) -> None:
    answer = rank.hear("done", 3 * SOON_S)
    assert answer["error"]
    assert "nobody has cut it" not in answer["error"]
    assert answer["broken"]


def go_on(ranks: Ranks, command: str) -> None:
    """Do a command in the next world of the same processes."""
    all_do(ranks, "leave")
    ranks.create("second", ranks.all, INIT_S)
    all_do(ranks, command)
    all_do(ranks, "drop")
    all_do(ranks, "leave")


def test_the_first_collective_of_a_world(ranks: Ranks) -> None:
    """NCCL makes connections in it, and the other rank does not come."""
    ranks.all[0].tell("hang")
    ranks.all[0].hear("began")
    for rank in ranks.all:
        rank.tell("sever")
    check_it_was_cut(ranks.all[0])
    go_on(ranks, "warm")


def test_kernels_are_pending(ranks: Ranks) -> None:
    all_do(ranks, "warm")
    hang(ranks, "pending")
    check_it_was_cut(ranks.all[0])
    go_on(ranks, "collectives")


@pytest.mark.parametrize("ranks", NCCL, indirect=True)
def test_the_collective_is_in_a_graph_that_the_error_drops(ranks: Ranks) -> None:
    all_do(ranks, "capture")
    assert ranks.all[1].do("drop")["error"] is None
    hang(ranks, "replay")
    check_it_was_cut(ranks.all[0])
    go_on(ranks, "capture")


@pytest.mark.parametrize("ranks", ["gloo", *REAL], indirect=True)
def test_the_collective_is_in_compiled_code(ranks: Ranks) -> None:
    all_do(ranks, "compile")
    hang(ranks, "compiled")
    check_it_was_cut(ranks.all[0])
    go_on(ranks, "compile")


@pytest.mark.parametrize("ranks", NCCL, indirect=True)
def test_a_graph_outlives_its_generation(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    """An abort waits for graphs that have captured the communicator. So the process may have to be replaced."""
    all_do(ranks, "capture")
    began = time.monotonic()
    hang(ranks, "replay kept")
    error = ""
    try:
        check_it_was_cut(ranks.all[0])
        go_on(ranks, "capture")
    except AssertionError as raised:
        error = str(raised)
    ended = [rank.process.wait(SOON_S) for rank in ranks.all if rank.is_over]
    outcome = f"{len(ended)} of 2 processes ended after {time.monotonic() - began:.1f} s {error}"
    request.node.user_properties.append(("report", outcome))
    assert not error or set(ended) == {-signal.SIGKILL}, "ended to be replaced, or went on"
