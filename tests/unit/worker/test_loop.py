"""The loop of a worker, without a world."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os

from elasticstate.worker import loop


class InCycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        os.write(1, b"freed")


kept = InCycle()
loop._freeze_memory()
del kept
"""


def test_objects_of_the_start_are_freed_at_the_end_of_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=60, check=True)
    assert ended.stdout == b"freed", ended.stderr.decode()
