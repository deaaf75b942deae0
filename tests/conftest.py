"""What every test leaves behind is looked at: processes, threads, shared memory, temporary directories of jobs."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # "make test &" in a script: jobs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The same tests on the same code: examples follow from the code alone.
hypothesis.settings.register_profile("elasticstate", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("elasticstate")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-minutes", type=float, default=3.0, help="how long tests/chaos goes on")
    parser.addoption("--chaos-seed", type=int, default=1, help="what tests/chaos draws its faults from")


def leftover_processes() -> list[str]:
    """Our descendants, and whoever carries the mark of a job that this test process has started."""
    me = psutil.Process()
    found = {p.pid: p for p in me.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("ELASTICSTATE_TEST_RUN") == str(me.pid) and process.pid != me.pid:
                found[process.pid] = process
    described = []
    for process in found.values():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                described.append(f"{process.pid}: {' '.join(process.cmdline())}")
    return described


def leftover_commits(runtime_directory: Path) -> list[str]:
    """What jobs of this test run have left in shared memory: theirs name a directory of this run."""
    found = []
    for path in Path("/dev/shm").glob("elasticstate-*"):
        with contextlib.suppress(OSError):
            if str(runtime_directory) in (path / "job").read_text():
                found.append(str(path))
    return found


@pytest.fixture(scope="session")
def runtime_directory() -> Iterator[Path]:
    """Where the jobs of this test run keep their records and sockets: short, for the kernel takes 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="es-") as name:
        os.environ["XDG_RUNTIME_DIR"] = name
        yield Path(name)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(runtime_directory: Path) -> Iterator[None]:
    os.environ["ELASTICSTATE_TEST_RUN"] = str(os.getpid())
    threads = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10
    while True:
        found = leftover_processes()
        found += [f"thread {t.name}" for t in set(threading.enumerate()) - threads]
        found += map(str, runtime_directory.iterdir())
        found += leftover_commits(runtime_directory)
        if not found:
            return
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(found))
        time.sleep(0.02)
