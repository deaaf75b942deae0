"""Parts that a name chooses: the project's own from a table, others from entry points of installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar, cast

from elasticstate.errors import OptionError

T = TypeVar("T")


def load_part(name: str) -> Any:
    """Import the object that is named as ``module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def load_with_library(name: str, library: str, option: str) -> Any:
    """Import a part that needs a library: this takes a while, so never call it on an event loop.

    Raises OptionError if the library is not installed. The extra that installs it has the name of ``option``.
    """
    try:
        return load_part(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise OptionError(
            f"{option}: requires the package {library.replace('_', '-')}. Install it: pip install "
            f"'elasticstate[{option.removeprefix('--')}]'."
        ) from None


def plug_in(option: str, group: str, own: Mapping[str, str], name: str, base: type[T]) -> type[T]:
    """Return the subclass of ``base`` of this name: of the table ``own``, or of the entry points of ``group``.

    Entry points are read only for a name that is not in the table. Raises OptionError for an unknown name, and for an
    entry point that cannot be imported, or names something else.
    """
    if name in own:
        return cast("type[T]", load_part(own[name]))
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in entry_points(group=group)}
    if name not in found:
        names = ", ".join(sorted({*own, *found}))
        raise OptionError(
            f"{option}: {name!r}: there is no such plug-in. Choose one of {names}, or install the package that has an "
            f"entry point of this name in the group {group}."
        )
    try:
        kind = found[name].load()
    except Exception as error:
        raise OptionError(
            f"{option}: {name!r}: {found[name].value} cannot be imported: {type(error).__name__}: {error}. Mend or "
            "reinstall its package."
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise OptionError(
            f"{option}: {name!r}: the entry point does not name a subclass of {base.__module__}.{base.__name__}. Mend "
            "its package."
        )
    return kind
