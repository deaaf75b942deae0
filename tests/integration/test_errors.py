"""Whatever a worker ends by is printed last, as the root cause: the cause, and not what followed from it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job import SCRIPTS, Job

OPTIONS = ("-np", "2", "--min-np", "2", "--failure-grace", "0.5", "--max-no-progress", "1")
MEMORY = Path("/sys/fs/cgroup/memory")  # version 1; where there is version 2 alone: /sys/fs/cgroup


def last_words(folder: Path, *command: str, hosts: str = "localhost:2", within: tuple[str, ...] = ()) -> str:
    """What is printed from the root cause on, by a job that fails."""
    with Job(folder, *OPTIONS, "-H", hosts, command=list(command), within=within) as job:
        job.finish(1, timeout=120)
        return job.output[job.output.rindex("elasticrun: root cause: ") :]


def script(what: str) -> tuple[str, ...]:
    return sys.executable, str(SCRIPTS / "errors.py"), what


@pytest.mark.parametrize(
    ("what", "how", "last"),
    [
        ("raise", "localhost:1#1 had an error of its own", "ValueError: of rank 1 alone"),
        ("segv", "localhost:1#1 was killed by SIGSEGV", ""),
        ("exit", "localhost:1#1 exited with 3", ""),
        ("unpicklable", "localhost:1#1 had an error of its own", "Unpicklable: with a lock"),
        ("record", "exited with 1", "ValueError: of a script without run"),
        ("torch", "exited with 1", "ValueError: that torch wrote down"),
        ("import", "exited with 1", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_the_error_of_one_worker_is_the_root_cause(tmp_path: Path, what: str, how: str, last: str) -> None:
    said = last_words(tmp_path, *script(what))
    assert how in said.splitlines()[0]
    assert said.splitlines()[-1].endswith(last)
    assert "closed by peer" not in said, "what the others got from it"
    if what == "segv":
        assert "Fatal Python error: Segmentation fault" in said
        assert "in fail" in said


def test_a_binary_that_fails_has_the_end_of_its_stderr(tmp_path: Path) -> None:
    said = last_words(tmp_path, "sh", "-c", "echo 'no such dataset' >&2; exit 5")
    assert "exited with 5" in said.splitlines()[0]
    assert said.splitlines()[-1] == "elasticrun:   no such dataset"


def test_of_two_hosts_that_fail_together_the_first_is_named(tmp_path: Path) -> None:
    said = last_words(tmp_path, *script("both"), hosts="localhost:1,127.0.0.2:1")
    assert said.splitlines()[0].endswith("127.0.0.2:0#1 exited with 1")
    assert said.splitlines()[-1].endswith("ValueError: of rank 1")


@pytest.fixture
def small_memory() -> Iterator[str]:
    """A memory cgroup of 1.5 GB: the file to which a process writes its id to be in it."""
    group = MEMORY / f"elasticstate-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made here: {error}")
    (group / "memory.limit_in_bytes").write_text(str(1500 << 20))
    yield str(group / "cgroup.procs")
    group.rmdir()


def test_an_oom_kill_is_told_from_other_kills(tmp_path: Path, small_memory: str) -> None:
    enter = ("sh", "-c", f'echo $$ > {small_memory}; exec "$@"', "sh")
    said = last_words(tmp_path, *script("hog"), within=enter)
    assert "localhost:1#1 was killed by SIGKILL" in said.splitlines()[0]
    assert said.splitlines()[-1].endswith("out of memory: its memory cgroup has counted 1 OOM kill(s) meanwhile")
