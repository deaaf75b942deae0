"""The directory of a running job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticstate.driver.record import JobDirectory, Record, find_job
from elasticstate.errors import OptionError


@pytest.fixture(autouse=True)
def _own_runtime_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_job_is_found_by_its_name_until_it_is_removed() -> None:
    directory = JobDirectory("a", "c0ffee")
    assert find_job("a") is None
    directory.write(Record("127.0.0.1:5", "secret"))
    assert find_job("a") == Record("127.0.0.1:5", "secret")
    assert find_job("b") is None
    directory.remove()
    assert find_job("a") is None
    assert not directory.path.exists()


def test_nobody_else_may_look_into_it() -> None:
    directory = JobDirectory("a", "c0ffee")
    directory.write(Record("127.0.0.1:5", "secret"))
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in directory.path.iterdir())
    directory.path.chmod(0o755)
    assert find_job("a") is None
    directory.remove()


def test_the_name_of_a_running_job_is_taken() -> None:
    directory = JobDirectory("a", "c0ffee")
    with pytest.raises(OptionError, match="--job-name: 'a': takes the name of no running job"):
        JobDirectory("a", "c0ffee")
    directory.remove()
    JobDirectory("a", "c0ffee").remove()


def test_what_a_killed_driver_has_left_is_replaced() -> None:
    killed = JobDirectory("a", "c0ffee")
    killed.write(Record("127.0.0.1:5", "old"))
    os.close(killed._lock)  # the kernel does that at its death
    directory = JobDirectory("a", "c0ffee")
    assert find_job("a") is None
    directory.remove()


def test_a_directory_that_another_may_write_to_is_not_touched(tmp_path: Path) -> None:
    planted = tmp_path / f"elasticstate-{os.getuid()}-a"
    planted.mkdir(mode=0o755)
    planted.chmod(0o777)
    with pytest.raises(OptionError):
        JobDirectory("a", "c0ffee")
    assert planted.exists()
