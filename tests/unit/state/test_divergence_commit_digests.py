"""Digests of the commits of a state: what they cover, and their chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elasticstate.core.types import DigestAnswer, DigestQuestion
from elasticstate.state.base import ObjectState, committer_of
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.torch import TorchState
from tests.integration.scripts.slow_device import SlowDevice
from tests.kit.state import Member, World


class Rank:
    """A rank with the same state and inputs as each other one."""

    def __init__(self, device: SlowDevice | None = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
        self.model.register_buffer("scale", torch.ones(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.weight = torch.ones(3, requires_grad=True)
        self.member = Member(World(2))
        self.state = TorchState(
            model=self.model, optimizer=self.optimizer, weight=self.weight, losses=torch.zeros(2), step=0
        )
        self.committer = committer_of(self.state)
        if device is not None:
            self.committer.snapshot = Snapshot(None, lambda _: device)
        self.committer.use_session(self.member)  # type: ignore[arg-type]
        self.inputs = torch.Generator().manual_seed(1)

    def train(self, change: Callable[[Rank], object] = lambda rank: None) -> None:
        self.model(torch.randn(8, 4, generator=self.inputs)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            change(self)
        self.state.commit()

    def digest(self) -> int:
        """Return the newest digest, which covers all commits."""
        self.committer.settle()
        self.committer.send_digest()
        start, tick, digest = self.member.digests[-1]
        assert (start, tick) == (0, self.member.ticks)
        return digest

    def ask(self, *question: int) -> DigestAnswer:
        tick, begin, end = (*question, 0, 0)[:3]
        self.member.questions.append((1, tick, begin << 32 | end))
        self.state.check_host_updates()
        return self.member.answers[-1]


def trained(change: Callable[[Rank], object] = lambda rank: None, device: SlowDevice | None = None) -> Rank:
    rank = Rank(device)
    rank.train()
    rank.train(change)
    rank.train()
    return rank


def flip(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.int32)[1] ^= 1


REPLICATED: dict[str, Callable[[Rank], object]] = {
    "model.parameters.0.weight": lambda rank: flip(rank.model[0].weight.detach()),
    "model.buffers.scale": lambda rank: flip(rank.model.scale),
    "optimizer.0.exp_avg": lambda rank: flip(rank.optimizer.state[rank.model[0].weight]["exp_avg"]),
    "weight": lambda rank: flip(rank.weight.detach()),
}
OWN: dict[str, Callable[[Rank], object]] = {
    "nothing": lambda rank: None,
    "running statistics": lambda rank: flip(rank.model[1].running_mean),
    "random state": lambda rank: torch.rand(1),
    "a plain tensor": lambda rank: flip(rank.state.losses),
    "a number": lambda rank: setattr(rank.state, "step", 7),
}


@pytest.mark.parametrize("name", REPLICATED)
def test_a_flipped_bit_of_a_replicated_value_changes_the_digest_and_is_named(name: str) -> None:
    rank, other = trained(REPLICATED[name]), trained()
    assert rank.digest() != other.digest()
    ticks = [dict(zip(each.parts[::2], each.parts[1::2], strict=True)) for each in (rank.ask(0), other.ask(0))]
    assert [ticks[0][tick] == ticks[1][tick] for tick in (1, 2, 3)][:2] == [True, False]
    mine, its = rank.ask(2), other.ask(2)
    differ = [each for each, a, b in zip(mine.names, mine.parts, its.parts, strict=True) if a != b]
    assert len(differ) == 1
    assert differ[0].startswith(name.partition(".")[0]), differ
    assert differ[0].endswith(name.rpartition(".")[2]), differ


@pytest.mark.parametrize("name", OWN)
def test_a_value_of_one_rank_alone_does_not_change_the_digest(name: str) -> None:
    assert trained(OWN[name]).digest() == trained().digest()


def test_a_value_that_is_excluded_from_check_is_left_out() -> None:
    rank, other = Rank(), Rank()
    for each in (rank, other):
        each.train()
        each.state.exclude_from_check("model.buffers")
    rank.train(REPLICATED["model.buffers.scale"])
    other.train()
    assert rank.digest() == other.digest()


def test_a_commit_that_is_copied_from_a_device_has_the_same_digest(device: SlowDevice) -> None:
    assert trained(device=device).digest() == trained().digest()


def test_a_rank_that_lacks_a_commit_begins_a_new_chain() -> None:
    rank = trained()
    rank.committer.tick_without_inputs()
    rank.train()
    rank.committer.send_digest()
    assert rank.member.digests[-1][:2] == (4, 5)


def test_questions_about_unknown_commits_and_other_generations_have_no_content() -> None:
    rank = trained()
    assert rank.ask(9).parts == ()
    rank.member.questions.append((2, 1, 0))
    rank.state.check_host_updates()
    assert len(rank.member.answers) == 1


def test_many_values_are_answered_in_parts() -> None:
    values: Any = torch.nn.ParameterList([torch.nn.Parameter(torch.full((2,), float(i))) for i in range(1000)])
    state, member = TorchState(model=values), Member(World(2))
    committer_of(state).use_session(member)  # type: ignore[arg-type]
    state.commit()
    for question in (DigestQuestion(1), DigestQuestion(1, 248, 252)):
        member.questions.append((1, question.tick, question.begin << 32 | question.end))
        state.check_host_updates()
    first, second = member.answers
    assert (len(first.parts), first.end, first.names) == (250, 1000, ())
    assert second.names == tuple(f"model.parameters.{i}" for i in range(248, 252))


def test_a_state_of_plain_values_sends_nothing() -> None:
    state, member = ObjectState(step=0, weights=torch.ones(2)), Member(World(2))
    committer_of(state).use_session(member)  # type: ignore[arg-type]
    state.commit()
    committer_of(state).send_digest()
    assert member.digests == []
