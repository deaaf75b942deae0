"""The directory of a job, and the record in it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from elasticstate.config import Options
from elasticstate.core.assignment import assign
from elasticstate.core.membership import new_membership, step
from elasticstate.core.types import CommitId, HostsDiscovered, HostSlots, WorkerId, World
from elasticstate.driver.record import JobDirectory, Record, find_job
from elasticstate.driver.takeover import Keeper, first_record, next_record
from elasticstate.errors import OptionError

OPTIONS = Options(command=("python", "train.py"), np=2, min_np=1, hosts=("a:2",), cooldown_range_s=(1.0, 2.0))


@pytest.fixture(autouse=True)
def _own_runtime_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def a_record() -> Record:
    return msgspec.structs.replace(first_record(OPTIONS, "a"), ports=(5, 6))


def die(directory: JobDirectory) -> None:
    """What the kernel does at the death of a driver."""
    os.close(directory._lock)
    os.close(directory._driver_lock)


def test_a_job_is_found_by_its_name_until_it_is_removed() -> None:
    directory = JobDirectory("a")
    assert find_job("a") is None
    record = a_record()
    directory.write(record)
    assert find_job("a") == record
    assert record.address == "127.0.0.1:5"
    assert find_job("b") is None
    directory.remove()
    assert find_job("a") is None
    assert not directory.path.exists()


def test_nobody_else_may_look_into_it() -> None:
    directory = JobDirectory("a")
    directory.write_id("c0ffee")
    directory.write(a_record())
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in directory.path.iterdir())
    directory.path.chmod(0o755)
    assert find_job("a") is None
    directory.remove()


def test_the_name_of_a_running_job_is_taken() -> None:
    directory = JobDirectory("a")
    directory.write(a_record())
    with pytest.raises(
        OptionError, match=f"--job-name: 'a': takes the name of no running job .its driver is process {os.getpid()}"
    ):
        JobDirectory("a")
    directory.remove()
    JobDirectory("a").remove()


def test_what_a_killed_driver_has_written_is_found_by_the_next_one() -> None:
    killed = JobDirectory("a")
    members = assign([(WorkerId("a", 0, 1), 0), (WorkerId("a", 1, 2), 1)])
    record = msgspec.structs.replace(
        a_record(),
        hosts=(HostSlots("a", 2),),
        agents=("a",),
        world=World(3, members, 0, (1,), "127.0.0.1:9"),
        ages=(0, 1),
        next_age=2,
        highest=CommitId(2, 7),
    )
    killed.write(record)
    die(killed)
    directory = JobDirectory("a")
    assert directory.found == record
    directory.give_back()
    assert find_job("a") == record, "it could not be used, and is as it was"
    again = JobDirectory("a")
    again.remove()
    assert find_job("a") is None


def test_what_a_driver_has_left_that_died_at_once_is_nothing() -> None:
    killed = JobDirectory("a")
    killed.write_id("c0ffee")
    die(killed)
    directory = JobDirectory("a")
    assert directory.found is None
    assert [entry.name for entry in directory.path.iterdir()] == ["driver.lock"]
    directory.remove()


def test_what_cannot_be_read_is_not_thrown_away() -> None:
    killed = JobDirectory("a")
    killed.write(a_record())
    die(killed)
    (killed.path / "driver.json").write_text("{")
    with pytest.raises(OptionError, match=r"cannot be read: install the version .* or remove that directory"):
        JobDirectory("a")
    assert (killed.path / "driver.json").read_text() == "{"


def test_a_job_goes_on_under_its_name_with_the_same_command_only() -> None:
    last = a_record()
    after = next_record(last, OPTIONS, "a")
    assert (after.epoch, after.job_id, after.token) == (last.epoch + 1, last.job_id, last.token)
    other = Options(command=("python", "other.py"), np=2, min_np=1)
    with pytest.raises(OptionError, match=r"--job-name: 'a': .*python train.py has lost its driver"):
        next_record(last, other, "a")


def test_a_directory_that_another_may_write_to_is_not_touched(tmp_path: Path) -> None:
    planted = tmp_path / f"elasticstate-{os.getuid()}-a"
    planted.mkdir(mode=0o755)
    planted.chmod(0o777)
    with pytest.raises(OptionError):
        JobDirectory("a")
    assert planted.exists()


def test_a_record_that_cannot_be_written_is_no_record() -> None:
    """An old one would be worse. (A directory where the new file has to be stands for a full disk.)"""
    directory = JobDirectory("a")
    warnings: list[str] = []
    keeper = Keeper(directory, a_record(), warnings.append)
    assert find_job("a") == keeper.record
    obstacle = directory.path / "driver.json.new"
    obstacle.mkdir()
    m = step(new_membership(OPTIONS.policy()), HostsDiscovered((HostSlots("a", 2),)), 0.0).next
    keeper.keep(m, (5, 6))
    keeper.keep(m, (5, 6))
    assert find_job("a") is None
    assert len(warnings) == 1
    assert "cannot be written (Is a directory): no driver could take over" in warnings[0]
    obstacle.rmdir()
    keeper.keep(m, (5, 6))
    assert find_job("a") == keeper.record
    assert keeper.record.hosts == (HostSlots("a", 2),)
    directory.remove()
