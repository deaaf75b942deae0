"""Phrases that several texts share."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN = 16


def number_of(count: int, what: str) -> str:
    """Return ``1 worker``, ``3 workers``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def listed(items: Iterable[str], separator: str = ", ", shown: int = SHOWN) -> str:
    """Return the first items, and the number of the others."""
    items = list(items)
    more = [f"and {len(items) - shown} more"] if len(items) > shown else []
    return separator.join(items[:shown] + more)
