"""Commits with ``--divergence restore``: what is overwritten, discarded and sent, by the driver's verdicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.core.types import LACKED, OUT_OF_INPUTS
from elasticstate.errors import CollectiveError
from elasticstate.state.base import committer_of
from elasticstate.state.torch import TorchState
from tests.kit.state import Job


def state_in(world: Any, member: Any, *verdicts: tuple[int, int] | None) -> tuple[TorchState, Any]:
    one = member(world(2), 0, awaits_verdicts=True, verdicts=list(verdicts))
    one.has_peers = False
    state = TorchState(model=torch.nn.Linear(3, 2), step=0)
    committer_of(state).use_session(one)
    return state, one


def in_next_world(job: Job) -> Any:
    """Put the job into a world whose commits are compared. Return its session."""
    one = job.session
    one.awaits_verdicts, one.verdicts = True, [(9, 9)]
    one.world.generation, one.ticks = 2, 0
    return one


def commit(state: TorchState) -> tuple[CommitId | None, CommitId | None]:
    state.step += 1
    state.commit()
    return state.commits


def test_each_commit_has_a_digest_of_its_own_and_awaits_that_the_one_before_is_equal(world: Any, member: Any) -> None:
    state, one = state_in(world, member, (1, 1), (2, 2))
    assert commit(state) == (CommitId(1, 1), None)
    assert one.waits == [], "no commit is overwritten"
    assert commit(state) == (CommitId(1, 2), CommitId(1, 1))
    assert commit(state) == (CommitId(1, 3), CommitId(1, 2))
    assert one.waits == [1, 2]
    assert [(start, tick) for start, tick, _ in one.digests] == [(0, 1), (1, 2), (2, 3)]
    assert len({digest for *_, digest in one.digests}) == 3, "a digest names its tick"
    with torch.no_grad():
        state.model.weight[0, 0] += 1.0
    assert commit(state)[0] == CommitId(1, 4)


def test_a_newest_commit_that_others_lack_is_discarded_and_the_one_before_stays(world: Any, member: Any) -> None:
    state, _ = state_in(world, member, (1, 1), (1, 2))
    commit(state)
    commit(state)
    assert commit(state) == (CommitId(1, 3), CommitId(1, 1))


def test_without_a_verdict_no_commit_is_made_and_both_stay(
    world: Any, member: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state, one = state_in(world, member, (1, 1), None)
    commit(state)
    for _ in range(3):
        assert commit(state) == (CommitId(1, 2), CommitId(1, 1))
    assert one.ticks == 4, "the ticks go on"
    assert one.digests[2:] == [(2, 3, LACKED)], "the last one may be made up"
    assert caplog.text.count("is not made") == 1
    with pytest.raises(CollectiveError, match="is not made: the driver is away"):
        committer_of(state).seal(CommitId(1, 9))
    one.verdicts[:] = [(2, 2)]
    assert commit(state) == (CommitId(1, 5), CommitId(1, 2))


def test_the_last_commit_is_made_up_before_the_exit_gate(world: Any, member: Any) -> None:
    state, one = state_in(world, member, (1, 1), None)
    committer = committer_of(state)
    commit(state)
    committer.make_up_commit()
    assert one.waits == []
    commit(state)
    assert commit(state)[0] == CommitId(1, 2)
    one.verdicts[:] = [(2, 2)]
    committer.make_up_commit()
    assert one.waits[-3] == -1, "it waits for a driver"
    assert state.commits == (CommitId(1, 3), CommitId(1, 2))
    assert one.digests[-1][1] == 3


def test_what_a_world_begins_with_is_overwritten_without_a_verdict(world: Any, member: Any) -> None:
    state, one = state_in(world, member, (1, 1))
    commit(state)
    one.world.generation, one.ticks = 2, 0
    assert commit(state) == (CommitId(2, 1), CommitId(1, 1))
    assert one.waits == []


def test_a_state_without_replicated_values_has_digests_too(world: Any, member: Any) -> None:
    one = member(world(2), 0, awaits_verdicts=True, verdicts=[(9, 9)])
    state = TorchState(step=0)
    committer_of(state).use_session(one)
    commit(state)
    commit(state)
    assert [tick for _, tick, _ in one.digests] == [1, 2]


def test_a_rank_without_inputs_says_so_once(world: Any, member: Any) -> None:
    state, one = state_in(world, member, (1, 1))
    commit(state)
    committer_of(state).tick_without_inputs()
    committer_of(state).tick_without_inputs()
    assert one.digests[1:] == [(1, 2, OUT_OF_INPUTS)]


def test_a_world_that_starts_from_the_commit_before_discards_the_newest(world: Any, member: Any) -> None:
    state, one = state_in(world, member, (1, 1))
    with torch.no_grad():
        state.model.weight.fill_(1.0)
    commit(state)
    with torch.no_grad():
        state.model.weight.fill_(2.0)
    commit(state)
    one.world.generation, one.world.start = 2, CommitId(1, 1)
    committer = committer_of(state)
    assert committer.go_back()
    assert state.commits == (CommitId(1, 1), None)
    assert (state.step, state.model.weight.tolist()) == (1, [[1.0] * 3] * 2)
    assert not committer.go_back()
    one.world.start = CommitId(1, 7)
    with pytest.raises(CollectiveError, match="cannot restore commit"):
        committer.go_back()
    one.world.lacking = (0,)
    assert not committer.go_back(), "the root sends its state"


def test_the_digest_of_a_commit_on_a_device_is_sent_when_it_is_sealed(job: Job) -> None:
    one = in_next_world(job)
    committer = committer_of(job.state)
    before = len(one.digests)
    job.commit()
    assert len(one.digests) == before
    job.device.finish()
    copy = committer.snapshot._copy
    assert copy is not None
    copy[0].wait()
    assert [tick for _, tick, _ in one.digests[before:]] == [1], "nobody has settled it"
    committer.settle()
    assert len(one.digests) == before + 1


def test_a_commit_on_a_device_that_is_discarded_is_reported_as_lacking(job: Job) -> None:
    one = in_next_world(job)
    job.commit()
    with torch.no_grad():
        for parameter in job.state.model.parameters():
            parameter.add_(1.0)
    committer_of(job.state).settle()
    assert one.digests[-1] == (0, 1, LACKED)
