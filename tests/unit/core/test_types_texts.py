"""The line of a text that has an exception."""

from __future__ import annotations

import traceback

import pytest

from elasticstate.core.types import exception_line


def trace(*, cause: bool) -> str:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("cannot connect\nmore") from (error if cause else None)
    except RuntimeError as error:
        return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("", ""),
        ("RuntimeError: bad\n", "RuntimeError: bad"),
        ("elasticstate.errors.UsageError: bad: a b", "elasticstate.errors.UsageError: bad: a b"),
        ("sh: 1: nothing: not found", ""),
        ("a line of a log\nRuntimeError: bad", ""),
        ("Traceback (most recent call last):\n  no frame", ""),
    ],
)
def test_a_text_without_stack(error: str, line: str) -> None:
    assert exception_line(error) == line


def test_the_ranks_before_the_lines_of_torchs_tracebacks_are_left_out() -> None:
    lines = "".join(f"[rank12]: {line}\n" for line in trace(cause=False).splitlines())
    assert exception_line(lines) == "RuntimeError: cannot connect"
    assert exception_line("[rank1]: RuntimeError: bad\n") == "RuntimeError: bad"


@pytest.mark.parametrize("cause", [False, True])
def test_a_traceback_gives_the_first_line_of_its_last_exception(cause: bool) -> None:
    assert exception_line(trace(cause=cause)) == "RuntimeError: cannot connect"
