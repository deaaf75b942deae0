"""In-place restore of the values that a commit pickles: lists, dicts, random generators and the script's own objects.

A script may have other references to such a value: a global list of losses, a closure's generator, a trainer that calls
``self.schedule``. They would otherwise mean the object from before the restore, and the state a copy. An object may
also refer to what the state has as values of their own, as a schedule does to its optimizer, and an average to its
model. It keeps these, instead of the copies in its pickle.

A live object takes the content of one object of the commit. What the script shares, or does not share, is as in the
commit. Copies remain: objects with pickling of their own, whose content only they know; objects with a hash of their
own; what has nothing of its type at its place in the live value; and arguments of the command line, which scripts give
the rank and the device of their process.
"""

from __future__ import annotations

import functools
import itertools
import random
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from elasticstate.state.values import comparable_bytes, fits, write_into

_MAX_OBJECTS = 200_000  # of a restore; the rest is copied
_WHOLE = (torch.nn.Module, Optimizer)  # written if they have the same structure
_ATOMS = (int, float, complex, str, bytes, bool, type(None))


class InPlace:
    """In-place restore of several values, which may share objects. ``own``: the values that have been restored."""

    def __init__(self, own: Iterable[object]) -> None:
        self._values = own
        self._results: dict[int, Any] = {}  # by the id of the object in the commit
        self._taken: set[int] = set()  # ids of the live objects that have their content

    @functools.cached_property
    def _own(self) -> dict[int, object]:
        """The own values and their parts, by id. Most states need none, and a model may have many."""
        return {id(part): part for value in self._values for part in _parts_of(value)}

    def restore(self, live: object, saved: object) -> Any:
        """Return ``live`` with the content of ``saved``, or ``saved`` itself if that cannot be."""
        if id(saved) in self._results:
            return self._results[id(saved)]
        if (
            live is saved
            or type(live) is not type(saved)
            or type(saved) in _ATOMS
            or len(self._results) >= _MAX_OBJECTS
        ):
            return saved
        result = saved
        if id(live) in self._own:
            result = self._match(live, saved)
        elif type(saved) is tuple:
            result = self._tuple(live, saved)
        elif id(live) not in self._taken and _can_be_written(live, saved):
            self._taken.add(id(live))
            self._results[id(saved)] = live  # it may contain itself
            with suppress(Exception):  # of the script's objects: the copy is whole
                self._write(live, saved)
                result = live
        self._results[id(saved)] = result
        return result

    def _match(self, live: object, saved: object) -> object:
        """Return the own value that the commit means. Nearly always it is the live one: another one has its content."""
        others = [part for part in self._own.values() if type(part) is type(saved) and part is not live]
        if isinstance(saved, torch.Tensor) or not others:
            return live
        wanted = comparable_bytes(saved)
        return next((part for part in (live, *others) if comparable_bytes(part) == wanted), live)

    def _tuple(self, live: Any, saved: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = [self.restore(one, other) for one, other in zip(live, saved, strict=False)]
        return (*parts, *saved[len(parts) :])

    def _write(self, live: Any, saved: Any) -> None:
        if isinstance(live, torch.nn.Module):
            self._write_module(live, saved)
            return
        if isinstance(live, Optimizer):
            self._write_optimizer(live, saved)
            return
        if isinstance(live, random.Random):
            live.setstate(saved.getstate())
        elif isinstance(live, np.random.Generator):
            live.bit_generator.state = saved.bit_generator.state
        elif isinstance(live, (np.random.RandomState, torch.Generator)):
            live.set_state(saved.get_state())
        elif isinstance(live, dict):
            content = dict(self._items(live, saved))
            live.clear()
            live.update(content)
        elif isinstance(live, list | deque) and len(saved) > _MAX_OBJECTS:
            live.clear()
            live.extend(saved)
        elif isinstance(live, list | deque):
            parts = [self.restore(one, other) for one, other in itertools.zip_longest(list(live)[: len(saved)], saved)]
            live.clear()
            live.extend(parts)
        elif isinstance(live, set):
            live.clear()
            live.update(saved)
        elif isinstance(live, bytearray):
            live[:] = saved
        if hasattr(live, "__dict__"):
            attributes = {key: self.restore(vars(live).get(key), value) for key, value in vars(saved).items()}
            vars(live).clear()
            vars(live).update(attributes)

    def _write_module(self, live: torch.nn.Module, saved: torch.nn.Module) -> None:
        for one, other in zip(_tensors_of(live).values(), _tensors_of(saved).values(), strict=True):
            self._results[id(other)] = one
            if id(one) not in self._own:
                write_into(one, other)
                if one.is_leaf:
                    one.grad = None
                if one.requires_grad != other.requires_grad and one.is_leaf:
                    one.requires_grad_(other.requires_grad)
        for part, copied in zip(live.modules(), saved.modules(), strict=True):
            self._results[id(copied)] = part
            if id(part) not in self._own:
                self._taken.add(id(part))
                part.training = copied.training
                plain = {key: value for key, value in vars(copied).items() if key not in _OF_MODULES}
                vars(part).update({key: self.restore(vars(part).get(key), value) for key, value in plain.items()})

    def _write_optimizer(self, live: Optimizer, saved: Optimizer) -> None:
        """Keep the parameters: they are in modules, or in no value, as in a newcomer without this optimizer."""
        pairs = zip(live.param_groups, saved.param_groups, strict=True)
        kept = {
            id(other): one
            for group, copied in pairs
            for one, other in zip(group["params"], copied["params"], strict=True)
        }
        state = {}
        for key, entry in saved.state.items():
            parameter = kept.get(id(key), key)
            state[parameter] = {name: _beside(value, parameter) for name, value in entry.items()}
        for group, copied in zip(live.param_groups, saved.param_groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({**copied, "params": parameters})
        live.state.clear()
        live.state.update(state)

    def _items(self, live: dict[Any, Any], saved: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the new content of a dict. Its keys may be parameters of a model."""
        if len(live) == len(saved) and any(id(key) in self._own for key in live):
            for (key, one), (copied, other) in zip(list(live.items()), saved.items(), strict=True):
                yield self.restore(key, copied), self.restore(one, other)
            return
        for copied, other in saved.items():
            key = self._results.get(id(copied), copied)
            yield key, self.restore(live.get(key), other)


def _parts_of(value: object) -> Iterator[object]:
    """Yield a value and what objects of the script take from it: modules, parameters and groups.

    A restored optimizer has not restored its parameters.
    """
    yield value
    if isinstance(value, torch.nn.Module):
        yield from value.modules()
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Optimizer):
        yield value.state
        yield value.param_groups
        for group in value.param_groups:
            yield group
            yield group["params"]


def _beside(value: Any, parameter: Any) -> Any:
    """Return a tensor on the device of the parameter, if that is one of the same type: it was pickled on another."""
    both = isinstance(value, torch.Tensor) and isinstance(parameter, torch.Tensor)
    return value.to(parameter.device) if both and value.device.type == parameter.device.type else value


def _tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _are_alike(live: Any, saved: Any) -> bool:
    """Return True if a module has the same parts and tensors, or an optimizer groups of as many parameters."""
    if isinstance(live, Optimizer):
        sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in (live, saved)]
        return sizes[0] == sizes[1]
    if list(map(type, live.modules())) != list(map(type, saved.modules())):
        return False
    one, other = _tensors_of(live), _tensors_of(saved)
    with suppress(RuntimeError):  # a lazy parameter has no shape
        return one.keys() == other.keys() and all(fits(one[name], other[name], None) for name in one)
    return False


_OF_MODULES = vars(torch.nn.Module())
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_CONTAINERS = (dict, list, deque, set, bytearray)
_KNOWN = (*_CONTAINERS, Counter, OrderedDict, defaultdict, SimpleNamespace)
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


def _can_be_written(live: object, saved: object) -> bool:
    """Return True if the content of an object is known: that of a container, and attributes in a ``__dict__``."""
    kind = type(live)
    if isinstance(live, _WHOLE):
        return _are_alike(live, saved)
    if isinstance(live, torch.Tensor | np.ndarray | Namespace):
        return False
    if kind in _KNOWN or issubclass(kind, _GENERATORS):
        return True
    base: type = next((base for base in _KNOWN[::-1] if issubclass(kind, base)), object)
    with suppress(AttributeError):
        is_changed = any(getattr(kind, name, None) is not getattr(base, name, None) for name in _PICKLING)
        has_slots = any(getattr(c, "__slots__", ()) for c in kind.__mro__ if c not in (object, base))
        return (
            kind.__module__ != "builtins"
            and hasattr(live, "__dict__")
            and not (is_changed or has_slots)
            and kind.__hash__ in (object.__hash__, None)
        )
    return False
