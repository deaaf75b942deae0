"""Sizes of the project, for ``make size``: files, lines, options, words, import circles. Nothing enforces them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from elasticstate.options import declarations

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "elasticstate"


def main() -> None:
    sources = sorted(PACKAGE.rglob("*.py"))
    pages = [
        *ROOT.glob("*.md"),
        *(page for part in (".github", "docs", "deploy", "tests") for page in (ROOT / part).rglob("*.md")),
    ]
    decisions = [page for page in (ROOT / "docs" / "decisions").glob("*.md") if page.name != "README.md"]
    modules = circles(imports_of(sources, at_import=True))
    parts = circles(between_parts(imports_of(sources, at_import=False)))
    rows = {
        "Python files of the product": len(sources),
        "lines of Python of the product": sum(len(text(source).splitlines()) for source in sources),
        "options shown by --help": len(options_in_help()),
        "options in all": len(declarations()),
        "words of Markdown": sum(len(text(page).split()) for page in pages),
        "lines of DESIGN.md": len(text(ROOT / "DESIGN.md").splitlines()),
        "decisions": len(decisions),
        "import circles of modules": len(modules),
        "import circles of parts, with imports for types and in functions": len(parts),
    }
    for name, number in rows.items():
        print(f"{number:>7,}  {name}")
    for circle in (*modules, *parts):
        print(f"circle: {', '.join(sorted(circle))}")


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def options_in_help() -> list[str]:
    """Return the declared options that ``elasticrun --help`` shows."""
    command = [sys.executable, "-m", "elasticstate", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    names = set(re.findall(r"(?<![\w-])-[\w-]+", "\n".join(re.findall(r"^  (-.*?)(?:  |$)", shown, re.MULTILINE))))
    return [field for field, option in declarations().items() if names.intersection(option.names)]


# ---------------------------------------------------------------------------------------------------- the imports


def imports_of(sources: Collection[Path], at_import: bool) -> dict[str, set[str]]:
    """Return the modules of the product that each one imports.

    ``at_import``: only imports that run when the module is imported, so none in functions or for type checkers.
    """
    modules = {name_of(source): source for source in sources}
    found = {}
    for name, source in modules.items():
        names = {
            target for node in nodes_of(ast.parse(text(source)), at_import) for target in targets_of(node, modules)
        }
        found[name] = names - {name}
    return found


def name_of(source: Path) -> str:
    return ".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def nodes_of(tree: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if at_import and (for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            continue
        yield node
        yield from nodes_of(node, at_import)


def targets_of(node: ast.AST, modules: Collection[str]) -> Iterator[str]:
    """Yield the modules that an import statement names. ``from package import name`` may name a module, too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if inner in modules:
                yield inner
            elif node.module in modules:
                yield node.module


def between_parts(imports: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """Return the imports between the direct children of the package. Its own public names are no part."""
    found: dict[str, set[str]] = {}
    for name, targets in imports.items():
        if part := part_of(name):
            found.setdefault(part, set()).update(other for other in map(part_of, targets) if other not in ("", part))
    return found


def part_of(name: str) -> str:
    return ([*name.split("."), ""])[1]


def circles(graph: Mapping[str, Collection[str]]) -> list[set[str]]:
    """Return the strongly connected components with two and more nodes (each the nodes that reach each other)."""
    reached = {node: reachable(node, graph) for node in graph}
    found: list[set[str]] = []
    for node in graph:
        circle = {other for other in reached[node] if node in reached.get(other, ())}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def reachable(start: str, graph: Mapping[str, Collection[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for other in graph.get(waiting.pop(), ()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


if __name__ == "__main__":
    main()
