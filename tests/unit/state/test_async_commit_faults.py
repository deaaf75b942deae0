"""Asynchronous commits with faults, with device memory for a copy, and in random order (see test_async_commit)."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.errors import OptionError
from elasticstate.options import COMMIT_DEVICE_MEMORY
from elasticstate.state import async_commit
from elasticstate.state.async_commit import Copy
from elasticstate.state.base import committer_of
from elasticstate.state.snapshot import PrivateStorage, Snapshot
from tests.integration.scripts.slow_device import SlowDevice
from tests.kit.state import CommitStorage, Job, found, note_of, read_commit

# ------------------------------------------------------------------------------------------------------------- faults


def test_an_error_of_the_device_costs_that_commit_alone(
    job: Job, file_storage: CommitStorage, caplog: pytest.LogCaptureFixture
) -> None:
    job.commit()
    job.device.fail(RuntimeError("an illegal memory access was encountered"))
    committer_of(job.state).settle()
    assert job.state.commits == job.session.commits[-1] == found(file_storage) == (CommitId(1, 1), None)
    assert "discarded commit (1, 2): the copy from the device failed: an illegal memory access" in caplog.text
    with pytest.raises(RuntimeError, match="illegal"):
        job.state.commit()
    with pytest.raises(RuntimeError, match="illegal"):
        committer_of(job.state).seal(CommitId(1, 3))
    assert found(file_storage) == (CommitId(1, 1), None)
    job.device.error = None
    assert job.restored() == CommitId(1, 1)


def test_an_error_while_a_save_waits_is_raised(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Copy.wait

    def fail(copy: Copy) -> Any:
        job.device.fail(RuntimeError("the device has fallen off the bus"))
        return wait(copy)

    monkeypatch.setattr(Copy, "wait", fail)
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        committer_of(job.state).seal(CommitId(1, 2))
    assert job.state.commits == (CommitId(1, 1), None)


def test_a_damaged_commit_never_reaches_the_device(job: Job) -> None:
    commit = job.commit()
    committer_of(job.state).settle()
    committer_of(job.state).snapshot._newer.memory[committer_of(job.state).snapshot._newer.frame.tensors + 3] ^= 1
    job.train()
    copied_back = job.device.copied_back
    assert job.restored() == CommitId(1, 1) != commit
    assert job.device.copied_back == copied_back + len(committer_of(job.state).snapshot._newer.frame.layout.entries)


def write_a_parameter(job: Job) -> None:
    with torch.no_grad():
        job.state.model[0].weight.mul_(0.9)


def write_the_state_of_an_optimizer(job: Job) -> None:
    job.state.optimizer.state[job.state.model[0].weight]["exp_avg"].zero_()


def load_a_state_dict(job: Job) -> None:
    job.state.model.load_state_dict({k: v + 1 for k, v in job.state.model.state_dict().items()})


def step_without_hooks(job: Job) -> None:
    job.forward().backward()
    type(job.state.optimizer).step.__wrapped__(job.state.optimizer)


def step_compiled(job: Job) -> None:
    job.forward().backward()
    torch.compile(job.state.optimizer.step, backend="eager")()


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # torch.compile
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # from torch, when it imports its compiler
@pytest.mark.parametrize(
    "write", [write_a_parameter, write_the_state_of_an_optimizer, load_a_state_dict, step_without_hooks, step_compiled]
)
@pytest.mark.parametrize("then_steps", [False, True])
def test_a_write_that_nobody_has_announced_costs_the_commit_and_the_overlap(
    write: Callable[[Job], None],
    then_steps: bool,
    job: Job,
    file_storage: CommitStorage,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job.commit()
    write(job)
    if then_steps:
        job.train()
    committer_of(job.state).settle()
    assert job.state.commits == found(file_storage) == (CommitId(1, 1), None)
    assert "discarded commit (1, 2): code other than an optimizer's step()" in caplog.text
    commit = job.commit()
    assert not job.device.is_busy, "it was waited for at once"
    write(job)
    assert job.restored() == commit


def test_a_step_that_is_captured_for_a_graph_is_trusted_no_more(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _: None)
    first = job.commit()
    job.forward().backward()
    finish = threading.Thread(target=job.device.finish)
    finish.start()
    job.state.optimizer.step()
    finish.join()
    assert not job.device.is_busy, "a graph that is being captured must not wait for what is not in it: Python does"
    assert committer_of(job.state).snapshot.is_copied
    second = job.commit()
    assert not job.device.is_busy
    write_a_parameter(job)
    assert (job.restored(), job.state.commits[1]) == (second, first)


def test_the_device_of_these_tests_shows_what_is_written_too_early(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait, and with a write that does not change the tensor's version."""
    monkeypatch.setattr(Copy, "release", lambda _: None)
    commit = job.commit()
    job.state.model[0].weight.data.add_(1.0)
    with pytest.raises(AssertionError):
        job.restored()
    assert job.state.commits[0] == commit, "its checksum is right: that is of the wrong bytes"


def test_memory_that_a_parameter_leaves_is_kept_until_it_is_copied(job: Job) -> None:
    commit = job.commit()
    for parameter in job.state.model.parameters():
        parameter.data = torch.full_like(parameter, 3.0)
    job.state.model[1].running_mean = torch.zeros(6)
    job.state.optimizer.load_state_dict(job.state.optimizer.state_dict())
    assert job.restored() == commit


# ------------------------------------------------------------------------------------------ device memory for a copy


def test_with_memory_to_spare_nobody_waits(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_DEVICE_MEMORY, "1M")
    held_back = job.device.held_back
    commit = job.commit()
    for _ in range(2):
        job.train()
    write_a_parameter(job)
    assert job.device.held_back == held_back
    assert job.device._done == 0 or job.device.is_busy
    assert job.restored() == commit


def test_memory_to_spare_goes_first_to_what_is_waited_for_at_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = sum(buffer.nbytes for buffer in job.state.model.buffers())
    monkeypatch.setenv(COMMIT_DEVICE_MEMORY, str(buffers))
    held_back = job.device.held_back
    commit = job.commit()
    job.forward().backward()
    assert job.device.held_back == held_back
    job.state.optimizer.step()
    assert job.device.held_back == held_back + 1
    assert job.device.is_busy, "what was copied on the device comes last"
    assert job.restored() == commit


def test_bytes_to_spare_that_are_no_number_are_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_DEVICE_MEMORY, "much")
    with pytest.raises(OptionError, match="ELASTICSTATE_COMMIT_DEVICE_MEMORY: 'much': must be a number of bytes"):
        job.commit()


# ------------------------------------------------------------------------------------------------------ pinned memory


def test_memory_is_pinned_once_and_let_go_before_it_is_given_back(job: Job) -> None:
    job.commit()
    committer_of(job.state).settle()
    assert len(job.device.pinned) == 2
    first = dict(job.device.pinned)
    for _ in range(2):
        job.commit()
    committer_of(job.state).settle()
    assert job.device.pinned == first
    job.state.note = ["x" * (1 << 17)]
    for _ in range(2):
        job.commit()
    committer_of(job.state).settle()
    assert len(job.device.pinned) == 2
    assert set(job.device.pinned).isdisjoint(first)
    job.commit()
    committer_of(job.state).use_storage(PrivateStorage())
    assert job.device.pinned == {}


def test_a_job_without_a_device_pins_nothing_and_has_no_thread_and_no_hook() -> None:
    program = """
import threading, torch, elasticstate
from elasticstate.state import async_commit
model = torch.nn.Linear(2, 2)
state = elasticstate.TorchState(model=model, optimizer=torch.optim.Adam(model.parameters()))
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.commit()
state.restore()
is_watched = async_commit.watch_steps.cache_info().currsize > 0
assert not torch.cuda.is_initialized() and not is_watched and threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---------------------------------------------------------------------------------------------------- random order


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_order_each_commit_that_is_held_is_what_it_was(
    seed: int, device: SlowDevice, file_storage: CommitStorage, member: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(async_commit, "CHUNK_BYTES", chance.choice([40, 200, 1 << 20]))
    monkeypatch.setenv(COMMIT_DEVICE_MEMORY, str(chance.choice([0, 0, 100, 400, 1 << 20])))
    job = Job(device, file_storage(), member(world(1)), own=torch.zeros(7))
    for _ in range(60):
        match chance.choice(
            ["step", "step", "forward", "advance", "advance", "commit", "commit", "tick", "own", "back"]
        ):
            case "step":
                job.train()
            case "forward":
                job.forward().backward()
            case "advance":
                device.advance(chance.randrange(1, 12))
            case "commit":
                job.commit()
            case "tick":
                job.state.check_host_updates()
            case "own":
                job.state.own += 1.0
            case "back" if job.was:
                job.session.is_over = chance.random() < 0.3
                newest = job.state.commits[0]
                if newest is not None or not job.session.is_over:
                    assert newest is None or job.restored() >= newest
                job.session.is_over = False
        left = Snapshot(file_storage())
        for commit in (left.newest, left.previous):
            assert commit is None or read_commit(left, commit)["note"] == note_of(job.was[commit])
    committer_of(job.state).settle()
    newest, previous = job.state.commits
    assert job.restored() == newest
    if previous is not None:
        committer_of(job.state).snapshot.drop_newest()
        assert job.restored() == previous
