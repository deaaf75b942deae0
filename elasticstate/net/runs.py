"""Ascending numbers as runs: of ten thousand members of a first world all but one lack the state."""

from __future__ import annotations

from collections.abc import Iterable


def as_runs(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as runs [first, one behind the last)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return tuple(runs)


def from_runs(runs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The reverse of :func:`as_runs`."""
    return tuple(number for first, behind in runs for number in range(first, behind))
