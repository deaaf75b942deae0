"""A user without a home, on a machine whose root file system is read-only, as in a hardened container."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts need root and unshare")
READ_ONLY = """
for place in / /tmp /var/tmp "$PWD"; do
    [ ! -d $place ] || { mount --bind $place $place && mount -o remount,bind,ro $place; } || exit 9
done
"""
SHARED_MEMORY = "mount -t tmpfs none /dev/shm || exit 9\n"
NO_SHARED_MEMORY = "mount -o remount,bind,ro /dev/shm || exit 9\n"
SCRIPT = """
import os, tempfile, torch, elasticstate
from torch.utils.data import DataLoader

@elasticstate.run
def train(state):
    for batch in DataLoader(list(range(4)), num_workers=1):
        torch.distributed.barrier()
        state.step += 1
        state.commit()
        if elasticstate.generation() == 1 and state.step == 2 and elasticstate.rank() == 1:
            os.kill(os.getpid(), 9)
    print("files in", tempfile.gettempdir(), flush=True)

train(elasticstate.TorchState(model=torch.nn.Linear(1, 1), step=0))
"""


def run(directory: Path, mounts: str, *options: str, script: str = SCRIPT, **variables: str) -> tuple[int, str]:
    """Run a script where only the given mounts can be written to. Return the status of elasticrun, and its output."""
    (directory / "train.py").write_text(script)
    files = ("TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR", "ELASTICSTATE_TEST_SLOW_CALLBACKS")
    unset = ("HOME", "USER", "LOGNAME", *files)
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    begin = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{READ_ONLY}{mounts}exec "$@"', "sh"]
    done = subprocess.run(
        [*begin, sys.executable, "-m", "elasticstate", "-np", "2", *options, sys.executable, "train.py"],
        cwd=directory,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_job_needs_no_more_than_shared_memory(tmp_path: Path) -> None:
    status, output = run(tmp_path, SHARED_MEMORY)
    assert status == 0, output
    assert output.count("files in /dev/shm") == 2, output
    assert "generation 2: 2 workers on 1 host; lost: localhost:1 (SIGKILL)" in output
    assert "import torch anew" not in output


@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_a_directory_for_commits_and_temporary_files_is_enough(tmp_path: Path, variable: str) -> None:
    mounts = f"{NO_SHARED_MEMORY}mount -t tmpfs none /mnt || exit 9\n"
    script = SCRIPT.replace("DataLoader(list(range(4)), num_workers=1)", "range(4)")  # semaphores need shared memory
    status, output = run(tmp_path, mounts, "--commit-dir", "/mnt", script=script, **{variable: "/mnt"})
    assert status == 0, output
    assert output.count("files in /mnt") == 2, output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--commit-dir", "/mnt"), "this user can write to no directory for temporary files: neither to /tmp, "),
        ((), "--commit-dir: '/dev/shm': cannot hold commits: this user cannot create a directory there (Read-only "),
    ],
)
def test_without_any_place_for_files_the_error_says_so(tmp_path: Path, options: tuple[str, ...], error: str) -> None:
    mounts = f"{NO_SHARED_MEMORY}mount -t tmpfs none /mnt || exit 9\n"
    status, output = run(tmp_path, mounts, *options)
    assert (status, output.count("\n")) == (2, 1), output
    assert output.startswith(f"elasticrun: {error}")
