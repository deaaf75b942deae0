"""A person debugs a worker: ``breakpoint()`` at a terminal, by real keys on a pseudo-terminal."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from tests.kit import forks
from tests.kit.terminal import Terminal

ELASTICRUN = [sys.executable, "-m", "elasticstate"]

TRAINS = """
import sys, torch, elasticstate as elastic
state = elastic.TorchState(model=torch.nn.Linear(2, 2), step=0)
stops = [3, 4]
@elastic.run
def train(state):
    while state.step < 6:
        torch.distributed.all_reduce(torch.ones(1))
        state.step += 1
        if state.step in stops and elastic.rank() == RANK:
            stops.clear()
            breakpoint()
        state.commit()
    print(f"rank {elastic.rank()} of {elastic.size()} ends at", state.step, "in a terminal" * sys.stdin.isatty())
train(state)
"""


def write(directory: Path, rank: int = 0, text: str = TRAINS) -> str:
    (directory / "train.py").write_text(text.replace("RANK", str(rank)))
    return "train.py"


def prompt(terminal: Terminal, number: int = 1, of: bytes = b"(Pdb) ") -> None:
    """Wait for a prompt. Lines of elasticrun may follow it."""
    terminal.until(lambda: terminal.bytes.count(of) >= number, f"prompt {number}")


def talk(terminal: Terminal) -> str:
    """Look at a value, and go on to the end of the job. Return all that the terminal has shown."""
    prompt(terminal)
    terminal.keys(b"p state.step * 1111\n")
    prompt(terminal, 2)
    assert "3333" in terminal.rows, "\n".join(terminal.rows)
    terminal.keys(b"c\n")
    terminal.read_to_the_end()
    text = "\n".join(terminal.rows)
    assert terminal.process.wait(30) == 0, text
    return text


@pytest.mark.parametrize("options", [(), ("--preload", "json"), ("--preload", "off")], ids=" ".join)
def test_breakpoint_works_in_a_single_worker(tmp_path: Path, options: tuple[str, ...]) -> None:
    with Terminal(tmp_path, *ELASTICRUN, "-np", "1", *options, sys.executable, write(tmp_path)) as terminal:
        text = talk(terminal)
    assert "rank 0 of 1 ends at 6 in a terminal" in text
    assert "[localhost:0]" not in text


@pytest.mark.parametrize(
    "command",
    ["python -c 'breakpoint()'", "-m talks", "./talks.sh", "python -m talks"],
)
def test_commands_that_read_the_terminal(tmp_path: Path, command: str) -> None:
    (tmp_path / "talks.py").write_text("x = 1\nbreakpoint()\nprint(input('name? '))\n")
    (tmp_path / "talks.sh").write_text(f"#!/bin/sh\n{sys.executable} talks.py\n")
    (tmp_path / "talks.sh").chmod(0o755)
    with Terminal(tmp_path, *ELASTICRUN, "-np", "1", *shlex.split(command)) as terminal:
        prompt(terminal)
        terminal.keys(b"p 2 * 1111\n")
        prompt(terminal, 2)
        assert "2222" in terminal.rows
        terminal.keys(b"c\n")
        if "-c" not in command:
            prompt(terminal, of=b"name? ")
            terminal.keys(b"Ada\n")
        terminal.read_to_the_end()
        assert terminal.process.wait(30) == 0, terminal.rows
    assert "-c" in command or terminal.rows.count("Ada") == 1


SAYS = """
import os, threading, time
def say():
    while not os.path.exists("say"):
        time.sleep(0.02)
    print("hello")
if os.environ["ELASTICSTATE_WORKER"].startswith("localhost:0"):
    threading.Thread(target=say, daemon=True).start()
"""


def test_one_rank_of_several_has_the_terminal(tmp_path: Path) -> None:
    """Other lines stand before its prompt, and Ctrl-Z does not give the terminal to a second reader."""
    options = ("-np", "3", "--debug-rank", "1", "--stop-timeout", "5")
    with Terminal(tmp_path, *ELASTICRUN, *options, write(tmp_path, rank=1, text=SAYS + TRAINS)) as terminal:
        prompt(terminal)
        (tmp_path / "say").touch()
        line = b"\n[localhost:0] hello\r\n(Pdb) "
        terminal.until(lambda: line in terminal.bytes, "the other rank's line, and the prompt again")
        terminal.keys(b"\x1a")
        terminal.until(lambda: "no stop while a worker reads the terminal" in "".join(terminal.rows), "a refusal")
        asked = terminal.bytes.count(b"(Pdb) ")
        terminal.keys(b"p state.step * 1111\n")
        prompt(terminal, asked + 1)
        assert "3333" in terminal.rows, "\n".join(terminal.rows)
        terminal.keys(b"c\n")
        terminal.read_to_the_end()
        text = "\n".join(terminal.rows)
        assert terminal.process.wait(30) == 0, text
    assert "rank 1 of 3 ends at 6 in a terminal" in text.splitlines()
    assert "[localhost:1] " not in text
    assert "[localhost:0] rank 0 of 3 ends at 6" in text
    assert "[localhost:2] rank 2 of 3 ends at 6" in text
    assert "--debug-rank 1: localhost:1#1 reads the terminal" in text


def test_a_person_takes_longer_than_all_limits(tmp_path: Path) -> None:
    """Also limits that were given, with --debug-rank: they are for jobs that nobody watches."""
    limits = ("--hang-timeout", "1", "--collective-timeout", "1", "--regroup-timeout", "1", "--stall-check-time", "1")
    events = ("--events-file", "events")
    options = ("-np", "2", "--debug-rank", "0", "--heartbeat-timeout", "2", *limits, *events)
    with Terminal(tmp_path, *ELASTICRUN, *options, write(tmp_path)) as terminal:
        prompt(terminal)
        time.sleep(5)
        talk(terminal)
    names = [json.loads(line)["event"] for line in (tmp_path / "events").read_text().splitlines()]
    assert names.count("world_formed") == 1
    assert not {"hang", "stall", "no_tick", "straggler", "waiting", "worker_unresponsive", "end"} & {*names}


def test_a_single_worker_that_waits_for_keys_does_not_hang(tmp_path: Path) -> None:
    options = ("-np", "1", "--hang-timeout", "1", "--start-timeout", "600")
    with Terminal(tmp_path, *ELASTICRUN, *options, write(tmp_path)) as terminal:
        prompt(terminal)
        time.sleep(4)
        assert "rank 0 of 1 ends at 6" in talk(terminal)


@pytest.mark.parametrize("options", [("-np", "1"), ("-np", "2", "--debug-rank", "0")], ids=" ".join)
def test_ctrl_c_in_the_debugger_ends_all(tmp_path: Path, options: tuple[str, ...]) -> None:
    with Terminal(tmp_path, *ELASTICRUN, *options, write(tmp_path)) as terminal:
        before = termios.tcgetattr(terminal.master)
        prompt(terminal)
        children = psutil.Process(terminal.process.pid).children(recursive=True)
        terminal.keys(b"\x03")
        terminal.read_to_the_end()
        assert terminal.process.wait(30) == 130
        assert termios.tcgetattr(terminal.master) == before
    assert not psutil.wait_procs(children, 10)[1]


def test_a_worker_that_is_restarted_gets_the_terminal_again(tmp_path: Path) -> None:
    with Terminal(tmp_path, *ELASTICRUN, "-np", "2", "--debug-rank", "1", write(tmp_path, rank=1)) as terminal:
        prompt(terminal)
        terminal.keys(b"import os; os.kill(os.getpid(), 9)\n")
        prompt(terminal, 2)
        terminal.keys(b"p elastic.size() * 1111\n")
        prompt(terminal, 3)
        assert "2222" in terminal.rows
        terminal.keys(b"c\n")
        terminal.read_to_the_end()
        assert terminal.process.wait(30) == 0, terminal.rows


def test_a_job_in_the_background_neither_stops_nor_reads(tmp_path: Path) -> None:
    job = f"{' '.join(ELASTICRUN)} -np 1 python -c 'print(repr(open(0).read()))'"
    with Terminal(tmp_path, "bash", "-mc", f"{job} & wait $!; echo ended $?; read x; echo got $x") as terminal:
        terminal.until(lambda: "ended 0" in terminal.rows, "the end of the job")
        assert "[localhost:0] ''" in terminal.rows
        terminal.keys(b"it\n")
        terminal.read_to_the_end()
    assert "got it" in terminal.rows


def test_a_terminal_without_echo_is_set_right(tmp_path: Path) -> None:
    program = (
        "import termios as t; m = t.tcgetattr(0); m[3] &= ~t.ECHO; t.tcsetattr(0, t.TCSANOW, m); input('secret? ')"
    )
    with Terminal(tmp_path, *ELASTICRUN, "-np", "1", "python", "-c", program) as terminal:
        before = termios.tcgetattr(terminal.master)
        prompt(terminal, of=b"secret? ")
        assert termios.tcgetattr(terminal.master) != before
        os.kill(terminal.process.pid, signal.SIGTERM)
        terminal.read_to_the_end()
        assert termios.tcgetattr(terminal.master) == before


def run(directory: Path, *arguments: str, stdin: str | None = "") -> tuple[int, str, str]:
    """Run elasticrun with a pipe as stdin, or with /dev/null. Return its exit status, stdout and stderr."""
    if stdin is None:
        job = forks.elasticrun(arguments, directory)
    else:
        reading, writing = os.pipe()
        os.write(writing, stdin.encode())
        os.close(writing)
        job = forks.elasticrun(arguments, directory, stdin=reading)
        os.close(reading)
    stdout, stderr = job.communicate(timeout=60)
    return job.returncode, stdout, stderr


@pytest.mark.parametrize("preload", [(), ("--preload", "off")], ids=" ".join)
def test_a_pipe_is_the_stdin_of_a_single_worker(tmp_path: Path, preload: tuple[str, ...]) -> None:
    (tmp_path / "t.py").write_text("import sys\nprint(input('? '), sys.stdin.read().split(), flush=True)\n")
    status, stdout, stderr = run(tmp_path, "-np", "1", *preload, "t.py", stdin="one\ntwo\nthree\n")
    assert status == 0, stderr
    assert stdout == "[localhost:0] ? one ['two', 'three']\n"


@pytest.mark.parametrize(
    ("options", "stdin"), [(("-np", "1"), None), (("-np", "2"), "c\n")], ids=["/dev/null", "two workers"]
)
def test_breakpoint_without_a_terminal_says_what_to_do(
    tmp_path: Path, options: tuple[str, ...], stdin: str | None
) -> None:
    status, _, stderr = run(tmp_path, *options, write(tmp_path, text="breakpoint()\n"), stdin=stdin)
    assert status == 3
    assert "This worker has no terminal." in stderr
    assert "--debug-rank" in stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-np", "2", "--debug-rank", "2"), "--debug-rank: 2: must be less than -np, which is 2"),
        (("-np", "2", "--debug-rank", "0"), "--debug-rank: 0: stdin is /dev/null. Run elasticrun in the foreground"),
        (("-np", "2", "--debug-rank", "0", "--listen", "127.0.0.1:0", "--token-file", "t"), "exclude each other"),
    ],
)
def test_a_rank_that_cannot_have_the_terminal_is_refused(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    status, _, stderr = run(tmp_path, *options, "true", stdin=None)
    assert status == 2
    assert words in stderr
