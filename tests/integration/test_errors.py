"""The root cause is printed last and raised by ``launch()``: the error that ended a worker, not its consequences."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import elasticstate as elastic
from elasticstate.failures import WorkerFailure
from tests.kit import forks
from tests.kit.forks import SCRIPTS

OPTIONS: dict[str, Any] = {"np": 2, "reset_limit": 0}
MEMORY = Path("/sys/fs/cgroup/memory")  # cgroup version 1; with version 2 only, the directory is /sys/fs/cgroup
Fails = Callable[..., tuple[elastic.WorkerFailedError, list[str]]]


class Launched(forks.Forked):
    """The elasticrun of ``launch()``, which forks instead of importing everything anew. In place of a ``Popen``."""

    def __init__(self, command: list[str], *, stdin: int, stdout: int | None, stderr: int | None, **_: object) -> None:
        assert (stdin, command[0]) == (subprocess.PIPE, sys.executable)
        read, write = os.pipe()
        descriptors = (read, 1 if stdout is None else stdout, 2 if stderr is None else stderr)
        try:
            super().__init__(forks.template().fork(command[1:], forks.environment(), descriptors, agents=2).pid)
        finally:
            os.close(read)
        self.stdin = os.fdopen(write, "wb")


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Launch a job that fails. Return the exception, and the printed lines from the root cause on."""
    starts = types.SimpleNamespace(**{**vars(subprocess), "Popen": Launched})
    monkeypatch.setattr("elasticstate.launching.subprocess", starts)

    def launch(what: Any, hosts: str = "localhost:2") -> tuple[elastic.WorkerFailedError, list[str]]:
        with pytest.raises(elastic.WorkerFailedError) as caught:
            elastic.launch(what, hosts=hosts, **OPTIONS)
        printed = capsys.readouterr().err
        said = printed[printed.rindex("elasticrun: root cause: ") :].splitlines()
        assert [line.removeprefix("elasticrun: ") for line in said] == f"root cause: {caught.value}".splitlines()
        return caught.value, said

    return launch


def script(what: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "errors.py"), what]


def slot_ids(failures: tuple[WorkerFailure, ...]) -> set[tuple[str | None, int | None]]:
    return {(failure.host, failure.slot) for failure in failures}


# The worker reports its error before its process ends, and others detect the error before or after that.
CONFIRMED = r"localhost:1#1 (failed with its own error|exited with 1)$"


@pytest.mark.parametrize(
    ("what", "how", "last"),
    [
        ("raise", CONFIRMED, "ValueError: of rank 1 alone"),
        ("segv", "localhost:1#1 was killed by SIGSEGV", ""),
        ("exit", "localhost:1#1 exited with 3", ""),
        ("unpicklable", CONFIRMED, "Unpicklable: with a lock"),
        ("record", "exited with 1", "ValueError: of a script without run"),
        ("torch", "exited with 1", "ValueError: that torch wrote down"),
        ("import", "exited with 1", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("mesh", "exited with 1", "See MIGRATION.md, 'From torchrun'."),
        ("no-run", "exited with 1", "and pass this state to the function."),
    ],
)
def test_the_error_of_one_worker_is_the_root_cause(fails: Fails, what: str, how: str, last: str) -> None:
    raised, said = fails(script(what))
    assert re.search(how, said[0])
    assert said[-1].endswith(last)
    assert "closed by peer" not in "".join(said), "what the others got from it"
    cause = raised.root_cause
    assert (cause.host, cause.slot) in slot_ids(raised.failures)
    if what in {"raise", "segv", "exit", "unpicklable"}:
        assert (cause.slot, cause.rank, cause.generation) == (1, 1, 1)
    if what == "segv":
        assert cause.signal == signal.SIGSEGV
        assert "Fatal Python error: Segmentation fault" in cause.error
        assert "in fail" in cause.error
    else:
        assert cause.exit_code == (3 if what == "exit" else 1) or "failed with its own error" in cause.reason
        assert cause.error.rstrip().endswith(last)


def test_a_binary_that_fails_has_the_end_of_its_stderr(fails: Fails) -> None:
    raised, said = fails(["sh", "-c", "echo 'no such dataset' >&2; exit 5"])
    assert "exited with 5" in said[0]
    assert said[-1] == "elasticrun:   no such dataset"
    assert (raised.root_cause.exit_code, raised.root_cause.error) == (5, "no such dataset")


def test_a_function_that_fails_is_told_with_its_exception(fails: Fails) -> None:
    def broken() -> None:
        raise LookupError("no such dataset")

    raised, said = fails(broken)
    assert said[-1] == "elasticrun:   LookupError: no such dataset"
    assert "in broken" in raised.root_cause.error


def test_of_two_hosts_that_fail_together_the_first_is_named(fails: Fails) -> None:
    raised, said = fails(script("both"), hosts="localhost:1,127.0.0.2:1")
    assert said[0].endswith("127.0.0.2:0#1 exited with 1")
    assert said[-1].endswith("ValueError: of rank 1")
    assert raised.root_cause.host == "127.0.0.2"
    assert slot_ids(raised.failures) == {("localhost", 0), ("127.0.0.2", 0)}
    times = {failure.host: failure.time_ns for failure in raised.failures}
    assert 0 < times["localhost"] - times["127.0.0.2"] < 300_000_000, "the later one's process has ended first"


def test_of_two_workers_the_first_to_end_is_named_although_its_output_comes_late(fails: Fails) -> None:
    """A process that outlives rank 1 holds its output open until rank 0 has ended, too."""
    program = (
        "import os, signal, subprocess, time\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "ids = [torch.tensor(0) for _ in range(2)]\n"
        "dist.all_gather(ids, torch.tensor(os.getpid()))\n"
        "first, second = (f'/proc/{int(ids[rank])}' for rank in (1, 0))\n"
        "if dist.get_rank() == 1:\n"
        "    subprocess.Popen(['sh', '-c', f'while [ -e {second} ]; do sleep 0.02; done'], start_new_session=True)\n"
        "    dist.barrier()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.barrier()\n"
        "while os.path.exists(first):\n"
        "    time.sleep(0.01)\n"
        "raise ValueError('of rank 0')\n"
    )
    raised, said = fails([sys.executable, "-c", program])
    assert said[0].endswith("localhost:1#1 was killed by SIGKILL")
    assert (raised.root_cause.rank, raised.root_cause.signal) == (1, signal.SIGKILL)


@pytest.fixture
def small_memory() -> Iterator[str]:
    """Memory cgroup of 1.5 GB. Yields the file to which a process writes its id to enter the group."""
    group = MEMORY / f"elasticstate-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made here: {error}")
    (group / "memory.limit_in_bytes").write_text(str(1500 << 20))
    yield str(group / "cgroup.procs")
    group.rmdir()


def test_an_oom_kill_is_told_from_other_kills(small_memory: str) -> None:
    program = (
        "import dataclasses, elasticstate as elastic, json, sys\n"
        f"try:\n    elastic.launch({script('hog')}, hosts='localhost:2', **{OPTIONS})\n"
        "except elastic.WorkerFailedError as error:\n    print(json.dumps(dataclasses.asdict(error.root_cause)))\n"
    )
    enter = ["sh", "-c", f'echo $$ > {small_memory}; exec "$@"', "sh"]
    done = subprocess.run([*enter, sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    cause = json.loads(done.stdout.splitlines()[-1])
    oom_kill = "out of memory: its memory cgroup counted 1 OOM kill(s) while the worker ran"
    assert cause["reason"].endswith("localhost:1#1 was killed by SIGKILL")
    assert cause["signal"] == signal.SIGKILL
    assert cause["error"].splitlines()[-1] == oom_kill
    assert oom_kill in done.stderr.splitlines()[-1]
