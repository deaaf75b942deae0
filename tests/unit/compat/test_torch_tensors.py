from __future__ import annotations

import logging

import pytest
import torch

from elasticstate import compat
from elasticstate.compat import torch_tensors
from elasticstate.state import async_commit


@pytest.mark.parametrize("is_absent", [False, True])
def test_all_tensors_are_copied(monkeypatch: pytest.MonkeyPatch, is_absent: bool) -> None:
    if is_absent:
        monkeypatch.setattr(torch_tensors, "_foreach_copy", None)
    sources = [torch.arange(3.0), torch.ones(2, 2), torch.tensor(7, dtype=torch.int64)]
    targets = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros((), dtype=torch.int64)]
    torch_tensors.copy_all(targets, sources)
    torch_tensors.copy_all(targets, sources, non_blocking=True)
    assert [target.tolist() for target in targets] == [source.tolist() for source in sources]
    torch_tensors.copy_all([], [])


def test_the_fast_copy_exists() -> None:
    assert torch_tensors._foreach_copy is not None


def test_each_write_changes_the_version() -> None:
    assert torch_tensors.has_versions()
    tensor = torch.zeros(3, requires_grad=True)
    versions = [torch_tensors.version_of(tensor)]
    with torch.no_grad():
        tensor.add_(1)
        versions.append(torch_tensors.version_of(tensor))
        tensor[0] = 5
        versions.append(torch_tensors.version_of(tensor))
        tensor.detach().mul_(2)
        versions.append(torch_tensors.version_of(tensor))
    assert versions == sorted(set(versions))


def test_without_versions_no_commit_is_copied_while_training_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_tensors, "_VERSION", "_renamed")
    compat.warn_absent.cache_clear()
    with caplog.at_level(logging.WARNING, "elasticstate"):
        assert async_commit.copy_stream_of(torch.device("cuda")) is None
        assert async_commit.copy_stream_of(torch.device("cuda", 1)) is None
    compat.warn_absent.cache_clear()
    (record,) = caplog.records
    assert "training stops while a commit is copied" in record.getMessage()
