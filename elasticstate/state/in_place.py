"""In-place restore of the values that a commit pickles: lists, dicts, random generators and the script's own objects.

A script may have other references to such a value, and an object may refer to what the state has as values of their
own, as a schedule does to its optimizer: it keeps these, instead of the copies in its pickle.

The objects that the values had when the state was first captured keep their identity (``Places``): a restore writes
into them if they were at their places in the commit. Whatever the script has put there since may have another meaning
to it, like the next stage from a list of stages, and is never written: then the value is a copy. What the script
shares, or does not share, is as in the commit. Copies remain, too: objects with pickling of their own, whose content
only they know; objects with a hash of their own; and arguments of the command line, which scripts give the rank and
the device of their process.
"""

from __future__ import annotations

import functools
import itertools
import random
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from elasticstate.state.values import Moved, comparable_bytes, fits, write_into

_MAX_OBJECTS = 200_000  # of a restore; the rest is copied
_WHOLE = (torch.nn.Module, Optimizer)  # written if they have the same structure
_ATOMS = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object was. ``parts``: by the keys of ``_keys``; objects at several places share them."""

    path: str
    held: object
    parts: dict[Hashable, Place] = field(default_factory=dict)


_MOST_PLACES = 10_000


class Places:
    """The objects of some values, by name, at the moment."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._seen: dict[int, Place] = {}
        self._edges: dict[str, list[tuple[Any, Any, Place]]] = {}  # containers, and what they had at a key or an index
        self._of: dict[str, Place] = {}
        for name, value in values.items():
            self._edges[name] = []
            if (place := self._record(name, value, name)) is not None:
                self._of[name] = place

    def get(self, name: str) -> Place | None:
        """Return the place of a value; None if it had no object that a restore could write into."""
        return self._of.get(name)

    def _record(self, name: str, value: object, path: str) -> Place | None:
        if id(value) in self._seen:
            return Place(path, value, self._seen[id(value)].parts)
        if type(value) in _ATOMS or not _has_content(value) or len(self._seen) >= _MOST_PLACES:
            return None
        place = self._seen[id(value)] = Place(path, value)
        for key in _keys(value):
            kind, where = key[0], key[-1]
            part = self._record(name, _part(value, key), f"{path}[{where!r}]" if kind == "item" else f"{path}.{where}")
            if part is not None:
                place.parts[key] = part
                self._edges[name].append((_container(value, key), where, part))
        return place

    def moved(self, values: Mapping[str, object]) -> dict[str, Moved]:
        """Return the paths at which the values have other objects now: as ``name.moved``, part of a commit."""
        found: dict[str, Moved] = {}
        for name, place in self._of.items():
            moved = [] if values.get(name) is place.held else [place.path]
            # Also if it has moved: other values may share its parts.
            moved += [part.path for at, key, part in self._edges[name] if _item(at, key) is not part.held]
            if moved:
                found[f"{name}.moved"] = Moved(tuple(moved))
        return found


def _has_content(value: object) -> bool:
    """Return True for objects that a restore may write into, or that contain such objects."""
    return type(value) is tuple or isinstance(value, _WHOLE) or _can_be_written(value, value)


def _keys(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of ``_part``, except of numbers, texts and tensors, which no restore writes into."""
    if isinstance(value, torch.nn.Module):
        for name, part in value.named_modules():
            yield from (("module", name, key) for key in _plain_attributes(part))
        return
    if isinstance(value, Optimizer):
        return
    items: Iterable[tuple[Any, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple | deque):
        items = enumerate(value)
    yield from (("item", key) for key, part in items if type(key) in (str, int) and type(part) not in _ATOMS)
    yield from (("attribute", key) for key, part in getattr(value, "__dict__", {}).items() if type(part) not in _ATOMS)


def _part(value: Any, key: Any) -> object:
    """Return a part of an object; None if there is none."""
    with suppress(AttributeError):  # no such part of a module
        return _item(_container(value, key), key[-1])
    return None


def _is_same(one: object, other: object) -> bool:
    return one is other or (type(one) in _ATOMS and type(one) is type(other) and one == other)


def _container(value: Any, key: Any) -> Any:
    if key[0] == "item":
        return value
    return vars(value if key[0] == "attribute" else value.get_submodule(key[1]))


def _item(container: Any, key: Any) -> object:
    if isinstance(container, dict):
        return dict.get(container, key)
    return container[key] if key < len(container) else None


def _plain_attributes(module: torch.nn.Module) -> list[str]:
    return [key for key in vars(module) if key not in _OF_MODULES]


class InPlace:
    """In-place restore of several values, which may share objects. ``assign`` all of them first, then ``restore`` them.

    ``own``: the values that have been restored. ``moved``: paths at which the commit has other objects than Places.
    """

    def __init__(self, own: Iterable[object], moved: Collection[str] = ()) -> None:
        self._values = own
        self._moved = moved
        self._results: dict[int, Any] = {}  # by the id of the object in the commit
        self._assigned: dict[int, object] = {}  # by the id of the object in the commit: the live object for its content
        self._taken: set[int] = set()  # ids of these live objects

    def assign(self, saved: object, place: Place | None) -> None:
        """Let the object at a place, and those in it, take the content of their counterparts in the commit."""
        if place is None or place.path in self._moved or type(saved) is not type(place.held):
            return
        if id(saved) in self._assigned:
            return
        if type(saved) is tuple:
            self._assigned[id(saved)] = place.held
        elif id(place.held) not in self._taken and _can_be_written(place.held, saved):
            self._assigned[id(saved)] = place.held
            self._taken.add(id(place.held))
        else:
            return
        for key, part in place.parts.items():
            self.assign(_part(saved, key), part)

    @functools.cached_property
    def _own(self) -> dict[int, object]:
        """The own values and their parts, by id. Most states need none, and a model may have many."""
        return {id(part): part for value in self._values for part in _parts_of(value)}

    def restore(self, live: object, saved: object) -> Any:
        """Return the object to which ``saved`` was assigned, with its content, or else ``saved`` itself.

        ``live``: what is at this place now. The own values in it are kept in a copy, too.
        """
        if id(saved) in self._results:
            return self._results[id(saved)]
        if type(saved) in _ATOMS or live is saved or len(self._results) >= _MAX_OBJECTS:
            return saved
        held = self._assigned.get(id(saved))
        same = live if type(live) is type(saved) else held
        result = saved
        if held is not None and id(held) in self._own:
            result = held
        elif id(same) in self._own:
            result = self._match(same, saved)
        elif type(saved) is tuple:
            result = tuple(self._sequence(same or (), saved))
            if isinstance(held, tuple) and len(held) == len(result) and all(map(_is_same, held, result)):
                result = held
        elif held is not None:
            self._results[id(saved)] = held  # it may contain itself
            with suppress(Exception):  # of the script's objects: the copy is whole
                self._write(held, saved, same)
                result = held
        elif same is not None and not isinstance(saved, (*_WHOLE, *_GENERATORS)) and _can_be_written(same, saved):
            self._results[id(saved)] = saved
            with suppress(Exception):
                self._write(saved, saved, same)
        self._results[id(saved)] = result
        return result

    def _match(self, live: object, saved: object) -> object:
        """Return the own value that the commit means. Nearly always it is the live one: another one has its content."""
        others = [part for part in self._own.values() if type(part) is type(saved) and part is not live]
        if isinstance(saved, torch.Tensor) or not others:
            return live
        wanted = comparable_bytes(saved)
        return next((part for part in (live, *others) if comparable_bytes(part) == wanted), live)

    def _sequence(self, live: Any, saved: Any) -> list[Any]:
        pairs = itertools.zip_longest(list(live)[: len(saved)], list(saved))
        return [self.restore(one, other) for one, other in pairs]

    def _write(self, into: Any, saved: Any, live: Any) -> None:
        """Write the content of ``saved``. ``into`` may be ``saved`` itself; ``live`` has the own values."""
        if isinstance(into, torch.nn.Module):
            self._write_module(into, saved)
            return
        if isinstance(into, Optimizer):
            self._write_optimizer(into, saved)
            return
        attributes = {
            key: self.restore(vars(live).get(key), value) for key, value in getattr(saved, "__dict__", {}).items()
        }
        if isinstance(into, random.Random):
            into.setstate(saved.getstate())
        elif isinstance(into, np.random.Generator):
            into.bit_generator.state = saved.bit_generator.state
        elif isinstance(into, (np.random.RandomState, torch.Generator)):
            into.set_state(saved.get_state())
        elif isinstance(into, dict):
            content = dict(self._items(live, saved))
            into.clear()
            into.update(content)
        elif isinstance(into, list | deque):
            items = list(saved) if len(saved) > _MAX_OBJECTS else self._sequence(live, saved)
            into.clear()
            into.extend(items)
        elif isinstance(into, set):
            items = list(saved)
            into.clear()
            into.update(items)
        elif isinstance(into, bytearray):
            into[:] = bytes(saved)
        if hasattr(into, "__dict__"):
            vars(into).clear()
            vars(into).update(attributes)

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
                for key in _plain_attributes(copied):
                    vars(part)[key] = self.restore(vars(part).get(key), vars(copied)[key])

    def _write_optimizer(self, live: Optimizer, saved: Optimizer) -> None:
        """Keep the parameters: they are in modules, or in no value, as in a newcomer without this optimizer."""
        mine, others = ([p for group in each.param_groups for p in group["params"]] for each in (live, saved))
        kept = dict(zip(map(id, others), mine, strict=True))
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
            yield key, self.restore(dict.get(live, key), other)


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
