"""A worker alone in a world, with tensors on a device that a thread simulates (scripts/slow_device.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scripts.slow_device import SlowDevice

from elasticstate.core.types import CommitId
from elasticstate.state import TorchState
from elasticstate.state.base import committer_of
from elasticstate.state.snapshot import Snapshot

CommitStorage = Callable[..., Any]


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def contents(state: TorchState) -> str:
    """Return all tensors by name, to the last digit, and the note."""
    values = {k: v.tolist() for k, v in state.capture().items() if isinstance(v, torch.Tensor | np.ndarray)}
    return repr([sorted(values.items()), state.note])


class Job:
    """A worker alone in a world, with tensors on a simulated device."""

    def __init__(self, device: SlowDevice, storage: Any, session: Any, **more: Any) -> None:
        torch.manual_seed(0)
        model, optimizer = parts()
        self.state = TorchState(model=model, optimizer=optimizer, **more, note=[0])
        self.device, self.session = device, session
        committer_of(self.state).snapshot = Snapshot(storage, lambda _: device)
        committer_of(self.state).use_session(session)
        self.was: dict[CommitId, str] = {}  # content at the time of each commit

    def train(self) -> None:
        self.forward().backward()
        self.state.optimizer.step()
        self.state.note = [self.state.note[0] + 1]

    def forward(self) -> torch.Tensor:
        self.state.optimizer.zero_grad()
        inputs = torch.linspace(-1, 1, 32).view(8, 4) * (self.state.note[0] + 1)
        loss: torch.Tensor = self.state.model(inputs).square().mean()
        return loss

    def commit(self) -> CommitId:
        commit = CommitId(self.session.generation, self.session.ticks + 1)
        self.was[commit] = contents(self.state)
        self.state.commit()
        return commit

    def restored(self) -> CommitId:
        """Restore, and check the content. Return the id of the restored commit."""
        self.state.restore()
        newest = self.state.commits[0]
        assert newest is not None
        assert contents(self.state) == self.was[newest]
        return newest


def note_of(content: str) -> list[int]:
    """Return ``note``, the last value of the content."""
    return [int(content[content.rindex("[") + 1 : content.index("]", content.rindex("["))])]


def found(file_storage: CommitStorage) -> tuple[CommitId | None, CommitId | None]:
    """Return the commits that a new worker would hold if this one died now."""
    snapshot = Snapshot(file_storage())
    return snapshot.newest, snapshot.previous
