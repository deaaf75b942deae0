"""The documentation: the site builds without a warning, its lines are short, and its code blocks work."""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, get_type_hints

import pytest

from docs.hooks.pages import EVENTS_MARK, event_reference
from elasticstate.core import event_file
from elasticstate.options import Options, declarations
from tests.kit.options import parse_options

ROOT = Path(__file__).parents[2]
AT_THE_TOP = (
    "README.md",
    "DESIGN.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "MIGRATION.md",
    "CHANGELOG.md",
    "tests/README.md",
)
PAGES = [*(ROOT / name for name in AT_THE_TOP), *sorted((ROOT / "docs").rglob("*.md"))]
MAX_LINE = 100  # characters, outside tables and code
FENCE = re.compile(r"^( *)```(\w*)\s*$")
LINK = re.compile(r"(?<!!)\[[^][]*(?:\[[^][]*\][^][]*)*\]\(([^()\s]+)\)")


class Block(NamedTuple):
    """One fenced code block of a page."""

    page: Path
    line: int
    language: str
    text: str
    run: str  # file name and arguments, from the comment <!-- run: ... --> before the block

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    begin: tuple[int, str, str] | None = None
    for number, line in enumerate(lines):
        if (fence := FENCE.match(line)) is None:
            continue
        if begin is None:
            mark = re.fullmatch(r"<!-- run: (.+) -->", lines[number - 1]) if number else None
            begin = number, fence[2], mark[1] if mark else ""
        else:
            first, language, run = begin
            indent = len(fence[1])
            yield Block(page, first + 1, language, "\n".join(text[indent:] for text in lines[first + 1 : number]), run)
            begin = None
    assert begin is None, f"{page}: a code block has no end"


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUNNABLE = [block for block in BLOCKS if block.run]


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines outside code blocks and tables."""
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if FENCE.match(line):
            inside = not inside
        elif not inside and not line.lstrip().startswith("|"):
            yield number, line


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    assert find_spec("mkdocs") is not None, "mkdocs is not installed: run make setup"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    options = (tmp_path / "site" / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert 'id="heartbeat-timeout"' in options
    api = (tmp_path / "site" / "reference" / "api.html").read_text(encoding="utf-8")
    assert 'id="elasticstate.run"' in api


def test_no_line_is_too_long() -> None:
    long = [f"{page.relative_to(ROOT)}:{n}" for page in PAGES for n, line in prose(page) if len(line) > MAX_LINE]
    assert not long


def test_links_to_files_of_the_repository_have_a_target() -> None:
    """MkDocs checks the links of the site. Those of the other files are checked here."""
    missing = []
    for name in AT_THE_TOP:
        for number, line in prose(ROOT / name):
            for target in LINK.findall(line):
                path = target.partition("#")[0]
                if path and ":" not in path and not (ROOT / path).exists():
                    missing.append(f"{name}:{number}: {target}")
    assert not missing


def test_python_blocks_compile() -> None:
    for block in BLOCKS:
        if block.language == "python":
            compile(block.text, block.place, "exec")


def test_shell_blocks_have_options_that_elasticrun_accepts() -> None:
    """The commands ``elasticrun -...`` in the pages, except the questions (--check, --reattach)."""
    found = 0
    for block in BLOCKS:
        if block.language != "sh":
            continue
        for command in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(command, comments=True)
            if words[:1] == ["elasticrun"] and words[1].startswith("-") and words[1] not in ("--check", "--reattach"):
                assert parse_options(words[1:]).command, f"{block.place}: {command}"
                found += 1
    assert found


def test_some_blocks_are_run() -> None:
    assert RUNNABLE


@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: block.run)
def test_a_runnable_block_runs(block: Block, tmp_path: Path) -> None:
    name, *arguments = block.run.split()
    script = tmp_path / name
    script.write_text(block.text + "\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{block.place}: {done.stdout}{done.stderr}"


# -------------------------------------------------------------------------------------------- the messages


def test_the_messages_in_troubleshooting_are_those_of_the_program() -> None:
    """Each fixed part of a message there, between two ``…``, occurs in a string of the sources."""
    strings = "\0".join(_strings())
    messages = [block for block in blocks_of(ROOT / "docs" / "troubleshooting.md") if block.language == "text"]
    assert messages
    parts = [(block.place, part) for block in messages for part in " ".join(block.text.split()).split("…")]
    assert not [(place, part) for place, part in parts if part.strip() and part not in strings]


def test_the_times_of_options_on_all_pages_are_the_defaults() -> None:
    """``--x`` (10 s) in the text."""
    fields = {field.name: field.default for field in dataclasses.fields(Options)}
    defaults = {name: fields[field] for field, option in declarations().items() for name in option.names}
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += re.findall(r"`(--[a-z-]+)`\s\((\d[\d.]*) s\)", text)
    assert found
    assert [(name, value) for name, value in found if defaults.get(name) not in (None, float(value))] == []


def test_the_events_page_has_all_events_with_their_fields() -> None:
    """The table is made from the source of the classes."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", event_reference(), re.MULTILINE))
    assert set(rows) == set(event_file.by_name())
    for name, event in event_file.by_name().items():
        fields = [field for field in get_type_hints(event) if field not in get_type_hints(event_file.CommonFields)]
        assert sorted(re.findall(r"(?:^|, )`(\w+)`", rows[name])) == sorted(fields), name
    assert EVENTS_MARK in (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")


@functools.cache
def _strings() -> tuple[str, ...]:
    return tuple(_read_strings())


def _read_strings() -> Iterator[str]:
    """Yield the texts of the package, with ``\\0`` for each inserted value."""
    for path in sorted((ROOT / "elasticstate").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield " ".join(node.value.split())
            elif isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                yield " ".join("".join(map(str, parts)).split())
