"""The live line of a job that trains, on a pseudo-terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.kit.terminal import Terminal

SCRIPT = """
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
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "elasticstate", "-np", "2", "train.py"]
    with Terminal(tmp_path, *command) as terminal:
        terminal.until(lambda: any(re.fullmatch(FULL, line) for line in terminal.lines()), "all parts of the line")
        assert re.match(r"\[localhost:0\] step \d+", terminal.rows[-2])
        terminal.keys(b"\x03")
        terminal.read_to_the_end()
        assert terminal.process.wait(60) == 130
    assert not terminal.lines()
    assert "was stopped by SIGINT" in "\n".join(terminal.rows)
