"""The language of the project: retired words in names, first words of docstrings, and the help of options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticstate.config import option_names
from tests.sources import PACKAGE, ROOT, SOURCES, of_each, tree_of

DOCUMENTED = [path for name in ("elasticstate", "tests", "examples") for path in sorted((ROOT / name).rglob("*.py"))]

BAD_BEGINNING = re.compile(r"(Of|Whether|Who|What|How|When)\b")
RETIRED_PARTS = {
    "believe",
    "budget",
    "heard",
    "hear",
    "leaver",
    "leftovers",
    "pulse",
    "room",
    "said",
    "say",
    "seat",
    "seated",
    "steady",
    "takeover",
    "tell",
    "told",
    "unsaid",
}
RETIRED_PHRASES = re.compile(
    r"\b(takes (a|an|no|the|one|at|both)|takes over|taken over|out of (reach|touch)|left alone|had notice|nobody"
    r"|whose memory|without a word|by now|said|told|heard)\b"
)
RETIRED_NAMES = {
    "account",
    "claim",
    "contact",
    "memory",
    "missing",
    "orders",
    "overlap",
    "queue",
    "reach",
    "returns",
    "serving",
    "space",
    "words",
}


def parts(name: str) -> list[str]:
    """Return the words of a name in lower case."""
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower())


def classes_and_functions(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def attributes(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module or a class assigns, and the attributes of ``self``."""
    scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for scope in scopes:
        for statement in scope.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of the module, of its classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the strings that are no docstrings. An f-string yields each of its fixed parts."""
    comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in comments:
            yield node.value


def test_names_are_split_into_words() -> None:
    assert parts("_MpiInstallation") == ["mpi", "installation"]
    assert parts("CUDADevice_of2") == ["cuda", "device", "of2"]


@pytest.mark.parametrize("name", option_names())
def test_the_help_of_an_option_is_made_of_sentences(name: str) -> None:
    text = option_names()[name].help
    assert text[0].isupper()
    assert text.endswith(".")


@of_each()
def test_no_name_has_a_retired_word(source: Path) -> None:
    tree = tree_of(source)
    modules = [part.removesuffix(".py") for part in source.relative_to(PACKAGE).parts]
    nodes = list(classes_and_functions(tree))
    names = [*modules, *(node.name for node in nodes), *attributes(tree)]
    assert [name for name in names if RETIRED_PARTS.intersection(parts(name))] == []
    homes = [*modules, *(node.name for node in nodes if isinstance(node, ast.ClassDef))]
    assert [name for name in homes if name.strip("_").lower() in RETIRED_NAMES] == []


@of_each()
def test_no_text_has_a_retired_phrase(source: Path) -> None:
    tree = tree_of(source)
    assert [text for text in texts(tree) if RETIRED_PHRASES.search(text)] == []


@of_each(DOCUMENTED)
def test_no_docstring_begins_with_a_relative_word(source: Path) -> None:
    tree = tree_of(source)
    assert [text.splitlines()[0] for text in docstrings(tree) if BAD_BEGINNING.match(text.lstrip())] == []


LIBRARIES = {"horovod", "huggingface", "lightning"}


def test_no_two_classes_have_the_same_name() -> None:
    """Exempt: packages for other libraries, which have the names of their libraries."""
    homes: dict[str, list[str]] = {}
    for source in SOURCES:
        for node in tree_of(source).body:
            if isinstance(node, ast.ClassDef) and LIBRARIES.isdisjoint(source.relative_to(PACKAGE).parts):
                homes.setdefault(node.name, []).append(source.relative_to(PACKAGE).as_posix())
    assert not {name: places for name, places in homes.items() if len(places) > 1}
