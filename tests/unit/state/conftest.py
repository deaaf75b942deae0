from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticstate.core.ids import CommitId
from elasticstate.state.async_commit import Copy
from elasticstate.state.base import committer_of
from tests.integration.scripts.slow_device import SlowDevice
from tests.kit.state import CommitStorage, FileStorage, Job, Member, World, in_threads


@pytest.fixture
def file_storage(tmp_path: Path) -> Callable[..., FileStorage]:
    """Return a function that opens the one commit storage of this test, as often as needed."""
    return functools.partial(FileStorage, tmp_path)


@pytest.fixture
def world() -> type[World]:
    return World


@pytest.fixture
def member() -> type[Member]:
    return Member


@pytest.fixture
def together() -> Callable[..., None]:
    return in_threads


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDevice]:
    """Device that copies only when a wait for a copy requires it."""
    device = SlowDevice()
    wait = Copy.wait

    def wait_for_device(copy: Copy) -> Any:
        if device.error is None:
            device.finish()
        return wait(copy)

    monkeypatch.setattr(Copy, "wait", wait_for_device)
    yield device
    device.stop()


@pytest.fixture
def job(device: SlowDevice, file_storage: CommitStorage, member: Any, world: Any) -> Job:
    """A job that has trained, and made commit (1, 1)."""
    job = Job(device, file_storage(), member(world(1)))
    job.train()
    job.commit()
    job.train()
    committer_of(job.state).settle()
    assert job.state.commits == (CommitId(1, 1), None)
    return job
