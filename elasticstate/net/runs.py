"""Ascending numbers as runs, for short messages: in a first world of 10000 members, all but one lack the state."""

from __future__ import annotations

from collections.abc import Iterable


def as_runs(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending numbers as runs [first, last + 1)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return tuple(runs)


def from_runs(runs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the numbers of these runs: the reverse of :func:`as_runs`."""
    return tuple(number for first, behind in runs for number in range(first, behind))
