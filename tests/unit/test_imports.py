"""Allowed imports between the parts of the package (DESIGN.md, Where to look). Imports inside functions count, too."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.sources import PACKAGE, ROOT, SOURCES, of_each, text_of, tree_of

PARTS = {
    "agent",
    "agent_cli",
    "allocation",
    "backends",
    "check",
    "config",
    "cli",
    "commit_header",
    "commits",
    "compat",
    "copies",
    "core",
    "discovery",
    "driver",
    "durable",
    "error_chain",
    "error_file",
    "exit_status",
    "errors",
    "extension",
    "failures",
    "history",
    "horovod",
    "huggingface",
    "kinds",
    "launchers",
    "launching",
    "lightning",
    "log",
    "loggers",
    "machine",
    "net",
    "other_launchers",
    "plug_ins",
    "present_world",
    "private",
    "processes",
    "screen",
    "seals",
    "state",
    "status_cli",
    "terminal",
    "threads",
    "tracebacks",
    "worker",
    "writing",
}

PLUG_INS = {"kubernetes", "mpi", "mpi.worker", "ray"}  # tables name them; no other part may import them

LIBRARIES = {"horovod", "huggingface", "lightning", "loggers"}
COMMANDS = {"agent_cli", "cli", "history", "status_cli"}
ON_TOP = {*LIBRARIES, "extension"}

# The other parts that a part may import. The command line may import all parts except plug-ins.
ALLOWED = {
    "allocation": set[str](),
    "backends": {"plug_ins"},
    "compat": {"_native", "errors", "log"},
    "copies": {"_native", "allocation", "commits", "core", "errors", "net", "private", "seals"},
    "core": {"exit_status"},
    "kubernetes": {"config", "core", "discovery", "errors", "threads"},
    "error_chain": set[str](),
    "error_file": {"error_chain", "tracebacks"},
    "exit_status": set[str](),
    "errors": set[str](),
    "failures": {"exit_status", "terminal"},
    "log": {"terminal"},
    "machine": set[str](),
    "mpi": {"backends", "check", "config", "core", "errors", "exit_status", "log", "net"}
    | {"private", "processes", "threads"},
    "mpi.worker": {"_native", "compat", "config", "errors", "log", "mpi", "net", "private", "worker"},
    "private": set[str](),
    "processes": set[str](),
    "ray": {"compat", "config", "core", "discovery", "errors", "exit_status", "launchers", "net", "threads"},
    "screen": {"config"},
    "seals": set[str](),
    "terminal": set[str](),
    "threads": {"compat"},
    "tracebacks": {"errors"},
    "writing": set[str](),
    "net": {"compat", "config", "core", "errors", "writing"},
    "commit_header": set[str](),
    "commits": {"config", "private", "processes"},
    "kinds": {"backends", "core"},
    "config": {"core", "errors", "kinds"},
    "durable": {"_native", "core", "errors", "machine", "private", "terminal"},
    "driver": PARTS - {"agent", "check", "worker", "state", *COMMANDS, "launching", *ON_TOP},
    "check": PARTS - {"agent", "worker", "state", *COMMANDS, "launching", *ON_TOP},
    "agent": PARTS - {"driver", "check", "worker", "state", *COMMANDS, "launching", *ON_TOP} | {"_native"},
    "present_world": {"config", "core", "errors"},
    "worker": PARTS - {"driver", "agent", "check", *COMMANDS, "launching", *ON_TOP} | {"_native"},
    "state": PARTS - {"driver", "agent", "check", *COMMANDS, "launching", "worker", *ON_TOP} | {"_native"},
    "agent_cli": {"agent", "cli", "config", "errors", "kinds", "machine", "net", "processes", "terminal"},
    "status_cli": {"cli", "config", "driver", "errors", "kinds", "net", "terminal"},
    "cli": PARTS,
    "discovery": {"config", "core", "errors", "exit_status", "kinds", "machine", "plug_ins", "processes", "threads"},
    "launchers": {"config", "errors", "exit_status", "net", "plug_ins", "processes", "threads", "writing"},
    "plug_ins": {"errors"},
    "other_launchers": {"config", "errors", "machine"},
    "launching": PARTS - {"agent", "check", "state", *COMMANDS, *ON_TOP},
    "extension": {"compat", "config", "errors", "state", "worker"},
    "history": {"core", "errors", "exit_status", "private", "terminal"},
    "horovod": {"errors", "extension"},
    "huggingface": {"compat", "errors", "extension"},
    "lightning": {"compat", "errors", "extension"},
    "loggers": {"errors", "extension"},
    "__main__": {"cli"},
}
WITH_TORCH = {"compat", "mpi.worker", "present_world", "worker", "state", *ON_TOP}
BY_PUBLIC_NAMES = LIBRARIES  # written as packages of third parties would be: with the public names and extension.py
WITHOUT_CONFIG = {"elasticstate.mpi.holder"}  # passes its environment on, and imports no module of this package
WITH_SOCKETS = {
    "elasticstate.copies.client",  # these four use threads, and no event loop
    "elasticstate.copies.pusher",
    "elasticstate.copies.server",
    "elasticstate.copies.wire",
    "elasticstate.mpi.relay",  # carries the bytes of a protocol of others
}
SOCKET_MODULES = {"socket", "socketserver", "ssl", "asyncio.streams", "http", "urllib"}


def name(source: Path) -> str:
    return ".".join(source.relative_to(PACKAGE.parent).with_suffix("").parts)


def part(source: Path) -> str:
    return part_of(name(source))


def part_of(module: str) -> str:
    """Return the part of a module, or of a name in a module."""
    words = module.split(".")[1:]
    return ".".join(words[:2]) if ".".join(words[:2]) in PLUG_INS else words[0]


@functools.cache
def imports(source: Path) -> tuple[str, ...]:
    """Return the dotted names that a source imports, except imports for type checkers."""
    return tuple(_imports(source))


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


def test_the_sources_are_found() -> None:
    assert {part(source) for source in SOURCES} >= {"core", "errors", "kinds", "net"}


def test_a_rule_names_each_source_that_breaks_it() -> None:
    @of_each(SOURCES[:3])
    def is_the_second(source: Path) -> None:
        assert source == SOURCES[1]

    with pytest.raises(AssertionError) as raised:
        is_the_second()
    assert [line.split(":")[0] for line in str(raised.value).splitlines() if line.startswith("elasticstate/")] == [
        str(source.relative_to(ROOT)) for source in (SOURCES[0], SOURCES[2])
    ]


@of_each()
def test_a_module_imports_only_the_parts_it_may(source: Path) -> None:
    if part(source) == "__init__":
        return  # the public names of every part, loaded lazily: another test checks that
    assert part(source) in ALLOWED, f"{name(source)}: a new part needs its line in ALLOWED"
    allowed = ALLOWED[part(source)] | {part(source)}
    for imported in imports(source):
        if imported == "elasticstate" and part(source) in BY_PUBLIC_NAMES:
            continue
        assert imported != "elasticstate", f"{name(source)} imports the public names: they hide what it depends on"
        if imported.startswith("elasticstate."):
            assert part_of(imported) in allowed, f"{name(source)} imports {imported}"


@of_each()
def test_only_the_table_of_backends_names_a_plug_in(source: Path) -> None:
    """Also as a text, for example for importlib."""
    if part(source) not in PLUG_INS and part(source) != "backends":
        assert not re.search(r"elasticstate[./]mpi\b", text_of(source))


@of_each()
def test_torch_is_imported_only_where_workers_run(source: Path) -> None:
    if part(source) not in WITH_TORCH:
        assert not [imported for imported in imports(source) if imported.split(".")[0] in {"torch", "numpy"}]


@of_each()
def test_a_library_for_training_is_imported_only_by_its_plug_in(source: Path) -> None:
    if part(source) != "lightning":
        assert not [imported for imported in imports(source) if imported.split(".")[0] == "lightning"]


@of_each()
def test_a_library_for_reports_is_imported_only_for_a_report(source: Path) -> None:
    if name(source).removeprefix("elasticstate.history.") not in ("page", "drawing", "plots", "copy_plots"):
        assert not [imported for imported in imports(source) if imported.split(".")[0] in {"jinja2", "matplotlib"}]


@of_each()
def test_the_library_of_the_metrics_is_imported_only_with_their_option(source: Path) -> None:
    found = {imported for imported in imports(source) if "prometheus_client" in imported}
    users = {imported for imported in imports(source) if imported.startswith("elasticstate.driver.metrics.")}
    assert not found or name(source) == "elasticstate.driver.metrics"
    assert not users or name(source) == "elasticstate.driver.metrics_port"


@of_each()
def test_the_library_for_terminals_is_imported_only_to_show_something_there(source: Path) -> None:
    found = {imported for imported in imports(source) if imported.split(".")[0] == "rich"}
    shown = {"elasticstate.durable.command", "elasticstate.screen.painter", "elasticstate.status_cli"}
    assert not found or name(source) in shown
    users = {imported for imported in imports(source) if imported.startswith("elasticstate.screen.painter.")}
    assert not users or name(source) == "elasticstate.screen.__main__"


@of_each()
def test_the_library_of_the_dashboard_is_imported_only_with_its_option(source: Path) -> None:
    server = "elasticstate.driver.dashboard.server"
    found = {imported for imported in imports(source) if imported.split(".")[0] == "aiohttp"}
    tree = tree_of(source)
    at_once = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    at_once |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert not found or name(source) == server
    assert server not in at_once


def test_driver_agent_and_command_line_run_without_torch() -> None:
    modules = [
        name(source).removesuffix(".__init__")
        for source in SOURCES
        if part(source) not in WITH_TORCH and source.stem != "__main__"
    ]
    program = (
        f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@of_each()
def test_sockets_are_opened_only_in_net(source: Path) -> None:
    if part(source) != "net" and name(source) not in WITH_SOCKETS:
        assert not SOCKET_MODULES.intersection(imported.split(".")[0] for imported in imports(source))


@of_each()
def test_the_environment_is_read_only_in_config(source: Path) -> None:
    if part(source) == "config" or name(source) in WITHOUT_CONFIG:
        return
    nodes = list(ast.walk(tree_of(source)))
    # Writing is allowed: each world sets RANK, WORLD_SIZE, … for the libraries that look there.
    written = {
        id(node.value) for node in nodes if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    }
    written |= {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in {"update", "pop"}}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
            assert id(node) in written, f"{name(source)}:{node.lineno} reads the environment"


@of_each()
def test_a_name_says_what_a_module_is_for(source: Path) -> None:
    assert not {"util", "utils", "common", "helpers"}.intersection(name(source).split("."))
