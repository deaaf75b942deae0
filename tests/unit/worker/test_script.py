"""The end of a process whose command worker/script.py runs: with the script's exit code, and in a limited time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import atexit, os, sys, threading

file = open(sys.argv[1], "w")
file.write("kept")
atexit.register(print, "exit function")


class Stuck:
    def __del__(self, wait=threading.Event().wait):
        wait()


print("script")
{more}
"""

LONELY = """
import torch, torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
read, write = os.pipe()
if os.fork() == 0:
    os.closerange(0, 3)
    os.close(write)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", store.port), rank=1, world_size=2)
    dist.barrier()
    os.read(read, 1)  # the parent has ended
    os._exit(0)
dist.init_process_group("gloo", store=store, rank=0, world_size=2)
dist.barrier()
dist.all_reduce(torch.ones(3), async_op=True)
sys.exit(4)
"""


@pytest.fixture(autouse=True)
def _last_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICSTATE_TEST_LAST_COLLECTION", "1")  # see kit/startup/sitecustomize.py


def run(directory: Path, more: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the script with short limits. Return its end, and what is in its file."""
    path = directory / "script.py"
    path.write_text(SCRIPT.format(more=textwrap.dedent(more)))
    limits = "script._LONGEST_END_S, script._STACKS_S = 2, 0.5"
    code = f"import sys; from elasticstate.worker import script; {limits}; script.run([sys.executable, *sys.argv[1:]])"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path), str(directory / "file")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ended, (directory / "file").read_text()


def test_an_interpreter_that_does_not_end_is_ended_with_the_scripts_exit_code_and_its_stacks(tmp_path: Path) -> None:
    ended, file = run(tmp_path, "stuck = Stuck()\nsys.exit(3)")
    assert ended.returncode == 3
    assert ended.stdout == "script\nexit function\n"
    assert "in __del__" in ended.stderr, "faulthandler has written the stacks"
    assert ended.stderr.endswith("It ends now, with the script's exit code 3.\n")
    assert file in {"", "kept"}, "the interpreter closes files while it finalizes"


def test_a_collective_that_does_not_end_is_not_awaited_for_ever(tmp_path: Path) -> None:
    ended, file = run(tmp_path, LONELY)
    assert ended.returncode == 4
    assert ended.stdout.endswith("script\nexit function\n")
    assert "in rest" in ended.stderr, "faulthandler has written the stacks"
    assert ended.stderr.endswith("It ends now, with the script's exit code 4.\n")
    assert file == "kept"


def test_an_exit_without_trouble_says_nothing(tmp_path: Path) -> None:
    ended, file = run(tmp_path, "sys.exit(5)")
    assert (ended.returncode, ended.stdout, ended.stderr, file) == (5, "script\nexit function\n", "", "kept")
