"""The health checks in deploy/health, as an agent runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HEALTH = Path(__file__).parents[2] / "deploy" / "health"


def run(name: str, *arguments: str, path: str = os.defpath) -> tuple[int, str]:
    answer = subprocess.run(
        [sys.executable, HEALTH / name, *arguments], capture_output=True, text=True, env={"PATH": path}
    )
    return answer.returncode, (answer.stdout + answer.stderr).strip()


def nvidia_smi(directory: Path, ecc: str = "0", failure: str = "No") -> str:
    """Write a program that prints what the real one prints for two GPUs, both in use. Return the directory."""
    program = directory / "nvidia-smi"
    program.write_text(
        f"""#!/bin/sh
case "$1" in
  *=index,*) echo "0, GPU-a, 100, 81559"; echo "1, GPU-b, 100, 81559";;
  *ecc*) echo "00000000:01:00.0, 0"; echo "00000000:02:00.0, {ecc}";;
  *retired*) echo "00000000:01:00.0, [N/A]"; echo "00000000:02:00.0, [N/A]";;
  *remapped*) echo "00000000:01:00.0, {failure}"; echo "00000000:02:00.0, No";;
  *compute-apps*) echo "GPU-a, 7"; echo "GPU-b, 8";;
  *) exit 2;;
esac
"""
    )
    program.chmod(0o755)
    return f"{directory}:{os.defpath}"


def test_this_machine_is_well_and_the_last_line_names_all_faults(tmp_path: Path) -> None:
    assert run("cpu.py", "--directory", str(tmp_path)) == (0, "processors, shared memory and disk are well")
    assert not list(tmp_path.iterdir())
    status, said = run("cpu.py", "--shared", "1000000000", "--directory", str(tmp_path / "gone"))
    assert status == 1
    assert said.startswith("/dev/shm has ")
    assert said.endswith(f"; {tmp_path}/gone: cannot write a file: No such file or directory")


def test_the_counters_of_gpus_are_read_as_nvidia_smi_prints_them(tmp_path: Path) -> None:
    assert run("gpu.py", path=str(tmp_path)) == (1, "nvidia-smi is not installed")
    assert run("gpu.py", path=nvidia_smi(tmp_path)) == (0, "all GPUs are well")
    assert run("gpu.py", path=nvidia_smi(tmp_path, ecc="2", failure="Yes")) == (
        1,
        "GPU 00000000:02:00.0: uncorrectable memory errors (2); GPU 00000000:01:00.0: a remap of rows has failed (Yes)",
    )
