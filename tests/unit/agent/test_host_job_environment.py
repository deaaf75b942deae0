from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from elasticstate.agent.host_job import environment_of_workers
from elasticstate.options import interface_variables


def test_the_variables_of_torch_are_left_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert not [name for name in environment_of_workers([], []) if name.startswith("TORCH_") or "NCCL" in name]
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert environment_of_workers([], [])["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_defaults_give_way_to_the_users_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert environment_of_workers([], [])["PYTHONUNBUFFERED"] == "1"
    assert environment_of_workers([("PYTHONUNBUFFERED", "")], [])["PYTHONUNBUFFERED"] == ""


def test_gloo_and_nccl_use_the_named_interface() -> None:
    assert interface_variables("ib0") == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert interface_variables("") == {}


def test_python_is_that_of_the_agent_also_in_an_environment_that_is_not_activated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = os.path.dirname(sys.executable)
    for path in ("/usr/bin:/bin", f"/usr/bin:{own}", ""):
        monkeypatch.setenv("PATH", path)
        found = environment_of_workers([], [])["PATH"]
        assert os.path.dirname(shutil.which("python", path=found) or "") == own
        assert found.endswith(path), "all else is found as before"
    (tmp_path / "python3").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path}:{own}")
    assert environment_of_workers([], [])["PATH"] == f"{own}:{tmp_path}:{own}", "python3, too"
    monkeypatch.setenv("PATH", f"/opt/tools:{own}:/bin")
    assert environment_of_workers([], [])["PATH"] == f"/opt/tools:{own}:/bin", "it comes first already"
    assert environment_of_workers([], [("PATH", "/bin")])["PATH"] == "/bin", "as --env says"
