"""The loop of a worker, without a world."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("imported", "printed"), [("import triton", b"freed"), ("", b"")])
def test_objects_of_the_start_are_freed_at_the_end_of_the_process_if_triton_is_there(
    tmp_path: Path, imported: str, printed: bytes
) -> None:
    (tmp_path / "triton.py").write_text("")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{imported}\n{PROGRAM}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert ended.stdout == printed, ended.stderr.decode()
