"""All files of a job are private to its user, whatever umask it was started with, and the job works with each umask."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Root may read and write files of any mode. Without these two capabilities, it is like any other user.
LIKE_A_USER = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--"] if os.getuid() == 0 else []
WORKER = """
import os, time
from pathlib import Path
umask = os.umask(0o022)
os.umask(umask)
Path(f"umask-{os.environ['ELASTICSTATE_WORKER'].replace(':', '-')}").write_text(f"{umask:04o}")
while not Path("stop").exists():
    time.sleep(0.01)
print("done")
"""
PROGRAM = """
import sys
from elasticstate.launching import launch
from elasticstate.errors import WorkerFailedError
def f(x):
    return x + 1
try:
    print(launch(f, args=(41,), np=1))
except WorkerFailedError as error:
    sys.exit(f"failed: {error}")
"""


def with_umask(umask: int, *command: str) -> list[str]:
    return [*LIKE_A_USER, "sh", "-c", f'umask {umask:04o}; exec "$@"', "sh", *command]


def made_by_the_job(runtime_directory: Path) -> Iterator[Path]:
    for base in (runtime_directory, *Path("/dev/shm").glob(f"elasticstate-{os.getuid()}-*")):
        if base == runtime_directory:
            yield from base.iterdir()
        elif (base / "job").exists() and str(runtime_directory) in (base / "job").read_text():
            yield base


@pytest.mark.parametrize("umask", [0o000, 0o777], ids=lambda umask: f"{umask:04o}")
def test_a_job_works_and_is_private_under_any_umask(umask: int, tmp_path: Path, runtime_directory: Path) -> None:
    options = ["-np", "2", "-H", "localhost:1,127.0.0.2:1", "--log-dir", "logs", "--events-file", "events"]
    command = [sys.executable, "-m", "elasticstate", *options, sys.executable, "-c", WORKER]
    with subprocess.Popen(with_umask(umask, *command), cwd=tmp_path, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 60
        try:
            while len(list(tmp_path.glob("umask-*"))) < 2 and job.poll() is None:
                assert time.monotonic() < deadline, "no worker has started"
                time.sleep(0.01)
            found = list(made_by_the_job(runtime_directory))
            (tmp_path / "stop").touch()
            assert len(found) == 3, "the directory of the job, and the commits of two hosts"
            for path in found:
                assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
                for inner in path.rglob("*"):
                    assert inner.stat().st_mode & 0o600 == 0o600, f"{inner} cannot be used by its owner"
            _, stderr = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 0, stderr
    # No umask removes the owner's own access. Workers inherit the other bits as the user has set them.
    assert {path.read_text() for path in tmp_path.glob("umask-*")} == {f"{umask & 0o077:04o}"}
    for log in (tmp_path / "logs").iterdir():
        assert stat.S_IMODE(log.stat().st_mode) == 0o666 & ~(umask & 0o077), log
        assert log.read_text().startswith("--- ")


def test_launch_works_under_a_umask_that_takes_all_access_away(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        with_umask(0o777, sys.executable, str(program)), cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "[42]\n"), ended.stderr
