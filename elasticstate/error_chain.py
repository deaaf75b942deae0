"""The chain of an exception: the exceptions that it was raised from."""

from __future__ import annotations


def error_chain(error: BaseException, shown_only: bool = False) -> list[BaseException]:
    """Return an exception, its causes and contexts, and the members of groups: each once, the exception first.

    ``shown_only``: leave out contexts that a traceback does not show, because of ``raise ... from``.
    """
    found: list[BaseException] = []
    pending = [error]
    while pending:
        link = pending.pop()
        if not any(link is known for known in found):
            found.append(link)
            pending += reversed(_raised_from(link, shown_only))
    return found


def _raised_from(error: BaseException, shown_only: bool) -> list[BaseException]:
    is_hidden = shown_only and error.__suppress_context__
    members = getattr(error, "exceptions", ())  # of an ExceptionGroup, which Python 3.10 does not have
    causes = [error.__cause__, None if is_hidden else error.__context__, *(members if type(members) is tuple else ())]
    return [cause for cause in causes if isinstance(cause, BaseException)]
