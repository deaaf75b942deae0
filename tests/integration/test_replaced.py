"""Without ``--tick-records``, a worker trains with torch's own attributes."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Job

SCRIPT = str(SCRIPTS / "replaced.py")
OF_EACH_WORLD = {
    # torch has no public hook for the creation of a group, and a group that is being created must be cut, too
    "torch.distributed.distributed_c10d _new_process_group_helper",
    "ProcessGroup split_group",
    "ProcessGroupGloo __init__",  # nor for the address at which a group listens
}


@cache
def of_plain_torch() -> dict[str, str]:
    """Return what the names are in a process without elasticstate."""
    found: dict[str, str] = json.loads(subprocess.check_output([sys.executable, SCRIPT], text=True))
    return found


def replaced(file: Path) -> set[str]:
    """Return the names that differ from those of a process without elasticstate."""
    plain = of_plain_torch()
    found = json.loads(file.read_text())
    assert plain.keys() <= found.keys()
    changed = {name for name, description in plain.items() if found[name] != description}
    return changed | {name for name in found.keys() - plain.keys() if "elasticstate" in found[name]}


@pytest.mark.parametrize("option", ["--tick-records", "--preload=", "--preload=off"])
def test_only_tick_records_replace_attributes_of_torch(tmp_path: Path, option: str) -> None:
    found = tmp_path / "found.json"
    with Job(tmp_path, "-np", "2", option, command=[sys.executable, SCRIPT, str(found)]) as job:
        job.finish(0)
    if option == "--tick-records":
        assert {"torch.Tensor data", "ProcessGroup allreduce", "Work wait"} <= replaced(found)
    else:
        assert replaced(found) <= OF_EACH_WORLD


def test_a_world_of_one_replaces_nothing(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    subprocess.check_call([sys.executable, SCRIPT, str(found)])
    assert not replaced(found)
