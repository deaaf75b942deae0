"""The list of Horovod's names in the guide, compared with the package."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import elasticstate.horovod as hvd

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "horovod.md").read_text()
MODULES = {"elastic", "functions", "mpi_ops"}


def listed() -> dict[str, str]:
    """Return the state of each listed name."""
    section = GUIDE.split("## All names")[1].split("\n### ")[0]
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", section, re.MULTILINE)
    return {name: state for names, state in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_guide_lists_all_names_of_the_package_and_no_others() -> None:
    assert set(listed()) == {*hvd.__all__, *MODULES}


def test_each_listed_name_exists() -> None:
    for name in listed():
        if name in MODULES:
            importlib.import_module(f"elasticstate.horovod.{name}")
        else:
            assert hasattr(hvd, name), name


def test_the_guide_says_which_names_do_not_work() -> None:
    assert {name for name, state in listed().items() if state != "same"} == {"Adasum"}
