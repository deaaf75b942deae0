"""Tick records: when there is one, and what it costs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from elasticstate import ObjectState, TorchState
from elasticstate.compat import torch_tensors
from elasticstate.core.ids import CommitId
from elasticstate.state import tick_record
from elasticstate.state.base import committer_of
from tests.kit.state import Member, World


def trained(member: Member, **more: Any) -> TorchState:
    """Return a state that was committed at tick 1 and recorded at tick 2."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TorchState(model=model, optimizer=optimizer, step=0, **more)
    committer_of(state).use_session(member)
    state.commit()
    step(state)
    return state


def step(state: TorchState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(2, 4)).sum().backward()
    state.optimizer.step()
    state.step += 1
    state.commit(every=1000)


@pytest.fixture
def two() -> Member:
    return Member(World(2), records_ticks=True)


def after_a_failure(state: TorchState) -> CommitId | None:
    committer_of(state).commit_last_tick()
    state.restore()
    return state.commits[0]


def test_a_failure_between_two_commits_goes_back_to_the_last_tick(two: Member) -> None:
    state = trained(two)
    state.step = 7
    state.model(torch.ones(2, 4)).sum().backward()
    assert after_a_failure(state) == (1, 2)
    assert state.step == 1
    assert state.model.weight.grad is None
    assert state.commits == ((1, 2), (1, 1)), "the commit before stays"


def test_without_records_a_failure_goes_back_to_the_last_commit() -> None:
    state = trained(Member(World(2)))
    assert after_a_failure(state) == (1, 1)


def test_a_record_counts_once_and_only_in_its_generation(two: Member) -> None:
    state = trained(two)
    two.world = World(2, generation=2)
    assert after_a_failure(state) == (1, 1)
    two.world = World(2, generation=1)
    assert after_a_failure(state) == (1, 1)


def test_after_too_little_storage_the_last_commit_counts(
    two: Member, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = trained(two)

    def write(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(committer_of(state).snapshot, "write", write)
    assert after_a_failure(state) == (1, 1)
    assert "the state of tick 2 cannot be committed: no space" in caplog.text


def test_a_state_of_plain_values_is_always_recorded(two: Member) -> None:
    state = ObjectState(step=0, notes=[1])
    committer_of(state).use_session(two)
    state.commit()
    state.notes.append(2)
    state.commit(every=1000)
    state.notes.append(3)
    committer_of(state).commit_last_tick()
    state.restore()
    assert (state.commits[0], state.notes) == ((1, 2), [1, 2])


def test_a_large_state_that_cannot_be_watched_is_said_once(
    two: Member, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained(two, blob=b"x" * (tick_record.MAX_BYTES + 1))
    with caplog.at_level(logging.WARNING, "elasticstate"):
        for _ in range(40):
            step(state)
    (record,) = caplog.records
    assert "a failure will repeat the steps since the last commit, because 8 MB of objects" in record.getMessage()
    assert after_a_failure(state) == (1, 1)


def test_slow_records_stop(two: Member, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tick_record, "_SLOW_S", 0.0)
    monkeypatch.setattr(tick_record, "MAX_SHARE", 0.0)
    state = trained(two)
    with caplog.at_level(logging.WARNING, "elasticstate"):
        for _ in range(20):
            step(state)
    assert "of the training time to record each tick" in caplog.text
    assert after_a_failure(state) == (1, 1)


def test_a_state_on_a_device_has_no_records(two: Member, caplog: pytest.LogCaptureFixture) -> None:
    state = TorchState(where=torch.zeros(2, device="meta"))
    records = committer_of(state)._ticks
    with caplog.at_level(logging.WARNING, "elasticstate"):
        records.record(CommitId(1, 1))
        records.record(CommitId(1, 2))
    assert records.take(None, 1) is None
    assert not caplog.text


# ------------------------------------------------------------------------- writes of memory that torch does not count


def _add_to_data(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


add_to_data = torch.jit.script(_add_to_data)


def test_a_write_that_nothing_detects_beforehand_is_found_in_the_samples(two: Member) -> None:
    state = trained(two)
    written = state.model.weight.detach() + 1
    add_to_data(state.model.weight)
    assert torch.equal(state.model.weight, written), "nothing was written"
    found = after_a_failure(state)
    assert not torch.equal(state.model.weight, written), f"commit {found} has what was written after the tick"
    assert found == (1, 1)


@pytest.mark.parametrize("width", [4, 300], ids=["small", "large"])
def test_a_parameter_in_memory_of_numpy_is_that_of_the_tick_or_refused(two: Member, width: int) -> None:
    """Single elements are written, which samples would miss."""
    memory = np.ones((4, width * width), dtype=np.float32)
    model = torch.nn.Linear(width * width, 4)
    model.weight = torch.nn.Parameter(torch.from_numpy(memory))
    state = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), step=0)
    committer_of(state).use_session(two)
    state.commit()
    for _ in range(3):
        model(torch.ones(2, width * width)).sum().backward()
        state.optimizer.step()
        memory[1, 3] = 5.0
        state.commit(every=1000)
    at_tick = memory.copy()
    memory[2, 3] += 1.0
    committer_of(state).commit_last_tick()
    state.restore()
    assert state.commits[0] == ((1, 4) if width == 4 else (1, 1)), "small tensors are copied"
    assert width != 4 or np.array_equal(memory, at_tick)


@pytest.mark.parametrize("is_buffer", [False, True], ids=["value", "buffer"])
@pytest.mark.parametrize("way", ["memory of numpy", "data", "numpy()", "storage", "single element"])
def test_a_large_tensor_that_is_reset_after_the_tick_is_that_of_the_tick_or_refused(
    two: Member, way: str, is_buffer: bool
) -> None:
    """Each write restores the content from before the tick, and torch counts none of them."""
    memory = np.zeros((300, 300), np.int64)
    counts = torch.from_numpy(memory) if way == "memory of numpy" else torch.zeros(300, 300, dtype=torch.int64)
    model = torch.nn.Linear(4, 4)
    if is_buffer:
        model.register_buffer("counts", counts)
    more: dict[str, Any] = {} if is_buffer else {"counts": counts}
    state = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), step=0, **more)
    writes: dict[str, Callable[[int], object]] = {
        "memory of numpy": memory.fill,
        "data": lambda value: counts.data.fill_(value),
        "numpy()": lambda value: counts.numpy().fill(value),
        "storage": lambda value: counts.untyped_storage().fill_(value),
        "single element": lambda value: counts.data[7].fill_(value),
    }
    committer_of(state).use_session(two)
    state.commit()
    expected = {CommitId(1, 1): counts.clone()}
    for tick in range(2, 7):
        step(state)
        expected[CommitId(1, tick)] = counts.clone()
    writes[way](20)
    step(state)
    expected[CommitId(1, 7)] = counts.clone()
    writes[way](0)
    newest = after_a_failure(state)
    assert newest is not None
    assert torch.equal(counts, expected[newest])
    assert newest == (1, 7), "it was seen to change between two ticks, so the record has a copy"


def goes_back_to_the_tick_or_the_commit(two: Member, handle: Callable[[torch.Tensor], Any]) -> None:
    """Write the weight after a tick through a handle from before the state. The write must not survive a failure."""
    model = torch.nn.Linear(4, 4)
    write = handle(model.weight)
    state = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), step=0)
    committer_of(state).use_session(two)
    state.commit()
    expected = {CommitId(1, 1): model.weight.detach().clone()}
    step(state)
    expected[CommitId(1, 2)] = model.weight.detach().clone()
    write()
    newest = after_a_failure(state)
    assert newest is not None
    assert torch.equal(model.weight, expected[newest])


def test_a_capsule_from_before_is_sampled(two: Member) -> None:
    goes_back_to_the_tick_or_the_commit(two, lambda weight: partial(torch.from_dlpack(weight.detach()).add_, 1))


def test_a_storage_object_that_is_kept_is_a_handle(two: Member) -> None:
    goes_back_to_the_tick_or_the_commit(two, lambda weight: partial(weight.untyped_storage().fill_, 7))


def test_a_function_of_a_fused_optimizer_is_a_write(two: Member) -> None:
    state = trained(two)
    tensor = state.model.weight.detach()
    rates = {"weight_decay": 0.0, "momentum": 0.0, "lr": 1.0, "dampening": 0.0}
    torch._fused_sgd_([tensor], [torch.ones(4, 4)], [], **rates, nesterov=False, maximize=False, is_first_step=False)
    assert after_a_failure(state) == (1, 1)


def test_large_running_statistics_are_copied_when_they_were_seen_to_change(two: Member) -> None:
    norm = torch.nn.BatchNorm1d(70_000)
    state = TorchState(norm=norm, step=0)
    committer_of(state).use_session(two)
    state.commit()
    state.commit(every=1000)
    norm(torch.randn(2, 70_000))  # torch does not count these writes
    assert after_a_failure(state) == (1, 1), "the checksum has changed"
    state.commit(every=1000)
    expected = norm.running_mean.clone()
    norm(torch.randn(2, 70_000))
    assert after_a_failure(state) == (1, 3), "the next record has a copy"
    assert torch.equal(norm.running_mean, expected)


def test_a_large_table_that_does_not_change_is_not_copied(two: Member) -> None:
    table = torch.rand(tick_record.MAX_BYTES // 2)
    state = trained(two, table=table)
    assert after_a_failure(state) == (1, 2)
    step(state)
    table[5] = 7.0
    assert after_a_failure(state) == (1, 2), "an element was written: the checksum has changed"


def test_a_receive_that_is_in_flight_over_a_tick_is_a_handle(two: Member) -> None:
    store = dist.HashStore()
    groups: dict[int, dist.ProcessGroup] = {}

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroup(dist.PrefixStore("a", store), rank, 2)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        backend = dist.ProcessGroupGloo(dist.PrefixStore("b", store), rank, 2, options)
        groups[rank]._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch_tensors.install()
    state = trained(two)
    momentum = state.optimizer.state[state.model.weight]["exp_avg"]
    work = groups[0].recv([momentum], 1, 0)
    step(state)
    at_tick = momentum.clone()
    groups[1].send([torch.full((4, 4), 7.0)], 0, 0).wait()
    work.wait()
    assert momentum.tolist() == [[7.0] * 4] * 4, "the receive has written without a version"
    if after_a_failure(state) == (1, 3):  # something else refers to that memory, too: then the record has a copy
        assert torch.equal(state.optimizer.state[state.model.weight]["exp_avg"], at_tick)
    else:
        assert state.commits[0] == (1, 1)
    torch_tensors.release_works()
    assert not torch_tensors._in_flight, "no work keeps the groups alive"


@pytest.mark.parametrize(("verdict", "last", "digests"), [((1, 1), 2, [1, 2]), ((0, 0), 1, [1])])
def test_a_recorded_tick_follows_only_a_commit_that_is_equal_on_all_ranks(
    two: Member, verdict: tuple[int, int], last: int, digests: list[int]
) -> None:
    two.awaits_verdicts, two.verdicts = True, [verdict]
    state = trained(two)
    assert after_a_failure(state) == (1, last)
    assert [tick for _, tick, _ in two.digests] == digests
