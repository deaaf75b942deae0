"""The detection of slow callbacks, which is on in all tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import _thread, asyncio, os, signal, subprocess, sys, threading, time
from elasticstate.compat.libraries import start_thread
from loop_watch import watch_loops

def sleeps():  # for so long that what its threads lack of the cores meanwhile explains a part only
    time.sleep(1)

def computes():
    began = time.thread_time()
    while time.thread_time() < began + 0.15:
        pass

def is_quick():
    pass

def starts_a_process():  # which gets no core for a while: it does not begin before it has turned back
    subprocess.Popen(["true"], preexec_fn=lambda: time.sleep(0.3)).wait()

start_new_thread = _thread.start_new_thread

def start_with_much_work(*arguments):
    computes()
    return start_new_thread(*arguments)

_thread.start_new_thread = start_with_much_work

def starts_a_thread():
    start_thread(is_quick)

waitpid = os.waitpid

def wait_with_much_work(*arguments):
    if sys.argv[2] == "reaps":
        computes()
    return waitpid(*arguments)

os.waitpid = wait_with_much_work

def reaps():
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

def waits_for_a_process():
    os.waitpid(os.posix_spawn("/bin/sleep", ["sleep", "1"], {}), 0)

def is_stopped():  # by somebody else, for longer than the limit
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(0.3)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)

def compete(seconds, others=1):  # with processes that leave this one a hundredth of the time
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rivals = []
    for _ in range(others):
        rivals.append(os.fork())
        if rivals[-1] == 0:
            began = time.monotonic()
            while time.monotonic() < began + seconds:
                pass
            os._exit(0)
    os.nice(19)
    return rivals

def has_no_core():
    compete(0.6)
    began, computed = time.monotonic(), time.thread_time()
    while time.thread_time() < computed + 0.02 or time.monotonic() < began + 0.2:
        pass

def has_no_core_between_callbacks():
    compete(2.5, others=4)

def with_a_thread(does):
    begun, is_over = threading.Event(), threading.Event()
    threading.Thread(target=does, args=(begun, is_over)).start()
    begun.wait()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        time.sleep(0)  # without the interpreter's lock
    is_over.set()

def waits_for_a_thread_without_core():
    def compute(begun, is_over):
        (rival,) = compete(30)
        begun.set()
        while not is_over.is_set():
            pass
        os.kill(rival, signal.SIGKILL)
        is_reported.wait()
    with_a_thread(compute)

def waits_for_a_thread_that_sleeps():
    def sleep(begun, is_over):
        time.sleep(1)
        begun.set()
    with_a_thread(sleep)

async def main():
    asyncio.get_running_loop().call_soon(globals()[sys.argv[2]])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    until = time.monotonic() + 2.5
    while sys.argv[2] == "has_no_core_between_callbacks" and time.monotonic() < until:
        await asyncio.sleep(0)

is_reported = threading.Event()
watch_loops(sys.argv[1])
asyncio.run(main())
is_reported.set()
"""


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("sleeps", True),
        ("computes", True),
        ("is_quick", False),
        ("starts_a_process", False),
        ("starts_a_thread", False),
        ("reaps", False),
        ("waits_for_a_process", True),
        ("is_stopped", False),
        ("has_no_core", False),
        ("has_no_core_between_callbacks", False),
        ("waits_for_a_thread_without_core", False),
        ("waits_for_a_thread_that_sleeps", True),
    ],
)
def test_a_callback_is_slow_by_its_own_doing_alone(what: str, found: bool, tmp_path: Path) -> None:
    report = tmp_path / "slow"
    subprocess.run([sys.executable, "-c", PROGRAM, str(report), what], check=True, timeout=60)
    lines = report.read_text().splitlines()
    assert len(lines) == found, lines
    assert all(what in line for line in lines)
