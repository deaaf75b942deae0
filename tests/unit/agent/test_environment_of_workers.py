from __future__ import annotations

import pytest

from elasticstate.agent.host_job import environment_of_workers


def test_the_variables_of_torch_are_left_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert not [name for name in environment_of_workers([], []) if name.startswith("TORCH_") or "NCCL" in name]
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert environment_of_workers([], [])["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_defaults_give_way_to_the_users_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert environment_of_workers([], [])["PYTHONUNBUFFERED"] == "1"
    assert environment_of_workers([("PYTHONUNBUFFERED", "")], [])["PYTHONUNBUFFERED"] == ""
