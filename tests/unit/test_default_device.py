"""Tensors of the product do not follow the default device of the user's script."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

import elasticstate

PACKAGE = Path(elasticstate.__file__).parent
FOLLOW = {function.__name__ for function in _device_constructors()}
"""Functions of torch whose results are on the default device, without an argument ``device``."""


def without_device(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FOLLOW:
            is_of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_of_torch and "device" not in {argument.arg for argument in node.keywords}:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


def test_each_new_tensor_says_its_device() -> None:
    assert {"empty", "zeros", "tensor", "as_tensor", "arange"} <= FOLLOW
    assert not [line for path in PACKAGE.rglob("*.py") for line in without_device(path)]
