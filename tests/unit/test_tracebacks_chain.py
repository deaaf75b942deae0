"""The chain of an exception."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from elasticstate.tracebacks import error_chain

ExceptionGroup: Any = getattr(builtins, "ExceptionGroup", None)


def raised(
    error: BaseException, cause: BaseException | None = None, context: BaseException | None = None
) -> BaseException:
    """Return ``error`` as if it was raised from ``cause``, while ``context`` was handled."""
    error.__context__ = context
    if cause is not None:
        error.__cause__ = cause  # sets __suppress_context__, too
    return error


def test_causes_and_contexts_come_once_from_the_outside_in() -> None:
    first = ValueError(1)
    second = raised(ValueError(2), context=first)
    third = raised(ValueError(3), cause=second, context=first)
    assert error_chain(third) == [third, second, first]


@pytest.mark.skipif(ExceptionGroup is None, reason="Python 3.10 has no exception groups")
def test_the_members_of_a_group_and_their_causes_belong_to_the_chain() -> None:
    cause = KeyError("x")
    member = raised(ValueError(1), cause=cause)
    group = ExceptionGroup("both", [member, ExceptionGroup("inner", [OSError(2)])])  # type: ignore[list-item]
    assert [type(error) for error in error_chain(group)] == [
        ExceptionGroup,
        ValueError,
        KeyError,
        ExceptionGroup,
        OSError,
    ]


def test_a_circle_ends() -> None:
    first, second = ValueError(1), ValueError(2)
    raised(first, context=second)
    raised(second, context=first)
    assert error_chain(first) == [first, second]


def test_what_a_traceback_does_not_show_can_be_left_out() -> None:
    context, cause = ValueError(1), ValueError(2)
    error = raised(ValueError(3), cause=cause, context=context)
    assert error_chain(error) == [error, cause, context]
    assert error_chain(error, shown_only=True) == [error, cause]
    hidden = raised(ValueError(4), context=context)
    hidden.__suppress_context__ = True  # raise ... from None
    assert error_chain(hidden, shown_only=True) == [hidden]
    assert error_chain(raised(ValueError(5), context=context), shown_only=True)[1:] == [context]
