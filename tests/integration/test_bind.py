"""``--bind``: each worker has its own cores, whether it forks from the template process or is a new process."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.kit.job import Job

CORES = os.sched_getaffinity(0)
PROGRAM = """
import os, sys
print("torch" in sys.modules, os.environ["LOCAL_RANK"], sorted(os.sched_getaffinity(0)), flush=True)
"""


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("preload", ["", "off"])
def test_each_worker_is_on_its_own_cores(tmp_path: Path, preload: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Job(
        tmp_path, "-np", "2", "--bind", "cores", "--preload", preload, command=[sys.executable, str(program)]
    ) as job:
        job.finish()
    found = re.findall(rf"{not preload} ([01]) (\[.*\])", job.output)
    first, second = (set(json.loads(cores)) for _, cores in sorted(found))
    assert first | second == CORES
    assert not first & second
