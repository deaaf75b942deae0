"""``elasticrun`` on a pseudo-terminal, whose bytes a terminal emulator replays: real driver, agents and signals."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import psutil

from tests.kit.elasticrun import running
from tests.kit.terminal import Terminal

JOB = [sys.executable, "-m", "elasticstate", "-np", "1"]


BAR = r"""
import pathlib, sys, time
def wait(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.005)
print("a line", flush=True)
wait("shown")  # stdout and stderr are two pipes, in no order
sys.stderr.write("\r  1/10 \u2588 \r  2/10 \u2588\u2588 \r")
sys.stderr.flush()
wait("go")
print("above", flush=True)
sys.stderr.write("\r 10/10 \u2588\u2588\u2588\n")
"""


def test_the_line_is_below_all_output_and_a_bar_stays_whole(tmp_path: Path) -> None:
    with Terminal(tmp_path, *JOB, "--", sys.executable, "-c", BAR) as terminal:
        bar = "  2/10 ██"
        terminal.until(lambda: "a line" in terminal.rows, "a line")
        (tmp_path / "shown").touch()
        terminal.until(lambda: bool(terminal.lines()) and bar in terminal.rows, "the bar and the line")
        assert terminal.rows[-2:] == [bar, terminal.lines()[0]]
        assert "a line" in terminal.rows
        fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 30, 0, 0))
        terminal.process.send_signal(signal.SIGWINCH)
        before = terminal.lines()
        terminal.until(lambda: terminal.lines() not in ([], before), "another line")
        terminal.until(lambda: len(terminal.lines()[0] if terminal.lines() else "x" * 99) < 30, "a narrow line")
        (tmp_path / "go").touch()
        terminal.read_to_the_end()
        assert terminal.process.wait() == 0
    assert not terminal.lines()
    text = "\n".join(terminal.rows)
    assert " 10/10 ███" in text
    assert re.search(r"^above", text, re.MULTILINE)
    assert terminal.rows[-1].startswith("elasticrun: job live-")
    assert terminal.screen.cursor.x == 0


def test_a_dumb_terminal_gets_what_a_pipe_gets(tmp_path: Path) -> None:
    command = [*JOB, "--", "sh", "-c", "echo one; echo two >&2"]
    with Terminal(tmp_path, *command, TERM="dumb") as terminal:
        terminal.read_to_the_end()
        assert terminal.process.wait() == 0
    piped = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "ELASTICSTATE_JOB_NAME": f"live-{os.getpid()}", "TERM": "xterm"},
        timeout=60,
    )
    shown = terminal.bytes.replace(b"\r\n", b"\n")
    assert b"\x1b" not in shown + piped.stdout
    assert sorted(_timeless(shown)) == sorted(_timeless(piped.stdout.replace(b"[localhost:0] ", b"")))  # no order
    assert b"[localhost:0] one\n" in piped.stdout


def _timeless(output: bytes) -> list[bytes]:
    return re.sub(rb"\d+\.\d s", b"0.0 s", output).splitlines()


def test_a_pipe_has_no_process_for_a_terminal(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "1", "sleep", "100") as job:
        job.wait_for("worker_started")
        children = [" ".join(child.cmdline()) for child in psutil.Process(job.process.pid).children()]
        assert len(children) == 1
        assert "elasticstate.agent" in children[0]
        job.process.terminate()
        assert job.end()[0] == 143


def test_ctrl_z_fg_and_ctrl_c_leave_a_clean_terminal(tmp_path: Path) -> None:
    shell = f"{' '.join(JOB)} -- sleep 100; echo STOPPED; read x; fg > /dev/null; echo ended $?"
    with Terminal(tmp_path, "bash", "-mc", shell) as terminal:
        terminal.until(lambda: bool(terminal.lines()), "the line")
        terminal.keys(b"\x1a")
        terminal.until(lambda: "STOPPED" in terminal.rows, "the prompt of the shell")
        assert not terminal.lines()
        terminal.keys(b"\n")
        terminal.until(lambda: bool(terminal.lines()), "the line again")
        terminal.keys(b"\x03")
        terminal.read_to_the_end()
    assert not terminal.lines()
    assert terminal.rows[-1] == "ended 130", terminal.rows


def test_a_killed_driver_leaves_no_line_and_the_output_of_its_agents(tmp_path: Path) -> None:
    script = "touch here; until test -e go; do sleep 0.05; done; echo after"
    command = [*JOB, "--driver-timeout", "2", "--stop-timeout", "0.5", "--", "sh", "-c", script]
    with Terminal(tmp_path, *command) as terminal:
        terminal.until(lambda: bool(terminal.lines()) and (tmp_path / "here").exists(), "the line, and a worker")
        terminal.process.kill()
        terminal.process.wait()
        (tmp_path / "go").touch()
        terminal.read_to_the_end()
    assert not terminal.lines()
    assert "after" in terminal.rows


def test_a_terminal_that_nobody_reads_delays_nothing_but_output(tmp_path: Path) -> None:
    events = tmp_path / "events"
    noisy = "for _ in range(3000): print('x' * 99)"
    options = ["--events-file", str(events), "--log-dir", "logs", "--stop-timeout", "0.5"]
    with Terminal(tmp_path, *JOB, *options, "--", sys.executable, "-c", noisy) as terminal:
        terminal.process.wait(60)
        assert terminal.process.returncode == 0
        assert '"job_finished"' in events.read_text()
        terminal.read_to_the_end()
    assert (tmp_path / "logs" / "localhost-0.out").read_text().count("x" * 99) == 3000


TRAINS = """
import time, torch, elasticstate as elastic
state = elastic.TorchState(model=torch.nn.Linear(2, 2), step=0)
@elastic.run
def train(state):
    while True:
        time.sleep(0.05)
        state.step += 1
        if elastic.rank() == 0:
            print(f"step {state.step}", end="\\r", flush=True)
        state.commit()
train(state)
"""
FULL = r"generation 1 · 2 workers on 1 host · tick [\d,]+ · [\d.]+ ticks/s · commit \d+\.\d s ago · goodput [\d.]+%"


def test_the_line_has_the_world_its_ticks_and_the_newest_commit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    command = [sys.executable, "-m", "elasticstate", "-np", "2", "train.py"]
    with Terminal(tmp_path, *command) as terminal:
        terminal.until(lambda: any(re.fullmatch(FULL, line) for line in terminal.lines()), "all parts of the line")
        assert re.match(r"\[localhost:0\] step \d+", terminal.rows[-2])
        terminal.keys(b"\x03")
        terminal.read_to_the_end()
        assert terminal.process.wait(60) == 130
    assert not terminal.lines()
    assert "was stopped by SIGINT" in "\n".join(terminal.rows)
