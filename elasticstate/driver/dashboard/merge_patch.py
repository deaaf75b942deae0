"""JSON merge patches (RFC 7396): the difference between two views of a job."""

from __future__ import annotations

from typing import Any

View = dict[str, Any]
"""Nested dicts with texts, numbers and lists, and without None: in a patch, None removes a key."""


def difference(old: View, new: View) -> View:
    """Return the merge patch that changes ``old`` to ``new``. Return {} if they are equal."""
    patch: View = {}
    for key, value in new.items():
        if key in old and old[key] == value:
            continue
        before = old.get(key)
        is_nested = isinstance(before, dict) and isinstance(value, dict)
        patch[key] = difference(old[key], value) if is_nested else value
    for key in old:
        if key not in new:
            patch[key] = None
    return patch
