"""The script of ``make check-gpu``: on a simulated device, without a device, and with sections that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "gpu" / "check_gpu.py"
BROKEN = """
import subprocess, sys, time
sys.path.insert(0, {folder!r})
from check_gpu import Section, main

def fails(found, machine, folder):
    "A section that fails."
    found.figure("before", 1)
    print("the last words")
    raise ValueError("of no use")

def hangs(found, machine, folder):
    "A section that hangs, and so does a process of it in another session."
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    found.figure("sleeps", True)
    time.sleep(1000)

def refutes(found, machine, folder):
    "A section that comes to its end."
    found.check("a wrong claim", False)

def holds(found, machine, folder):
    "A section without a fault."
    found.check("a true claim", True)

if __name__ == "__main__":
    sections = (Section(fails, 60), Section(hangs, 1), Section(refutes, 60), Section(holds, 60))
    sys.exit(main(sections, __file__))
"""


def check(script: Path, out: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Run the script. Return its exit status, and its report as JSON and Markdown."""
    variables = {name: value for name, value in os.environ.items() if name != "ELASTICSTATE_TEST_SLOW_CALLBACKS"}
    command = [sys.executable, str(script), "--out", str(out), *options]
    ran = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, timeout=300)
    json_file, markdown = out / "check-gpu.json", out / "check-gpu.md"
    said = json.loads(json_file.read_text()) if json_file.exists() else {"output": ran.stdout}
    return ran.returncode, said, markdown.read_text() if markdown.exists() else ""


@pytest.mark.parametrize("backend", ["nccl", pytest.param("nccl2", marks=pytest.mark.long)])
def test_all_sections_on_a_simulated_device(tmp_path: Path, backend: str) -> None:
    status, said, markdown = check(SCRIPT, tmp_path, "--fake", "--backend", backend)
    assert status == 0, markdown
    assert said["holds"]
    bare = next(section for section in said["sections"] if section["name"] == "bare_torch")
    assert bare["figures"]["2 ranks"]["part 0"] == backend
    assert {section["name"] for section in said["sections"]} >= {"names", "bare_torch", "short_job", "aborts"}
    assert all(section["checks"] for section in said["sections"] if section["name"] != "recovery")
    assert "All holds" in markdown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    status, said, _ = check(SCRIPT, tmp_path)
    assert status == 77
    assert "no GPU" in said["output"]


def test_sections_that_fail_do_not_stop_the_others(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(folder=str(SCRIPT.parent)))
    status, said, markdown = check(script, tmp_path / "out", "--fake")
    assert status == 1
    found = {section["name"]: section for section in said["sections"]}
    assert [section["holds"] for section in said["sections"]] == [False, False, False, True]
    assert found["fails"]["figures"] == {"before": 1}
    assert "ValueError: of no use" in markdown
    assert "the last words" in found["fails"]["tail"]
    assert "not ended within 4 s" in found["hangs"]["why"]
    assert found["hangs"]["figures"] == {"sleeps": True}
    assert found["refutes"]["why"] == "a wrong claim"
    assert (tmp_path / "out" / "check-gpu-logs.tar.gz").stat().st_size
