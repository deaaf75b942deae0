"""Asynchronous commits from a device, next to the training: in all cases the sealed bytes are right.

The device is a thread that copies memory as late as allowed (scripts/slow_device.py). So a write that comes too early
is visible in the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from elasticstate.commits import NO_SHARDING
from elasticstate.core.ids import CommitId
from elasticstate.errors import CollectiveError
from elasticstate.state import async_commit
from elasticstate.state.base import committer_of
from elasticstate.state.snapshot import PrivateStorage, Snapshot
from elasticstate.state.torch import TorchState
from tests.integration.scripts.slow_device import SlowDevice
from tests.kit.state import CommitStorage, Job, contents, found, note_of, parts, read_commit

# ---------------------------------------------------------------------------------------------------- normal operation


def test_a_commit_returns_before_the_copy_and_counts_after_it(job: Job, file_storage: CommitStorage) -> None:
    commit = job.commit()
    assert job.device.is_busy
    assert job.state.commits == found(file_storage) == (CommitId(1, 1), None), "the older buffer is nobody's"
    assert job.session.ticks == 2
    job.device.finish()
    committer_of(job.state).snapshot._copy[0]._done.wait()  # type: ignore[index]
    assert found(file_storage) == (commit, CommitId(1, 1)), "without a word of the training's thread"
    job.state.check_host_updates()
    assert job.state.commits == job.session.commits[-1] == (commit, CommitId(1, 1)), "told at the next tick"
    assert job.restored() == commit


def test_a_tick_does_not_wait_for_the_copy(job: Job) -> None:
    job.commit()
    told = len(job.session.commits)
    for _ in range(3):
        job.state.check_host_updates()
    assert job.device.is_busy
    assert len(job.session.commits) == told


def test_forward_and_backward_go_on_and_the_step_waits(job: Job) -> None:
    commit = job.commit()
    job.forward().backward()
    assert job.device.is_busy
    held_back = job.device.held_back
    job.state.optimizer.step()
    assert job.device.held_back == held_back + 1
    assert not job.device.is_busy
    job.state.optimizer.step()
    assert job.restored() == commit


def test_the_step_of_an_optimizer_that_the_state_does_not_know_waits_too(job: Job) -> None:
    other = torch.optim.SGD(job.state.model.parameters(), lr=1.0)
    commit = job.commit()
    job.forward().backward()
    other.step()
    assert job.restored() == commit


def test_what_a_forward_pass_writes_is_copied_before_it(job: Job) -> None:
    commit = job.commit()
    before = job.state.model[1].running_mean.clone()
    job.forward()
    assert not torch.equal(job.state.model[1].running_mean, before)
    assert job.device.is_busy, "the parameters are not"
    assert job.restored() == commit


def test_tensors_that_are_no_optimizers_are_copied_at_once(
    device: SlowDevice, file_storage: CommitStorage, member: Any, world: Any
) -> None:
    """The user's own tensors, untrained parameters, a teacher of the model, and tensors of a captured step."""
    frozen = torch.nn.Linear(3, 3).requires_grad_(False)
    teacher = torch.nn.Linear(3, 3)
    graphed = torch.nn.Linear(3, 3)
    job = Job(
        device,
        file_storage(),
        member(world(1)),
        mine=torch.ones(5),
        frozen=frozen,
        teacher=teacher,
        graphed=graphed,
        captured=torch.optim.SGD([*graphed.parameters()], lr=0.1),
        trained_too=torch.optim.SGD([*frozen.parameters()], lr=0.1),
    )
    job.state.captured.param_groups[0]["capturable"] = True
    commit = job.commit()
    with torch.no_grad():
        for tensor in (job.state.mine, *frozen.parameters(), *teacher.parameters(), *graphed.parameters()):
            tensor.data.fill_(7.0)  # a write that does not change the tensor's version
    assert job.device.is_busy, "the others are not copied yet"
    assert job.restored() == commit


def test_two_commits_in_a_row(job: Job, file_storage: CommitStorage) -> None:
    first = job.commit()
    second = job.commit()
    assert job.state.commits == found(file_storage) == (first, None), "the first one was waited for"
    job.train()
    third = job.commit()
    assert job.state.commits == (second, None)
    assert job.restored() == third
    committer_of(job.state).snapshot.drop_newest()
    assert job.restored() == second


def test_ids_go_on_where_there_is_no_world(device: SlowDevice) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    state = TorchState(model=torch.nn.ParameterList([weight]), optimizer=torch.optim.SGD([weight], lr=1.0))
    committer_of(state).snapshot = Snapshot(None, lambda _: device)
    for tick in (1, 2, 3):
        state.commit()
        assert state.commits[0] == (CommitId(0, tick - 1) if tick > 1 else None)
    committer_of(state).settle()
    assert state.commits == (CommitId(0, 3), CommitId(0, 2))


def test_a_large_state_goes_in_pieces_beside_arrays_and_tied_and_empty_tensors(
    device: SlowDevice, file_storage: CommitStorage, member: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_commit, "CHUNK_BYTES", 40)
    shared = torch.arange(30.0)
    job = Job(
        device,
        file_storage(),
        member(world(1)),
        array=np.arange(11.0),
        holes=torch.arange(12.0).view(3, 4).t(),
        half=torch.arange(5, dtype=torch.bfloat16),
        one=shared[:10],
        two=shared[:10],
        none=torch.empty(0),
        flags=torch.tensor([True, False, True]),
    )
    for _ in range(3):
        job.train()
        job.state.array += 5.0
        commit = job.commit()
        job.state.array[:] = -1.0
    assert job.restored() == commit
    assert job.device.copied_back


# ----------------------------------------------------------------------------------------------- events during a copy


def test_a_process_that_ends_in_mid_copy_leaves_the_older_commit(job: Job, file_storage: CommitStorage) -> None:
    """The process ends after each step of the device."""
    job.commit()
    while job.device.is_busy:
        left = Snapshot(file_storage())
        assert (left.newest, left.previous) == (CommitId(1, 1), None)
        assert read_commit(left, CommitId(1, 1))["note"] == note_of(job.was[CommitId(1, 1)])
        job.device.advance()
    committer_of(job.state).settle()
    assert found(file_storage) == (CommitId(1, 2), CommitId(1, 1))


def test_a_failure_in_mid_copy_goes_back_to_that_commit_if_the_generation_still_stands(job: Job) -> None:
    commit = job.commit()
    job.forward().backward()
    assert job.device.is_busy
    assert job.restored() == commit
    assert job.session.commits[-1] == (commit, CommitId(1, 1))


def test_what_is_not_copied_when_the_generation_ends_is_given_up(job: Job, file_storage: CommitStorage) -> None:
    job.commit()
    job.forward().backward()
    job.session.is_over = True
    assert job.restored() == CommitId(1, 1)
    assert job.session.commits[-1] == found(file_storage) == (CommitId(1, 1), None)


def test_what_is_copied_when_the_generation_ends_is_kept(job: Job, file_storage: CommitStorage) -> None:
    commit = job.commit()
    job.device.finish()
    committer_of(job.state).snapshot._copy[0]._done.wait()  # type: ignore[index]
    job.session.is_over = True
    assert job.restored() == commit


def test_a_commit_that_was_given_up_may_be_made_again_under_its_id(job: Job) -> None:
    job.commit()
    job.session.is_over = True
    committer_of(job.state).settle()
    job.session.is_over = False
    job.session.ticks -= 1
    job.train()
    commit = job.commit()
    assert job.restored() == commit == CommitId(1, 2)


def test_an_interrupts_save_finds_the_commit_of_its_tick_on_its_way(job: Job) -> None:
    commit = job.commit()
    committer_of(job.state).settle()
    assert job.state.commits[0] == commit


def test_a_save_for_an_interrupt_is_there_when_it_returns(job: Job, file_storage: CommitStorage) -> None:
    job.commit()
    job.train()
    job.session.tick()
    here = CommitId(1, 3)
    job.was[here] = contents(job.state)
    committer_of(job.state).seal(here)
    assert job.state.commits == job.session.commits[-1] == found(file_storage) == (here, CommitId(1, 2))
    assert job.restored() == here


def test_a_save_is_refused_when_the_generation_ends_meanwhile(job: Job, file_storage: CommitStorage) -> None:
    job.session.is_over = True
    with pytest.raises(CollectiveError, match="before its commit was copied"):
        committer_of(job.state).seal(CommitId(1, 2))
    assert job.state.commits == job.session.commits[-1] == found(file_storage) == (CommitId(1, 1), None)


def test_a_sync_in_mid_copy_sends_that_commit(
    job: Job, device: SlowDevice, tmp_path: Any, member: Any, world: Any, together: Any
) -> None:
    job.train()
    commit = job.commit()
    job.state.optimizer.zero_grad()
    newcomer = TorchState(model=parts()[0], optimizer=None, note=[0])
    newcomer.optimizer = torch.optim.AdamW(newcomer.model.parameters(), lr=0.1)
    committer_of(newcomer).snapshot = Snapshot(None, lambda _: device)
    both = world(2, generation=2, lacking=(1,))
    job.session.world = both
    committer_of(newcomer).use_session(member(both, 1))
    together(job.state.sync, newcomer.sync)
    assert job.state.commits == (CommitId(2, 0), CommitId(1, 1))
    assert newcomer.commits == (CommitId(2, 0), None)
    assert device.copied_back, "straight to the newcomer's device"
    assert contents(newcomer) == job.was[commit]


LOOKS: dict[str, Callable[[TorchState], object]] = {
    "check": lambda state: state.check(),
    "outgoing": lambda state: committer_of(state).snapshot.outgoing(),
    "incoming": lambda state: committer_of(state).snapshot.incoming(
        msgspec.msgpack.encode((committer_of(state).snapshot._newer.frame.layout, 9, NO_SHARDING)), b""
    ),
    "summary": lambda state: committer_of(state).snapshot.summary(),
    "details": lambda state: committer_of(state).snapshot.details(),
    "restamp": lambda state: committer_of(state).snapshot.restamp(CommitId(1, 50)),
    "reserve": lambda state: committer_of(state).snapshot.reserve(10),
    "read": lambda state: read_commit(committer_of(state).snapshot, CommitId(1, 2)),
    "forget": lambda state: committer_of(state).snapshot.forget(),
    "drop_newest": lambda state: committer_of(state).snapshot.drop_newest(),
    "attach": lambda state: committer_of(state).use_storage(PrivateStorage()),
    "bind": lambda state: committer_of(state).use_session(committer_of(state).session),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_into_a_buffer_waits_for_the_copy(look: str, job: Job) -> None:
    job.commit()
    assert job.device.is_busy
    LOOKS[look](job.state)
    assert not job.device.is_busy
    assert committer_of(job.state).snapshot.is_settled
