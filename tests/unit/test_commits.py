"""The commit directory: its owner, and the processes that may remove it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elasticstate.commits import (
    CommitDirectory,
    owner_of,
    refuse,
    remove_dead,
    remove_job,
)
from elasticstate.driver.record import JobDirectory

JOB = "c0ffee"
PATIENCE_S = 5.0
KEEP_S = 300.0


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> JobDirectory:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = JobDirectory("a")
    directory.write_id(JOB)
    return directory


@pytest.fixture
def base(tmp_path: Path) -> str:
    (tmp_path / "commits").mkdir()
    return str(tmp_path / "commits")


def die(directory: CommitDirectory) -> None:
    """Unlock the directory, as the kernel does when an agent dies."""
    os.close(directory.fd)


def make_page(directory: CommitDirectory, slot: int) -> None:
    fd = directory.open_file(f"{slot}.control", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"page")
    os.close(fd)


def outdate(directory: CommitDirectory) -> None:
    """Let the time pass until which the directory is kept."""
    path = directory.path / "job"
    kept_until = path.stat().st_mtime
    assert time.time() + KEEP_S - 60 < kept_until <= time.time() + KEEP_S
    os.utime(path, (kept_until, kept_until - KEEP_S - 1))


def end(job: JobDirectory) -> None:
    """Unlock the job directory, as when the driver and all agents die."""
    os.close(job._lock)
    os.close(job._driver_lock)


def test_each_job_host_and_slot_has_an_owner_of_its_own() -> None:
    slot_ids = [(JOB, "h", 0), (JOB, "h", 1), (JOB, "i", 0), ("c0ffe0", "h", 0)]
    owners = {owner_of(*slot_id) for slot_id in slot_ids}
    assert len(owners) == 4
    assert {len(owner) for owner in owners} == {16}


def test_only_this_user_may_look_into_it(base: str, job: JobDirectory) -> None:
    directory = CommitDirectory(base, JOB, "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    assert directory.path.parent == Path(base)
    assert directory.path.name == f"elasticstate-{os.getuid()}-{JOB}-h"
    assert directory.path.stat().st_mode & 0o777 == 0o700
    make_page(directory, 3)
    assert (directory.path / "3.control").stat().st_mode & 0o777 == 0o600
    assert directory.slots() == [3]
    directory.remove()
    assert not directory.path.exists()


def test_an_agent_after_another_finds_what_was_there(base: str, job: JobDirectory) -> None:
    first = CommitDirectory(base, JOB, "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    make_page(first, 0)
    die(first)
    second = CommitDirectory(base, JOB, "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    assert (second.path / "0.control").read_bytes() == b"page"
    second.remove()


def test_two_agents_never_have_it(base: str, job: JobDirectory) -> None:
    first = CommitDirectory(base, JOB, "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    with pytest.raises(TimeoutError, match="another agent has"):
        CommitDirectory(base, JOB, "h", str(job.path), "/socket", 0.05, KEEP_S)
    first.remove()


def test_a_directory_that_others_may_read_is_left_alone_and_another_name_taken(base: str, job: JobDirectory) -> None:
    planted = Path(base, f"elasticstate-{os.getuid()}-{JOB}-h")
    planted.mkdir()
    planted.chmod(0o755)
    directory = CommitDirectory(base, JOB, "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    assert directory.path.name == planted.name + "~1"
    make_page(directory, 0)
    assert not list(planted.iterdir())
    planted.rmdir()
    die(directory)
    again = CommitDirectory(base, JOB, "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    assert again.path == directory.path, "what is there counts, whatever name it has"
    again.remove()


def test_what_dead_jobs_have_left_is_removed_and_nothing_of_living_ones(base: str, job: JobDirectory) -> None:
    other = JobDirectory("b")
    other.write_id("beef")
    dead = CommitDirectory(base, "beef", "h", str(other.path), "/socket", PATIENCE_S, KEEP_S)
    living = CommitDirectory(base, JOB, "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    replaced = CommitDirectory(base, JOB, "i", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    Path(base, "elasticstate-of-somebody").mkdir(mode=0o700)
    Path(base, "file").touch()
    assert remove_dead(base) == []
    die(dead)
    die(replaced)
    outdate(dead)
    outdate(replaced)
    assert remove_dead(base) == [], "the job of an agent that died lives on"
    end(other)
    assert other.path.exists()
    assert remove_dead(base) == [str(dead.path)]
    assert not other.path.exists(), "and its job's directory with it"
    assert job.path.exists()
    assert {path.name for path in Path(base).iterdir()} == {
        living.path.name,
        replaced.path.name,
        "elasticstate-of-somebody",
        "file",
    }
    end(job)
    assert remove_dead(base) == [str(replaced.path)], "its agent still has the other one"
    living.remove()


def test_what_has_just_died_is_kept_for_who_starts_it_again(base: str, job: JobDirectory) -> None:
    page = Path(base, f"elasticstate-{os.getuid()}-{JOB}-h", "0.control")
    directory = CommitDirectory(base, JOB, "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    make_page(directory, 0)
    outdate(directory)
    directory.keep()
    die(directory)
    end(job)
    assert remove_dead(base) == []
    assert page.exists()
    assert (job.path / "id").read_text() == JOB, "and what the next driver goes by is there, too"
    again = CommitDirectory(base, JOB, "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    assert page.exists()
    die(again)
    outdate(again)
    assert remove_dead(base) == [str(page.parent)]
    assert not job.path.exists()


def test_what_has_just_died_is_kept_where_its_agent_had_a_directory_of_its_own(base: str, tmp_path: Path) -> None:
    directory = CommitDirectory(base, JOB, "h", str(tmp_path / "gone"), "/socket", PATIENCE_S, KEEP_S)
    die(directory)
    assert remove_dead(base) == []
    outdate(directory)
    assert remove_dead(base) == [str(directory.path)]


def test_a_job_of_the_same_name_does_not_keep_a_dead_one(base: str, job: JobDirectory) -> None:
    left = CommitDirectory(base, JOB, "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    die(left)
    end(job)
    again = JobDirectory("a")
    again.write_id("beef")
    assert again.path == job.path
    assert remove_dead(base) == [str(left.path)]
    again.remove()
    assert remove_dead(base) == []


def test_the_driver_removes_what_killed_agents_of_its_job_have_left(base: str, job: JobDirectory) -> None:
    killed, living = (CommitDirectory(base, JOB, host, str(job.path), "/socket", PATIENCE_S, KEEP_S) for host in "hi")
    other = CommitDirectory(base, JOB + "0", "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
    die(killed)
    die(other)
    remove_job(base, JOB)
    assert {path.name for path in Path(base).iterdir()} == {living.path.name, other.path.name}
    living.remove()


def test_whoever_loses_the_race_against_a_removal_makes_it_anew(base: str, job: JobDirectory) -> None:
    stop = threading.Event()

    def remove_again_and_again() -> None:
        while not stop.is_set():
            remove_job(base, JOB)

    thread = threading.Thread(target=remove_again_and_again)
    thread.start()
    try:
        for _ in range(200):
            directory = CommitDirectory(base, JOB, "h", str(job.path), "/socket", PATIENCE_S, KEEP_S)
            make_page(directory, 0)
            assert Path(directory.path, "0.control").exists()
            directory.remove()
    finally:
        stop.set()
        thread.join()


def test_what_cannot_be_a_commit_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refuse(str(tmp_path)) == ""
    assert refuse(str(tmp_path / "none")) == "this user cannot create a directory there (No such file or directory)"
    assert refuse(str(tmp_path / "file")) == "this user cannot create a directory there (Not a directory)"
    assert refuse("/proc").startswith("this user cannot create a directory there")
    assert not list(tmp_path.glob("elasticstate-*"))


MAKES = """
import sys, threading
from elasticstate.commits import make_agent_directory, remove_agent_directories

base, is_over = sys.argv[1], threading.Event()

def remove():
    while not is_over.is_set():
        remove_agent_directories(base)

removing = [threading.Thread(target=remove) for _ in range(2)]
for thread in removing:
    thread.start()
try:
    for _ in range(500):
        print(make_agent_directory(base))
finally:
    is_over.set()
"""


def test_a_new_directory_of_an_agent_survives_the_removal_of_stale_ones(tmp_path: Path) -> None:
    """Another agent may remove a new directory before it is locked; then the agent makes another one."""
    program = [sys.executable, "-c", MAKES, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(set(done.stdout.split())) == 500
