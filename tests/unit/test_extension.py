"""Extension points for packages on top of elasticstate. The tests of these packages use them all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import elasticstate
from elasticstate import UsageError, extension

PACKAGE = Path(extension.__file__).parent


def test_each_extension_point_is_used_by_a_package_on_top() -> None:
    packages = ("horovod", "huggingface", "lightning", "loggers")
    sources = [path for name in packages for path in (PACKAGE / name).rglob("*.py")] + [PACKAGE / "local_sgd.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    imported = {
        alias.name
        for node in ast.walk(ast.parse(text.replace("from __future__ import annotations\n", "")))
        if isinstance(node, ast.ImportFrom) and node.module == "elasticstate.extension"
        for alias in node.names
    }
    called = {name for name in extension.__all__ if f"extension.{name}(" in text}
    assert imported | called == set(extension.__all__)


def test_all_names_have_a_docstring() -> None:
    assert [name for name in extension.__all__ if not getattr(extension, name).__doc__] == []


def test_ticks_are_counted() -> None:
    state = elasticstate.ObjectState(n=0)
    assert extension.ticks(state) == 0
    state.commit()
    state.check_host_updates()
    assert extension.ticks(state) == 2


def test_processes_of_another_launcher_without_a_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not extension.join_fixed_world()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="there is no OMPI_COMM_WORLD_RANK"):
        extension.join_fixed_world()
