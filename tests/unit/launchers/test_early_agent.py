"""The agent process that starts before the driver needs it."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from elasticstate.launchers import AGENT, agent_process, early_agent
from tests.kit.processes import has_ended


def own_agents() -> list[psutil.Process]:
    """Return the agents among this process's children. While the kernel executes a new program, it has no arguments.

    Orphans of earlier tests that have ended may be among the children, too.
    """
    deadline = time.monotonic() + 30
    while True:
        children = [child for child in psutil.Process().children() if not has_ended(child)]
        commands = [child.cmdline() for child in children]
        if all(commands):
            return [child for child, command in zip(children, commands, strict=True) if AGENT in command]
        assert time.monotonic() < deadline, f"children without arguments: {children}"


def test_the_first_agent_is_the_early_process_and_the_next_one_is_new() -> None:
    with early_agent(True):
        (early,) = own_agents()
        processes = [agent_process(), agent_process()]
        assert [process.pid == early.pid for process in processes] == [True, False]
    for process in processes:
        assert process.poll() is None, "the context has ended a process that somebody took"
        process.kill()
        process.communicate()
    assert not own_agents()


def test_a_process_that_nobody_takes_ends_with_the_context() -> None:
    with early_agent(True):
        assert len(own_agents()) == 1
    assert not own_agents()
    with early_agent(False):
        assert not own_agents()


def test_a_process_without_a_driver_ends_without_a_word() -> None:
    ended = subprocess.run([sys.executable, "-m", AGENT], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")
