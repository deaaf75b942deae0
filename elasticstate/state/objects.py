"""ObjectState: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elasticstate.state.base import State
from elasticstate.state.iterable_data import require_own_position
from elasticstate.state.module_state import flag_of, load_bare, requires_grad
from elasticstate.state.values import Captured, is_array


class ObjectState(State):
    """A state of plain values: numbers, lists, dicts and other objects that can be pickled; also tensors and arrays.

    ``restore`` creates new objects: it undoes changes made in place in a list or dict, and you read ``state.x`` again
    afterwards. Tensors and numpy arrays are written in place.
    """

    def _check_value(self, name: str, value: object) -> None:
        if type(self).capture is ObjectState.capture:
            require_own_position(name, value)

    def capture(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._names}
        flags = {flag_of(name): requires_grad(v) for name, v in values.items() if isinstance(v, torch.Tensor)}
        return {**values, **flags}

    def _pickled(self) -> dict[str, Any]:
        if type(self).capture is not ObjectState.capture:
            return {}
        return {name: value for name, value in self._parts().items() if not is_array(value)}

    def _load_targets(self) -> Captured:
        return self.capture()

    def _step_sources(self) -> Mapping[str, object] | None:
        return self.capture() if type(self).capture is ObjectState.capture else None

    def apply(self, values: Captured) -> None:
        self._check_names(values, ObjectState.capture)
        for name in self._names:
            value = values[name]
            setattr(self, name, load_bare(name, getattr(self, name), values) if is_array(value) else value)
