"""No other part of the package uses private names of torch, Python or another library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.kit.sources import PACKAGE, SOURCES, of_each, tree_of

OUTSIDE = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] != "compat"]
DOCUMENTED = {"__future__", "os._exit"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> str:
    """Return the dotted name that an expression consists of; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def foreign_names(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a source uses of modules outside the package."""
    modules: set[str] = set()  # names of modules and their members in the source
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not alias.name.startswith("elasticstate"):
                    modules.add(alias.asname or alias.name.split(".")[0])
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("elasticstate"):
            for alias in node.names:
                modules.add(alias.asname or alias.name)
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)).split(".")[0] in modules:
            yield name


@of_each(OUTSIDE)
def test_private_names_of_libraries_are_used_in_compat_alone(source: Path) -> None:
    names = set(foreign_names(tree_of(source)))
    assert {name for name in names - DOCUMENTED if is_private(name)} == set()


def test_private_names_are_found() -> None:
    program = (
        "import torch\nfrom torch.nn import _x\nimport _thread\nfrom asyncio import Handle\ntorch.a._b()\nHandle._run"
    )
    names = {name for name in foreign_names(ast.parse(program)) if is_private(name)}
    assert names == {"torch.nn._x", "_thread", "torch.a._b", "Handle._run"}
