"""``launch()`` from a script, from ``python -`` and from the kernel of a notebook, with all ends of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import elasticstate as elastic

# A function that is hard to pickle: it uses a class, a closure and a decorated function. Rank 1 is killed in its first
# world; the others continue.
PROGRAM = """
import json, os, signal
import elasticstate as elastic

class Box:
    def __init__(self, *values):
        self.values = values

@elastic.run
def train(state, box):
    import torch, torch.distributed as dist
    while state.step < 30:
        total = torch.ones(1)
        dist.all_reduce(total)
        state.step += 1
        state.commit()
        if state.step == 10 and elastic.rank() == 1 and elastic.generation() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return Box(elastic.rank(), elastic.size(), box.values)

def main(box, *, step):
    return train(elastic.ObjectState(step=step), box)

results = elastic.launch(main, (Box(5),), {"step": 3}, np=3, min_np=1, join_window=60)
assert all(type(box) is Box for box in results), results
print(json.dumps([box.values for box in results]))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_results_come_by_rank_of_the_last_world() -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=PROGRAM, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) in (2, 3), "another one may have come in time"
    assert results == [[rank, len(results), [5]] for rank in range(len(results))]
    assert "lost: localhost:1 (SIGKILL)" in done.stderr
    assert "Warning" not in done.stderr


def test_results_of_any_size_come_from_each_host() -> None:
    def large() -> bytes:
        name = os.environ["ELASTICSTATE_WORKER"]
        return name.encode() * 300_000

    results = elastic.launch(large, np=3, hosts=["localhost:1", "127.0.0.2:2"], preload="off")
    names = ["localhost:0:1", "127.0.0.2:0:1", "127.0.0.2:1:1"]
    assert results == [name.encode() * 300_000 for name in names]


def test_a_command_has_arguments_and_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert elastic.launch(["sh", "-c", 'echo "$0 $1"'], ("a", 1), np=2) == [None, None]
    assert sorted(capsys.readouterr().out.splitlines()) == ["[localhost:0] a 1", "[localhost:1] a 1"]


def test_what_cannot_be_pickled_back_is_the_workers_error() -> None:
    with pytest.raises(elastic.WorkerFailedError, match="the result is a frame that cannot be pickled"):
        elastic.launch(lambda: sys._getframe(), np=1, reset_limit=0, preload="off")


def test_only_some_ranks_are_shown_and_files_get_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        import sys

        import elasticstate as elastic

        @elastic.run
        def train(state: elastic.ObjectState) -> None:
            print(f"rank {elastic.rank()} trains")
            print(f"rank {elastic.rank()} warns", file=sys.stderr)

        print("starts")
        train(elastic.ObjectState())

    elastic.launch(talk, np=3, only_ranks="0,2", tee=1, log_dir=tmp_path)
    shown = capsys.readouterr()
    expected = [f"[localhost:{rank}] {line}" for rank in (0, 2) for line in ("starts", f"rank {rank} trains")]
    assert sorted(shown.out.splitlines()) == sorted(expected)
    assert "warns" not in shown.err
    for rank in range(3):
        assert (tmp_path / f"localhost-{rank}.out").read_text().splitlines()[1:] == ["starts", f"rank {rank} trains"]
        assert f"rank {rank} warns" in (tmp_path / f"localhost-{rank}.err").read_text()


# --------------------------------------------------------------------------------------------------------------- ends

WAITS = """
import elasticstate as elastic

@elastic.run
def train(state):
    import os, time, torch, torch.distributed as dist
    while True:
        is_over = torch.tensor([int(os.path.exists(STOP))])
        dist.broadcast(is_over, 0)  # all stop at the same step
        if is_over:
            return state.step >= 5
        state.step += 1
        state.commit()
        if state.step == 5:
            open(STARTED, "a").write(f"{os.getpid()}\\n")
        time.sleep(0.01)

print(elastic.launch(lambda: train(elastic.ObjectState(step=0)), np=2))
"""


class Launched:
    """A script that has launched a job whose two workers train until the stop file exists."""

    def __init__(self, directory: Path) -> None:
        self.started, self.stop = directory / "started", directory / "stop"
        program = f"STARTED, STOP = {str(self.started)!r}, {str(self.stop)!r}\n{WAITS}"
        script = directory / "script.py"
        script.write_text(program)
        self.output = directory / "output"
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(script)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment(), "TMPDIR": str(self.temporary)},
            )

    def workers(self) -> list[int]:
        return [int(line) for line in self.started.read_text().split()] if self.started.exists() else []

    def wait_for(self, what: str, condition: Callable[[], object], timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"no {what}:\n{self.output.read_text()}"
            time.sleep(0.01)

    def driver(self) -> int:
        (driver,) = psutil.Process(self.process.pid).children()
        return int(driver.pid)

    def finish(self) -> int:
        return self.process.wait(60)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    job = Launched(tmp_path)
    try:
        job.wait_for("two workers", lambda: len(job.workers()) == 2)
        yield job
    finally:
        job.process.kill()
        job.process.wait()


def test_ctrl_c_ends_all_and_is_raised(launched: Launched) -> None:
    assert len(list(launched.temporary.glob("elasticstate-launch-*"))) == 1
    launched.process.send_signal(signal.SIGINT)
    assert launched.finish() == -signal.SIGINT
    said = launched.output.read_text()
    assert "SIGINT: stopping the workers" in said
    assert said.rstrip().endswith("KeyboardInterrupt")
    launched.wait_for("end of the workers", lambda: not any(map(psutil.pid_exists, launched.workers())))


def test_a_job_ends_with_its_caller(launched: Launched) -> None:
    launched.process.kill()
    assert launched.finish() == -signal.SIGKILL
    launched.wait_for("end of the workers", lambda: not any(map(psutil.pid_exists, launched.workers())))
    launched.wait_for("end of elasticrun", lambda: "was stopped by SIGTERM" in launched.output.read_text())
    launched.wait_for("end of its files", lambda: not list(launched.temporary.glob("elasticstate-launch-*")))


def test_an_elasticrun_that_is_killed_is_replaced(launched: Launched) -> None:
    os.kill(launched.driver(), signal.SIGKILL)
    launched.wait_for("another driver", lambda: "driver 2 reattached" in launched.output.read_text())
    launched.stop.touch()
    assert launched.finish() == 0, launched.output.read_text()
    said = launched.output.read_text()
    assert "ended: SIGKILL. Another one starts and reattaches to the workers." in said
    assert "[True, True]" in said
    assert len(launched.workers()) == 2, "nobody was started anew"


# ---------------------------------------------------------------------------------------------------------- notebook


class Kernel:
    """A real kernel of a notebook, used with the protocol of notebooks."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, code: str, interrupt: Callable[[str], bool] = lambda text: False) -> tuple[str, str]:
        """Run a cell; interrupt it once ``interrupt(output)`` is true. Return its output and its exception's name."""
        asked = self._client.execute(code)
        printed, error, interrupted = "", "", False
        while True:
            message = self._client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            printed += content["text"] if kind == "stream" else ""
            error = content["ename"] if kind == "error" else error
            if kind == "status" and content["execution_state"] == "idle":
                return printed, error
            if not interrupted and interrupt(printed):
                interrupted = True
                self._client.parent.interrupt_kernel()


@contextmanager
def kernel(directory: Path) -> Iterator[Kernel]:
    from jupyter_client.manager import KernelManager

    manager = KernelManager(connection_file=str(directory / "kernel.json"))
    manager.start_kernel(env={**environment(), "IPYTHONDIR": str(directory)})
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def test_a_notebook_launches_functions_of_its_cells_shows_what_they_print_and_may_be_interrupted(
    tmp_path: Path,
) -> None:
    with kernel(tmp_path) as cells:
        cells.run("import elasticstate as elastic, os, time")
        cells.run("def f(n):\n    print('worker', n)\n    return n + 1")
        printed, error = cells.run("print(elastic.launch(f, (41,), np=2))")
        assert not error, printed
        assert printed.splitlines()[-1] == "[42, 42]"
        assert "[localhost:0] worker 41" in printed
        assert "elasticrun: job " in printed
        endless = "elastic.launch(lambda: (print('up', os.getpid(), flush=True), time.sleep(600)), np=1, preload='off')"
        printed, error = cells.run(endless, interrupt=lambda text: "] up " in text)
        assert error == "KeyboardInterrupt", printed
        assert "SIGINT: stopping the workers" in printed
        assert json.loads(cells.run("print(elastic.launch(f, (1,), np=1, preload='off'))")[0].splitlines()[-1]) == [2]
