"""Rules for imports between the parts of the package. Imports inside functions count, too; those for types do not."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.kit.sources import PACKAGE, SOURCES, of_each, text_of, tree_of

PURE = {"__future__", "bisect", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math"}
PURE |= {"hashlib", "json", "msgspec", "operator", "re", "signal", "statistics", "string", "types", "typing", "zlib"}
COMMANDS = {"cli", "launching"}
LIBRARIES = {"horovod", "huggingface", "lightning", "local_sgd", "loggers"}  # on public names and extension.py
PLUG_INS = {"kubernetes", "mpi", "ray"}  # tables name them; no other part imports them
PROCESSES = {"agent", "check", "driver", "state", "worker"}
# The processes that a part may know of; by default, a part knows of none, of no command, library or plug-in.
KNOWN = {
    "agent": set[str](),
    "check": set[str](),
    "driver": set[str](),
    "extension": {"state", "worker"},
    "history": COMMANDS,
    "launching": {"driver", "worker"} | COMMANDS,
    "state": set[str](),
    "worker": {"state"},
    "mpi": {"check"},
    "mpi.worker": {"worker"},
}
WITH_TORCH = {"compat", "extension", "mpi.worker", "present_world", "state", "worker", *LIBRARIES}
WITH_SOCKETS = {"replicas", "net", "mpi.broker"}
SOCKETS = {"socket", "socketserver", "ssl", "http", "urllib"}
WITH_ENVIRONMENT = {"options", "mpi.holder"}
ONLY_IN = {  # libraries that an option or a command needs: they are imported only for it
    "aiohttp": {"driver.dashboard.server"},
    "jinja2": {"history.page"},
    "lightning": {"lightning"},
    "matplotlib": {"history.plots"},
    "prometheus_client": {"driver.metrics"},
    "rich": {"cli.export", "cli.status", "driver.painter"},
}


def name(source: Path) -> str:
    """Return the dotted name of a source within the package."""
    return ".".join(source.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def is_in(module: str, parts: set[str]) -> bool:
    return any(module == part or module.startswith(part + ".") for part in parts)


def part_of(module: str) -> str:
    return "mpi.worker" if is_in(module, {"mpi.worker"}) else module.partition(".")[0]


@functools.cache
def imports(source: Path) -> tuple[str, ...]:
    """Return the dotted names that a source imports."""
    return tuple(_imports(source))


def own_imports(source: Path) -> list[str]:
    """Return the imported names of this package, without its name."""
    return [imported.partition(".")[2] for imported in imports(source) if imported.split(".")[0] == "elasticstate"]


def _imports(source: Path) -> Iterator[str]:
    tree = tree_of(source)
    only_for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in only_for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(source)}: a relative import hides what is imported"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@of_each([source for source in SOURCES if name(source).startswith("core")])
def test_the_core_is_pure(source: Path) -> None:
    """No clock, no file, no thread: it imports itself, failures, and modules that compute."""
    for imported in imports(source):
        first, _, rest = imported.partition(".")
        assert first in PURE or (first == "elasticstate" and is_in(rest, {"core", "failures"})), imported


@of_each()
def test_a_part_knows_only_of_the_processes_it_may(source: Path) -> None:
    part = part_of(name(source))
    if part in {"", "__init__", "__main__", *COMMANDS - {"launching"}}:
        return  # these start everything
    foreign = PROCESSES | COMMANDS | LIBRARIES | PLUG_INS | {"extension"}
    known = KNOWN.get(part, set[str]()) | {part, part.partition(".")[0]}
    if part in LIBRARIES:
        known |= {"extension"}
    for imported in own_imports(source):
        assert not is_in(imported, foreign - known), f"imports {imported}"


@of_each([source for source in SOURCES if part_of(name(source)) in LIBRARIES])
def test_a_drop_in_uses_public_names(source: Path) -> None:
    for imported in own_imports(source):
        allowed = {part_of(name(source)), "compat", "errors", "extension"}
        assert "." not in imported or is_in(imported, allowed), f"imports {imported}"


@of_each()
def test_only_the_table_of_backends_names_mpi(source: Path) -> None:
    """Also as a text, for example for importlib."""
    if not is_in(name(source), {*PLUG_INS, "backends"}):
        assert not re.search(r"elasticstate[./]mpi\b", text_of(source))


@of_each()
def test_torch_is_imported_only_where_workers_run(source: Path) -> None:
    if not is_in(name(source), WITH_TORCH):
        assert not [imported for imported in imports(source) if imported.split(".")[0] in {"torch", "numpy"}]


def test_driver_agent_and_command_line_run_without_torch() -> None:
    modules = [
        f"elasticstate.{name(source)}"
        for source in SOURCES
        if source != PACKAGE / "__init__.py" and not is_in(name(source), WITH_TORCH) and source.stem != "__main__"
    ]
    program = (
        f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@of_each()
def test_a_library_that_is_not_always_there_is_imported_only_for_its_purpose(source: Path) -> None:
    for imported in imports(source):
        library = imported.partition(".")[0]
        assert library not in ONLY_IN or is_in(name(source), ONLY_IN[library]), f"imports {imported}"


def test_a_job_that_asks_for_none_of_these_libraries_imports_none() -> None:
    program = "import sys, elasticstate.cli, elasticstate.driver.driver, elasticstate.agent.agent\n"
    program += f"assert not {{*sys.modules}} & {set(ONLY_IN)}, {{*sys.modules}} & {set(ONLY_IN)}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@of_each()
def test_sockets_are_opened_only_in_net_and_replicas(source: Path) -> None:
    if not is_in(name(source), WITH_SOCKETS):
        assert not SOCKETS.intersection(imported.split(".")[0] for imported in imports(source))


@of_each()
def test_the_environment_is_read_only_in_config(source: Path) -> None:
    if is_in(name(source), WITH_ENVIRONMENT):
        return
    nodes = list(ast.walk(tree_of(source)))
    # Writing is allowed: each world sets RANK, WORLD_SIZE, … for the libraries that look there.
    written = {
        id(node.value) for node in nodes if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    }
    written |= {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in {"update", "pop"}}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
            assert id(node) in written, f"line {node.lineno} reads the environment"
