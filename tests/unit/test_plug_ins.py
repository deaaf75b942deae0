"""Parts that are named by a text, "module:name", because they are imported only by the jobs that use them."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import elasticstate


def test_each_text_that_names_a_part_of_the_package_names_one() -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    root = Path(elasticstate.__file__).parent
    texts = {
        text for path in root.rglob("*.py") for text in re.findall(r'"(elasticstate[\w.]*:\w+)"', path.read_text())
    }
    assert {"elasticstate.ray:RayLauncher", "elasticstate.kubernetes:Pods"} <= texts
    for text in sorted(texts):
        module, name = text.split(":")
        assert getattr(import_module(module), name), text
