"""The commits of test_async_commit.py on a real device. Skipped on machines without one."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.state.base import committer_of
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.torch import TorchState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

A_WHILE = 2_000_000_000  # cycles: about a second


class Net(torch.nn.Module):
    """Model with buffers that its forward pass writes, and with a parameter that is dense in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 64, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(64)
        self.head = torch.nn.Linear(64, 1 << 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.conv(x)).mean((2, 3)))
        return out


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """Yield a directory like that of a job, whose files CUDA can pin."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="elasticstate-test-") as directory:
        yield Path(directory)


@pytest.fixture
def file_storage(file_storage: Any, shared_memory: Path) -> Callable[..., Any]:
    return functools.partial(file_storage.func, shared_memory)


@pytest.fixture
def state(file_storage: Callable[..., Any], member: Any, world: Any) -> Iterator[TorchState]:
    torch.manual_seed(0)
    model = Net().cuda()
    state = TorchState(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        mine=torch.ones(5, device="cuda"),
        cpu=torch.ones(3),
    )
    committer_of(state).use_storage(file_storage())
    committer_of(state).use_session(member(world(1)))
    yield state
    committer_of(state).snapshot.close()  # CUDA would keep the addresses of memory that is gone


def train(state: TorchState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.rand(4, 3, 8, 8, device="cuda")).square().mean().backward()
    state.optimizer.step()
    state.mine += 1
    state.cpu += 1


def contents(state: TorchState) -> dict[str, torch.Tensor]:
    return {k: v.detach().cpu().clone() for k, v in state.capture().items() if isinstance(v, torch.Tensor)}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_each_commit_is_what_the_state_was_while_training_goes_on(state: TorchState) -> None:
    for _ in range(5):
        train(state)
        before = contents(state)
        state.commit()
        for _ in range(3):
            train(state)
        assert not equal(contents(state), before)
        state.restore()
        assert equal(contents(state), before)


def test_a_commit_waits_for_nothing_and_the_step_after_it_waits_on_the_device(
    state: TorchState, file_storage: Callable[..., Any]
) -> None:
    train(state)
    state.commit()
    committer_of(state).settle()
    train(state)
    before = contents(state)
    torch.cuda._sleep(A_WHILE)
    state.commit()
    assert not committer_of(state).snapshot.is_copied
    train(state)
    assert not committer_of(state).snapshot.is_copied, "Python has waited for the device"
    assert Snapshot(file_storage()).newest == CommitId(1, 1)
    state.restore()
    assert equal(contents(state), before)
    assert state.commits == (CommitId(1, 2), CommitId(1, 1))


def test_memory_is_pinned_and_let_go(state: TorchState) -> None:
    for _ in range(2):
        state.commit()
    committer_of(state).settle()
    buffers = [committer_of(state).snapshot._newer, committer_of(state).snapshot._older]
    assert all(buffer.memory.is_pinned() for buffer in buffers)
    committer_of(state).snapshot.close()
    assert not any(buffer.memory.is_pinned() for buffer in buffers)


def test_commits_are_right_in_memory_that_cannot_be_pinned(
    state: TorchState, file_storage: Any, tmp_path: Path
) -> None:
    """CUDA cannot pin a file on a disk. Its error must not show at the next launch of a kernel."""
    committer_of(state).snapshot.close()
    committer_of(state).use_storage(file_storage.func(tmp_path))
    for _ in range(2):
        train(state)
        before = contents(state)
        state.commit()
        train(state)
        state.restore()
        assert equal(contents(state), before)


def test_a_graph_is_captured_while_a_commit_is_on_its_way(state: TorchState) -> None:
    train(state)
    before = contents(state)
    x = torch.rand(4, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE)
    state.commit()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        x.mul_(2)
    graph.replay()
    state.restore()
    assert equal(contents(state), before)


def test_memory_to_spare_lets_a_write_by_hand_through(state: TorchState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICSTATE_COMMIT_DEVICE_MEMORY", "4G")
    train(state)
    before = contents(state)
    torch.cuda._sleep(A_WHILE)
    state.commit()
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.data.zero_()
    state.restore()
    assert equal(contents(state), before)
