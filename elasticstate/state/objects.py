"""ObjectState: plain values."""

from __future__ import annotations

from typing import Any

from elasticstate.state.base import State
from elasticstate.state.values import Captured, is_array, put


class ObjectState(State):
    """A state of plain values: numbers, lists, dicts, whatever can be pickled; tensors and arrays too.

    Restored are new objects: a change made in place in a list or dict is undone, and ``state.x`` is read again after a
    restore. Tensors and numpy arrays are written in place.
    """

    def capture(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def apply(self, values: Captured) -> None:
        self._check_names(values)
        for name in self._names:
            value = values[name]
            setattr(self, name, put(getattr(self, name), values, name) if is_array(value) else value)
