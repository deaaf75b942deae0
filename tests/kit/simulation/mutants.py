"""Mutants of the core: one line of a function is changed, in the memory of the test alone.

A check that cannot fail proves nothing. Each invariant of the search has a mutant that breaks it.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType
from typing import Any


@contextmanager
def mutated(place: str, old: str, new: str, package: str = "elasticstate.core") -> Iterator[None]:
    """Change ``old`` to ``new`` in a function, ``worlds.choose``, or a method, ``slots._Plan.free_slots``."""
    module_name, _, name = place.partition(".")
    module = import_module(f"{package}.{module_name}")
    owner, _, method = name.rpartition(".")
    holder: Any = getattr(module, owner) if owner else module
    original = vars(holder)[method]
    is_wrapped = not isinstance(original, FunctionType)
    source = textwrap.dedent(inspect.getsource(original.fget if is_wrapped else original))
    assert source.count(old) == 1, f"{place} has {source.count(old)} times {old!r}: the mutant must follow the core"
    names: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), place, "exec"), vars(module), names)
    changed = names[method]
    holders = [holder]
    if not owner:  # other modules have imported it by name
        modules = [known for key, known in sys.modules.items() if key.startswith(package)]
        holders = [known for known in modules if vars(known).get(method) is original]
    for each in holders:
        setattr(each, method, changed)
    try:
        yield
    finally:
        for each in holders:
            setattr(each, method, original)
