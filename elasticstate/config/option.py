"""One option of a job: its names, the kind of its values, and its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elasticstate import kinds

PREFIX = "ELASTICSTATE_"


@dataclass(frozen=True, slots=True)
class Names:
    """Names of an option, the kind of its values, its group in the help, and its help."""

    names: tuple[str, ...]
    kind: kinds.Kind
    group: str
    help: str

    @property
    def twins(self) -> tuple[str, ...]:
        """The environment variables of the option: one for each long name."""
        return tuple(PREFIX + name[2:].replace("-", "_").upper() for name in self.names if name.startswith("--"))


def option(default: object, group: str, kind: kinds.Kind, names: str, help: str) -> Any:
    """Return the dataclass field of an option. ``names`` are separated by spaces."""
    return field(default=default, metadata={"names": Names(tuple(names.split()), kind, group, help)})
