"""The list of Horovod's names in the guide, compared with the package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import elasticstate.horovod as hvd

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "horovod.md").read_text()
MODULES = {"compression", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm"}


def listed() -> dict[str, str]:
    """Return the state of each listed name."""
    section = GUIDE.split("## All names")[1].split("\n### ")[0]
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", section, re.MULTILINE)
    return {name: state for names, state in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_guide_lists_all_names_of_the_package_and_no_others() -> None:
    assert set(listed()) == {*hvd.__all__, *MODULES}


def test_each_listed_name_exists() -> None:
    program = (
        "import sys, elasticstate.horovod as hvd; print([name for name in sys.argv[1:] if not hasattr(hvd, name)])"
    )
    done = subprocess.run([sys.executable, "-c", program, *listed()], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", "a module is there without an import of its own"


def test_the_guide_says_which_names_do_not_work() -> None:
    assert {name for name, state in listed().items() if state != "same"} == {"Adasum"}
