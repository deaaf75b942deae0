"""Checks after every test for leftovers: processes, threads, connections, shared memory, directories of jobs."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import tqdm

from tests.kit import forks

# "make test &" in a script ignores SIGINT, and jobs under test would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Imports and the collection of the tests make almost no garbage. Without this, looking for it takes half of their
# time, and later collections examine all that was made here, again and again.
gc.disable()


# torch.fx shows progress with tqdm where that is installed, and tqdm's monitor is a thread that never ends
tqdm.tqdm.monitor_interval = 0

# Threads of OpenMP wait asleep, here and in all processes of the tests: by default they compute while they wait, which
# takes most of the processors from the tests that run at the same time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The same code gets the same tests: the examples depend on the code alone.
hypothesis.settings.register_profile("elasticstate", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("elasticstate")


# Drivers and agents of the tests watch their event loops (startup/sitecustomize.py).
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(forks.STARTUP), os.environ.get("PYTHONPATH", ""))))

# Mark of all processes that the tests of this process start. With -n, each process of pytest-xdist has its own.
os.environ["ELASTICSTATE_TEST_RUN"] = str(os.getpid())

# With -n, the files that take longest come first, so that no process is left alone with one of them at the end: those
# with more than 30 s alone on a machine, or more than 10 s of processor time. Jobs wait: what counts is how long.
# Those on several hosts, which compute most at their start, begin one after the other.
LONGEST = (
    *("zoo", "newcomer_errors", "silence", "examples", "hosts", "structure", "sharded", "launch", "kubernetes"),
    *("sanitized", "huggingface", "template_process", "lightning", "horovod_examples", "contexts"),
    *("other_launchers", "chaos", "horovod_launch", "addresses", "mpi", "ticks", "sharded_faults", "plain"),
    *("horovod_stalls", "durable_shards", "dial_in", "strangers", "horovod", "ends", "global_batch", "commands"),
    *("ray", "check", "durable", "watched_shards", "loggers", "uneven", "slurm", "hangs", "survival", "mpi_hosts"),
    *("check_gpu", "fake_nccl", "web_ports", "samples", "driver_restart", "reference_bugs", "read_only", "sinks"),
    *("torn_commits", "loop_heap", "steady", "trainer_loss", "trainer_resume", "attached_worlds"),
)

_MISSING = re.compile(r"No module named '([^'.]+)|needs (\w+), which is not installed")

_failures_file: Path | None = None
_reports: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    global _failures_file
    if not hasattr(config, "workerinput"):  # with -n, the first process gets the reports of all others
        _failures_file = config.getoption("--failures-file")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-minutes", type=float, default=0.5, help="least time of tests/chaos")
    parser.addoption("--chaos-seed", type=int, default=1, help="what tests/chaos draws its faults from")
    parser.addoption("--schedules", type=int, default=400, help="random schedules of each long simulation")
    parser.addoption("--first-schedule", type=int, default=3100, help="what they are drawn from: rare ones come early")
    parser.addoption("--all-packages", action="store_true", help="a package that is not installed is a failure")
    parser.addoption("--failures-file", type=Path, help="file to which each failed test appends one line")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip files whose optional packages are not installed, as with the extra ``dev`` alone."""
    report = yield
    missing = _MISSING.search(str(report.longrepr)) if report.failed else None
    name = missing and (missing[1] or missing[2])
    if name and name not in ("elasticstate", "tests") and not collector.config.getoption("--all-packages"):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"needs {name}: pip install -e '.[dev-all,mpi]'")
    return report


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, *gc.get_threshold()[1:])  # simulations make many short-lived objects
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {f"test_{name}": rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down each failure at once, so that a run that is cut short names its failures, too."""
    if report.failed and (path := _failures_file):
        reason = getattr(report.longrepr, "reprcrash", None)
        words = " ".join(str(reason.message if reason else report.longrepr).split())
        with path.open("a") as file:
            file.write(f"FAILED {report.nodeid} ({report.when}): {words[:300]}\n")

    if report.when == "call":
        _reports.extend(str(text) for name, text in report.user_properties if name == "report")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for text in _reports:
        terminalreporter.write_line(text)


def contents(path: str) -> bytes:
    """Return the bytes of a file of /proc; b"" if the process has ended."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


# Threads of the kernel, half of the entries of /proc. They are there before the first test, and after the last one.
_KERNEL = {pid for pid in os.listdir("/proc") if pid.isdigit() and not contents(f"/proc/{pid}/cmdline")}


def leftover_processes(lasting: set[int]) -> list[str]:
    """Return the living descendants of this process, and all processes that carry the mark of its jobs.

    ``lasting``: processes that are no leftovers. This runs after each test, and so reads few files of /proc for each
    process of the machine.
    """
    me = os.getpid()
    mark = f"\0ELASTICSTATE_TEST_RUN={me}\0".encode()
    found = set(descendants(me))
    for pid in set(os.listdir("/proc")) - _KERNEL:
        if pid.isdigit() and mark in b"\0" + contents(f"/proc/{pid}/environ"):
            found.add(int(pid))
    alive = (pid for pid in found - {me} - lasting if state(pid) not in "Z")
    return [f"{pid}: {contents(f'/proc/{pid}/cmdline').replace(chr(0).encode(), b' ').decode()}" for pid in alive]


def descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, contents(f"/proc/{pid}/task/{thread}/children").split()):
                yield child
                yield from descendants(child)


def state(pid: int) -> str:
    """Return the state of a process as ps shows it; "" if the process is gone."""
    return contents(f"/proc/{pid}/stat").rpartition(b")")[2][1:2].decode()


def connections() -> set[str]:
    """Return the TCP connections of this process as /proc names them. Gloo keeps listening sockets for later groups."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as copy:
                    copy.getpeername()
                    found |= {name} if copy.family in (socket.AF_INET, socket.AF_INET6) else set()
    return found


def release_groups() -> None:
    """Release the process groups of a test that made them itself: what ``elastic.run`` does after each generation."""
    aliases = sys.modules.get("elasticstate.compat.torch_tensors")
    if aliases is not None:
        aliases.release_works()
    gc.collect()


def leftover_commits(runtime_directory: Path) -> list[str]:
    """Return the commit directories that jobs of this test run left. Each of them names a directory of this run."""
    found = []
    for path in Path("/dev/shm").glob("elasticstate-*"):
        with contextlib.suppress(OSError):
            if str(runtime_directory) in (path / "job").read_text():
                found.append(str(path))
    return found


@pytest.fixture
def schedules(request: pytest.FixtureRequest) -> range:
    """The random schedules of a long simulation, by number."""
    first = int(request.config.getoption("--first-schedule"))
    return range(first, first + int(request.config.getoption("--schedules")))


@pytest.fixture(scope="session")
def runtime_directory() -> Iterator[Path]:
    """Directory for records and sockets of the jobs of this test run. The kernel limits its path to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="es-") as name:
        os.environ["XDG_RUNTIME_DIR"] = name
        yield Path(name)


@pytest.fixture(scope="session")
def slow_callbacks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File in which drivers and agents of this test run record the callbacks that blocked their event loops."""
    path = tmp_path_factory.mktemp("loops") / "slow-callbacks"
    path.touch()
    os.environ["ELASTICSTATE_TEST_SLOW_CALLBACKS"] = str(path)
    return path


@pytest.fixture(autouse=True)
def _no_event_loop_is_held_up(slow_callbacks_file: Path) -> Iterator[None]:
    """Fail if a callback computed or blocked for 100 ms. Delays by other load do not count (kit/startup/loop_watch.py).

    Callbacks during the fixtures of a module count, too, for its first test.
    """
    yield
    found = slow_callbacks_file.read_text()
    if found:
        os.truncate(slow_callbacks_file, 0)
        pytest.fail(f"an event loop was held up:\n{found}")


@pytest.fixture(scope="session")
def lasting_processes() -> set[int]:
    """Processes that fixtures of a module or of the session have started. They are no leftovers of a test."""
    return set()


@pytest.fixture(scope="session", autouse=True)
def _forks(lasting_processes: set[int]) -> Iterator[None]:
    """Let tests fork processes from one that has imported torch."""
    with forks.template_in_use(lasting_processes):
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(runtime_directory: Path, lasting_processes: set[int]) -> Iterator[None]:
    threads, connected = set(threading.enumerate()), connections()
    yield
    deadline = time.monotonic() + 10
    if connections() - connected:
        release_groups()
    while True:
        found = leftover_processes(lasting_processes)
        found += [f"thread {t.name}" for t in set(threading.enumerate()) - threads]
        found += connections() - connected
        found += map(str, runtime_directory.iterdir())
        found += leftover_commits(runtime_directory)
        if not found:
            return
        if time.monotonic() > deadline:
            for path in runtime_directory.iterdir():  # else each later test of this process waits for it, and fails
                shutil.rmtree(path, ignore_errors=True)
            pytest.fail("left behind: " + "; ".join(found))
        time.sleep(0.02)
