from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from elasticstate.options import runtime_directory


@pytest.fixture
def long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory like those that batch systems make for a job, as TMPDIR."""
    path = tmp_path / "jobs" / "12345678.server.cluster.example.edu" / "temporary files"
    path.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return path


def test_sockets_are_in_a_short_directory(long_path: Path) -> None:
    assert tempfile.gettempdir() == str(long_path)
    found = runtime_directory()
    assert found != long_path
    assert len(os.fsencode(found)) < 20
    assert os.access(found, os.W_OK)


def test_the_directory_of_the_user_counts(long_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long_path))
    assert runtime_directory() == long_path


def test_a_short_one_for_temporary_files_is_taken(monkeypatch: pytest.MonkeyPatch, long_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", short)
        assert runtime_directory() == Path(short)
