"""``elasticrun --check``: the real command, with and without the programs and libraries that it looks for."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from elasticstate.errors import OptionError
from elasticstate.mpi.installation import MpiInstallation, require_mpi, search
from tests.kit.processes import has_ended

BESIDE = Path(sys.executable).parent
LIMIT_S = 120  # time limit of these tests; the machine may be busy


@contextmanager
def checking(*argv: str, python: str = sys.executable, before: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*before, python, "-m", "elasticstate", "--check", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def check(*argv: str, python: str = sys.executable, before: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Run the command. Return its exit status, stdout and stderr."""
    with checking(*argv, python=python, before=before) as process:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
        return process.returncode, stdout, stderr


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory for temporary files of the command and its child processes. The fixture checks that no file is left."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(path))  # instead of /dev/shm, which all jobs share
    yield path
    assert list(path.iterdir()) == []


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def look(python: Path | str = sys.executable) -> MpiInstallation:
    return asyncio.run(search(LIMIT_S, python=str(python)))


# ------------------------------------------------------------------------------------------------ available features


def test_all_that_is_here_is_found() -> None:
    status, stdout, stderr = check()
    assert (status, stderr) == (0, "")
    assert stdout.startswith("elasticstate 0")
    for line in (
        f"[X] torch {torch.__version__}",
        "[X] Gloo: an all-reduce in a world of one",
        "[X] mpi4py 4.",
        "[X] Open MPI 5.",
        f"[X] mpirun ({BESIDE}/mpirun), of that library",
        "[X] ULFM: one of two processes was killed",
        "[X] MPI_THREAD_MULTIPLE",
        "[X] ports of 127.0.0.1: can listen",
        "[X] --commit-dir /dev/shm: tmpfs, ",
    ):
        assert f"    {line}" in stdout
    assert "Hosts:" not in stdout
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    assert f"[X] --backend auto: {backend} here" in stdout


def test_what_is_asked_for_and_there_is_no_failure() -> None:
    status, stdout, stderr = check(
        "--backend", "mpi", "-H", "localhost:2,127.0.0.2:2", "-np", "4", "python", "train.py"
    )
    assert (status, stderr) == (0, "")
    assert stdout.endswith("Hosts:\n    [X] localhost: this machine\n    [X] 127.0.0.2: this machine\n")


def test_what_is_asked_for_and_missing_is(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        nowhere = str(tmp_path / "nowhere")
        status, stdout, stderr = check("--listen", address, "--token-file", "t", "--commit-dir", nowhere)
    assert status == 1
    assert (
        f"[ ] --commit-dir {nowhere}: this user cannot create a directory there (No such file or directory): choose "
        "another" in stdout
    )
    assert "of 127.0.0.1: cannot listen (Address already in use" in stdout
    assert stderr.splitlines() == [
        f"elasticrun: --commit-dir: {nowhere!r}: cannot hold commits. Choose another directory.",
        f"elasticrun: --listen: {address!r}: cannot listen there. Give an address of this machine and a free port.",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without CUDA")
def test_nccl_without_cuda_and_a_hostfile_that_is_not_there() -> None:
    status, stdout, stderr = check("--backend", "nccl", "--hostfile", "/nowhere")
    assert status == 1
    assert "[ ] CUDA" in stdout
    assert "[ ] hostfile /nowhere could not be read: No such file or directory" in stdout
    assert sorted(stderr.splitlines()) == [
        "elasticrun: --backend: 'nccl': torch has no NCCL, or sees no CUDA device. See the lines above.",
        "elasticrun: --hostfile: 1 of 1 hosts cannot be used. See the lines above.",
    ]


def test_hosts_that_cannot_be_reached(tmp_path: Path) -> None:
    script = program(tmp_path / "discover", "echo localhost; echo nobody.invalid:2")
    status, stdout, stderr = check("--host-discovery-script", str(script))
    assert status == 1
    assert "    [X] localhost: this machine\n    [ ] nobody.invalid: is unreachable by ssh: " in stdout
    assert stderr == "elasticrun: --host-discovery-script: 1 of 2 hosts cannot be used. See the lines above.\n"


def test_wrong_usage() -> None:
    status, stdout, stderr = check("--np", "2")
    assert (status, stdout) == (2, "")
    assert stderr == "elasticrun: unknown option '--np'. Did you mean -np?\n"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, to mount")
def test_a_small_file_system_is_told_of(tmp_path: Path) -> None:
    place = tmp_path / "shm"
    place.mkdir()
    mount = f'mount -t tmpfs -o size=64m none {place} && exec "$@"'
    status, stdout, stderr = check("--commit-dir", str(place), before=("unshare", "--mount", "sh", "-c", mount, "sh"))
    assert (status, stderr) == (0, "")
    assert f"[X] --commit-dir {place}: tmpfs, 67.1 MB of 67.1 MB free\n        low space: " in stdout


# ------------------------------------------------------------------------------------------------------------ torch


def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    package = tmp_path / "path" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


def test_a_torch_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(tmp_path, monkeypatch, "import ctypes\nctypes.string_at(0)\n")
    status, stdout, stderr = check("--backend", "gloo")
    assert status == 1
    assert "[ ] torch (import torch failed (SIGSEGV): " in stdout
    assert stderr == "elasticrun: --backend: 'gloo': Gloo does not work here. See the lines above.\n"


def test_a_torch_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(tmp_path, monkeypatch, "import threading\nthreading.Event().wait()\n")
    status, stdout, _ = check("--start-timeout", "10")
    assert status == 0
    assert "[ ] torch (import torch takes longer than --start-timeout of 10 s: File " in stdout


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_is_left_after_ctrl_c(
    number: signal.Signals, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while torch hangs, during the check of MPI or after it."""
    begun = tmp_path / "begun"
    text = f"import pathlib, threading\npathlib.Path({str(begun)!r}).touch()\nthreading.Event().wait()\n"
    fake_torch(tmp_path, monkeypatch, text)
    with checking() as process:
        deadline = time.monotonic() + LIMIT_S
        while not begun.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, stderr) == (expected, "")
    assert stdout.endswith("torch:\n")
    assert all(map(has_ended, children))


# -------------------------------------------------------------------------------------------------------------- MPI


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a name for this Python. Its directory contains no mpirun, and PATH leads to none."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return program(tmp_path / "python" / "python", f'exec {sys.executable} "$@"')


def test_the_mpi_of_this_environment() -> None:
    found = look(Path(sys.executable))
    assert (found.mpirun, found.has_ulfm, found.has_thread_multiple) == (str(BESIDE / "mpirun"), True, True)
    assert found.version == found.mpirun_version
    assert Path(found.library).name.startswith("libmpi.so")


def test_an_environment_without_mpi(tmp_path: Path) -> None:
    """An environment with all packages of this one except mpi4py, and with only Python in its bin directory."""
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=LIMIT_S)
    packages = Path(sysconfig.get_path("purelib"))
    for entry in packages.iterdir():
        if not entry.name.startswith("mpi4py"):
            (place / packages.relative_to(sys.prefix) / entry.name).symlink_to(entry)
    status, stdout, stderr = check("--backend", "mpi", python=str(place / "bin" / "python"))
    assert status == 1
    assert "[X] Gloo: an all-reduce in a world of one" in stdout
    problem = "has no mpi4py. Run pip install 'elasticstate[mpi]'.\n"
    assert "[ ] mpi4py: /" in stdout
    assert problem in stdout
    assert stderr.startswith("elasticrun: --backend: 'mpi': /")
    assert stderr.endswith(problem)


def test_an_mpi4py_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "")  # leaves only the search path of the linker
    with pytest.raises(OptionError, match=r"^--backend: 'mpi': mpi4py 4.* cannot load .* LD_LIBRARY_PATH\.$"):
        require_mpi(LIMIT_S)


def test_no_mpirun(elsewhere: Path) -> None:
    found = look(elsewhere)
    assert found.version.startswith("Open MPI 5.")
    assert found.problem.startswith(f"there is no mpirun next to {elsewhere} or on PATH. Run pip install")


def test_the_mpirun_on_path_is_found(elsewhere: Path, tmp_path: Path) -> None:
    program(tmp_path / "bin" / "mpirun", f'exec {BESIDE}/mpirun "$@"')
    found = look(elsewhere)
    assert (found.problem, found.mpirun) == ("", str(tmp_path / "bin" / "mpirun"))


def test_an_mpirun_of_another_build(elsewhere: Path, tmp_path: Path) -> None:
    program(tmp_path / "bin" / "mpirun", "echo 'mpirun (Open MPI) 4.1.6'")
    problem = look(elsewhere).problem
    assert problem.startswith(f"{tmp_path}/bin/mpirun is Open MPI 4.1.6, but mpi4py's library is Open MPI 5.")
    assert "Put the mpirun of that library first on PATH" in problem


def test_an_mpirun_whose_processes_are_worlds_of_their_own(elsewhere: Path, tmp_path: Path) -> None:
    """An mpirun of the right version that does not know the library, like that of another installation."""
    text = f"""case $1 in --version) exec {BESIDE}/mpirun --version;; esac
while [ "$1" != {elsewhere} ]; do shift; done
"$@"; "$@"
"""
    program(tmp_path / "bin" / "mpirun", text)
    problem = look(elsewhere).problem
    assert problem.startswith(f"two processes that {tmp_path}/bin/mpirun started are not a world of two")


def test_an_mpi_without_ulfm(elsewhere: Path, tmp_path: Path) -> None:
    """An mpirun without ULFM: it ends all processes after one has died."""
    program(tmp_path / "bin" / "mpirun", f'case $1 in --with-ft) shift 2;; esac\nexec {BESIDE}/mpirun "$@"')
    found = look(elsewhere)
    assert (found.has_ulfm, found.has_thread_multiple) == (False, True)
    assert found.problem.startswith("Open MPI 5.")
    assert f" of {tmp_path}/bin/mpirun has no ULFM " in found.problem


def test_an_mpirun_that_fails(elsewhere: Path, tmp_path: Path) -> None:
    program(tmp_path / "bin" / "mpirun", "echo no such luck >&2; exit 3")
    assert look(elsewhere).problem == (
        f"{tmp_path}/bin/mpirun does not work: exited with 3: no such luck. Run pip install 'elasticstate[mpi]'."
    )


def test_an_mpi_that_hangs_is_ended(elsewhere: Path, tmp_path: Path) -> None:
    hang = f"exec {sys.executable} -c 'import time; time.sleep(600)'"
    text = f"case $1 in --version) exec {BESIDE}/mpirun --version;; esac\n{hang}"
    program(tmp_path / "bin" / "mpirun", text)
    problem = asyncio.run(search(5, python=str(elsewhere))).problem
    assert "cannot start two processes: timed out after 5 s (--start-timeout). Run pip install" in problem
