"""The directory of a job, and the record in it."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from elasticstate.core.ids import CommitId, HostSlots, WorkerId
from elasticstate.core.step import new_membership, step
from elasticstate.core.types import HostsDiscovered, World
from elasticstate.core.worlds import assign
from elasticstate.driver.record import JobDirectory, Keeper, Record, find_job, first_record, next_record
from elasticstate.errors import OptionError
from elasticstate.options import Options
from tests.kit.driver import votes

OPTIONS = Options(command=("python", "train.py"), np=2, min_np=1, hosts=("a:2",), cooldown_range_s=(1.0, 2.0))


@pytest.fixture(autouse=True)
def _own_runtime_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def a_record() -> Record:
    return msgspec.structs.replace(first_record(OPTIONS, "a"), ports=(5, 6))


def die(directory: JobDirectory) -> None:
    """Release the lock, as the kernel does when a driver dies."""
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


def test_a_history_that_is_written_while_the_directory_is_removed_does_not_keep_it() -> None:
    for _ in range(20):
        directory, is_over = JobDirectory("a"), threading.Event()
        for number in range(100):  # their removal takes a while
            (directory.path / str(number)).touch()

        def write(directory: JobDirectory = directory, is_over: threading.Event = is_over) -> None:
            while not is_over.is_set():
                directory.write_history(b"history")

        writer = threading.Thread(target=write)
        writer.start()
        while not directory.history():
            assert writer.is_alive()
        directory.remove()
        is_over.set()
        writer.join()
        assert not directory.path.exists()


def test_without_a_runtime_directory_the_error_names_it_and_not_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "1000"))
    with pytest.raises(OptionError, match=r"^XDG_RUNTIME_DIR: .*there is no such directory"):
        JobDirectory("a")
    with pytest.raises(OptionError, match=r"^XDG_RUNTIME_DIR: .*there is no such directory"):
        find_job("a")


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
        OptionError,
        match=f"--job-name: 'a': a job of this name is already running: its driver is process {os.getpid()}",
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
        world=World(3, members, 2, 0, ((1, 2),), "127.0.0.1:9"),
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


def test_a_driver_that_dies_as_it_cleans_up_leaves_nothing_to_reattach_to() -> None:
    killed = JobDirectory("a")
    killed.write_id("c0ffee")
    asyncio.run(Keeper(killed, a_record(), lambda _: None, votes()).job_is_over(10))
    die(killed)
    over = find_job("a")
    assert over is not None, "its agents may be stopping: its status can be asked for"
    assert over.is_over
    directory = JobDirectory("a")
    assert directory.found is None
    assert find_job("a") is None
    directory.remove()


def test_a_directory_that_was_deleted_is_made_anew_with_the_record() -> None:
    directory, warnings = JobDirectory("a"), list[str]()
    keeper = Keeper(directory, a_record(), warnings.append, votes())
    asyncio.run(keeper.look())
    shutil.rmtree(directory.path)
    asyncio.run(keeper.look())
    assert find_job("a") == keeper.record
    assert (directory.path / "id").read_text() == keeper.record.job_id
    with pytest.raises(OptionError, match="its driver is process"):
        JobDirectory("a")
    assert len(warnings) == 1
    assert "was deleted and created again" in warnings[0]
    directory.remove()
    assert not directory.path.exists()


def test_a_directory_whose_name_another_has_taken_is_left_to_them() -> None:
    directory, warnings = JobDirectory("a"), list[str]()
    keeper = Keeper(directory, a_record(), warnings.append, votes())
    shutil.rmtree(directory.path)
    directory.path.mkdir()
    directory.path.chmod(0o777)
    for _ in range(2):
        asyncio.run(keeper.look())
    assert len(warnings) == 1
    assert "could not be created again" in warnings[0]
    asyncio.run(keeper.job_is_over(10))
    assert not list(directory.path.iterdir()), "nothing of the job is written there: the record has its token"
    directory.remove()
    assert directory.path.exists()


def test_what_cannot_be_read_is_not_thrown_away() -> None:
    killed = JobDirectory("a")
    killed.write(a_record())
    die(killed)
    (killed.path / "driver.json").write_text("{")
    with pytest.raises(OptionError, match=r"cannot be read. Install the version .* or remove the directory"):
        JobDirectory("a")
    assert (killed.path / "driver.json").read_text() == "{"


def test_a_job_goes_on_under_its_name_with_the_same_command_only() -> None:
    last = a_record()
    after = next_record(last, OPTIONS, "a")
    assert (after.epoch, after.job_id, after.token) == (last.epoch + 1, last.job_id, last.token)
    other = Options(command=("python", "other.py"), np=2, min_np=1)
    with pytest.raises(
        OptionError, match=r"--job-name: 'a': .* lost its driver, and it runs another command, python train.py"
    ):
        next_record(last, other, "a")


def test_a_directory_that_another_may_write_to_is_not_touched(tmp_path: Path) -> None:
    planted = tmp_path / f"elasticstate-{os.getuid()}-a"
    planted.mkdir(mode=0o755)
    planted.chmod(0o777)
    with pytest.raises(OptionError):
        JobDirectory("a")
    assert planted.exists()


def test_a_record_that_cannot_be_written_is_no_record() -> None:
    """An outdated record would be worse than none. (A directory at the path of the new file simulates a full disk.)"""
    directory = JobDirectory("a")
    warnings: list[str] = []
    keeper = Keeper(directory, a_record(), warnings.append, votes())
    assert find_job("a") == keeper.record
    obstacle = directory.path / "driver.json.new"
    obstacle.mkdir()
    m = step(new_membership(OPTIONS.policy()), HostsDiscovered((HostSlots("a", 2, "r1"),)), 0.0).next
    asyncio.run(keeper.keep(m, (5, 6), 1.0))
    asyncio.run(keeper.keep(m, (5, 6), 1.0))
    assert find_job("a") is None
    assert len(warnings) == 1
    assert "could not be written (Is a directory); until then no new driver can reattach" in warnings[0]
    obstacle.rmdir()
    asyncio.run(keeper.keep(m, (5, 6), 1.0))
    assert find_job("a") == keeper.record
    assert keeper.record.hosts == (HostSlots("a", 2, "r1"),)
    directory.remove()


def test_an_old_record_stays_if_only_new_figures_cannot_be_written() -> None:
    directory = JobDirectory("b")
    warnings: list[str] = []
    keeper = Keeper(directory, a_record(), warnings.append, votes())
    m = step(new_membership(OPTIONS.policy()), HostsDiscovered((HostSlots("a", 2),)), 0.0).next
    asyncio.run(keeper.keep(m, (5, 6), 0.0))
    obstacle = directory.path / "driver.json.new"
    obstacle.mkdir()
    failed = replace(m, ledger=msgspec.structs.replace(m.ledger, failures=1))
    asyncio.run(keeper.keep(failed, (5, 6), 1.0))
    found = find_job("b")
    assert found is not None
    assert found.failures == 0, "the old record"
    assert warnings == []
    asyncio.run(keeper.keep(failed, (5, 7), 2.0))
    assert find_job("b") is None, "a new driver must not use the old ports"
    assert len(warnings) == 1
    obstacle.rmdir()
    asyncio.run(keeper.keep(failed, (5, 7), 3.0))
    found = find_job("b")
    assert found is not None
    assert found.failures == 1
    directory.remove()


def test_a_record_on_a_disk_that_hangs_delays_what_follows_from_it_and_not_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write that waits for this test simulates the disk."""
    directory = JobDirectory("j")
    warnings: list[str] = []
    keeper = Keeper(directory, a_record(), warnings.append, votes())
    disk, write = threading.Event(), directory.write

    def hang(record: Record, _: bool) -> None:
        assert disk.wait(60), "the test has not let the disk go on"
        write(record)

    monkeypatch.setattr(directory, "write", hang)

    async def scenario() -> None:
        keeping = asyncio.ensure_future(keeper.keep(new_membership(OPTIONS.policy()), (7, 8), 1.0))
        while not warnings:  # while the event loop continues
            await asyncio.sleep(0.01)
            assert not keeping.done()
        disk.set()
        await asyncio.wait_for(keeping, 60)

    asyncio.run(scenario())
    assert find_job("j") == keeper.record
    assert keeper.record.ports == (7, 8)
    assert warnings == [f"{directory.path} is not written after 2 s; decisions of the driver wait for the record"]
    directory.remove()
