"""Forgotten: a warning of the script's objects and numbers that change while it trains, and that no commit contains.

The search covers what the training function can reach by a name: its arguments, global variables and those of enclosing
functions, and from these one step into lists, dicts, and the script's own objects, functions and modules. An object
that the function makes itself begins anew on all ranks, so local variables do not count.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import sys
import textwrap
import tokenize
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, Sampler

from elasticstate.log import logger
from elasticstate.state.base import State, is_empty
from elasticstate.state.values import ANEW, belongs_to_a_world
from elasticstate.tracebacks import is_of_the_script

_KEYS = {LRScheduler: "last_epoch", torch.amp.GradScaler: "_growth_tracker", AveragedModel: "n_averaged"}
"""Classes of objects that a state may lack, and a key by which the result of their ``state_dict()`` can be told."""

_EFFECTS = {
    LRScheduler: "changes the learning rates of state.{optimizer}",
    torch.amp.GradScaler: "scales gradients",
    AveragedModel: "averages weights",
}

_SAMPLED, _LONGEST_SAMPLE = 3, 16  # parameters of a module, and elements of each

_LONGEST_LIST = 100  # items of a list or dict that are looked at

_WITHOUT_STATE = frozenset((int, float, bool, str, type(None), type, FunctionType, MethodType, ModuleType))

_STORE_GLOBAL, _STORE_DEREF = (dis.opmap[name] for name in ("STORE_GLOBAL", "STORE_DEREF"))
"""Instructions that assign to a global variable, and to one that a function shares with another one."""

_COUNTS_FROM = 2  # the first commit at which counts are looked for: it takes milliseconds, not in a world's first tick

WARNED: set[str] = set()
"""Names that a warning has had in this process."""


class Forgotten:
    """Search for what no commit contains. Create it when ``train`` has been called.

    Schedulers and scalers are named at the first step of their optimizer, and so is what belongs to one world. What
    else there is is named when it has changed: the parameters of modules; the numbers and tensors of an object with
    ``state_dict()``, or that refers to an optimizer of the state and to no module, as schedules do; and numbers that
    the script counts up. A pretrained network that stays as it is may stay outside of the state.
    """

    def __init__(self, train: Callable[..., object]) -> None:
        found: dict[int, tuple[str, Any]] = {}
        self._of_one_world: dict[str, str] = {}  # their classes
        for name, value in _reachable(train):
            if type(value) in _WITHOUT_STATE:  # most of what a script imports
                continue
            if belongs_to_a_world(value):
                self._of_one_world.setdefault(name, type(value).__name__)
            elif _is_a(value, torch.nn.Module, *_KEYS) or _optimizer_of(value) is not None or _has_state(value):
                found.setdefault(id(value), (name, value))
        self._train = train
        self._found: list[tuple[str, weakref.ref[Any]]] = []
        for name, value in found.values():
            with suppress(TypeError):  # a class without weak references
                self._found.append((name, weakref.ref(value)))
        self._modules: list[_Sample | _Count] | None = None  # those that the state lacks
        self._watched: set[str] = set()  # variables of other objects
        self._commits, self._next_look = 0, 1

    def judge(
        self,
        optimizer: Optimizer,
        name: str,
        values: Mapping[str, object],
        all_of: Iterable[object],
        tensors: Container[int],
    ) -> None:
        """Name what the state lacks, when one of its optimizers is about to step.

        Args:
            name: that of the optimizer in the state.
            values: all values of the state.
            all_of: the objects that these refer to.
            tensors: ids of the state's parameters.
        """
        for variable, kind_of in self._of_one_world.items():
            if variable not in WARNED:
                WARNED.add(variable)
                logger.warning(
                    "%s (%s) was created outside of the function, but belongs to one world: a new worker begins with "
                    "another one, so its collectives would not match those of the others. %s",
                    variable,
                    kind_of,
                    ANEW,
                )
        found = [(variable, value) for variable, reference in self._found if (value := reference()) is not None]
        kept = {id(part) for part in _with_parts(all_of)} if found else set()
        modules = []
        others: list[_Sample | _Count] = []
        for variable, value in found:
            if id(value) in kept or variable in WARNED:
                continue
            kind = next((kind for kind in _KEYS if isinstance(value, kind)), None)
            if kind is None and not _is_a(value, torch.nn.Module):
                if (_optimizer_of(value) is optimizer or _has_state(value)) and variable not in self._watched:
                    self._watched.add(variable)
                    others.append(_Sample(variable, value, _attributes))
            elif kind is None:
                modules.append((variable, value))
            elif _is_used(value, optimizer):
                saved = any(isinstance(part, dict) and (not part or _KEYS[kind] in part) for part in values.values())
                if not saved:
                    _warn(variable, value, _EFFECTS[kind].format(optimizer=name))
        if self._modules is None:
            outside = [(v, m) for v, m in modules if not any(id(p) in tensors for p in m.parameters())]
            self._modules = [_Sample(variable, module, _elements) for variable, module in outside]
        self._modules += others

    def begin_commit(self, values: Mapping[str, object], all_of: Callable[[], Iterable[object]]) -> None:
        """Look for what has changed, at fewer and fewer commits: a look waits for the device.

        Args:
            values: those of the state. A count that is equal to one of them is no loss.
            all_of: returns the objects that these refer to.
        """
        self._commits += 1
        if self._modules is not None and self._commits == self._next_look:
            self._next_look *= 2
            if self._commits == _COUNTS_FROM:
                self._modules += _counts(self._train, {id(part) for part in all_of()})
            numbers = [value for value in values.values() if isinstance(value, int | float)]
            for sample in self._modules:
                if isinstance(sample, _Count) and sample.value() in numbers:
                    sample.renew()
            changed = [sample for sample in self._modules if sample.has_changed()]
            self._modules = [sample for sample in self._modules if sample not in changed]
            for sample in changed:
                if (value := sample.value()) is not None and sample.variable not in WARNED:
                    _warn(sample.variable, value, "changes while the script trains")


class _Sample:
    """Some numbers of an object, by what identifies them in it: ``read`` returns them."""

    def __init__(self, variable: str, value: Any, read: Callable[[Any], dict[Any, Any]]) -> None:
        self.variable, self.value, self._read = variable, weakref.ref(value), read
        self._known = read(value)

    def has_changed(self) -> bool:
        value = self.value()
        now = self._read(value) if value is not None else self._known
        return now.keys() != self._known.keys() or not all(are_equal(now[key], self._known[key]) for key in now)


def _attributes(value: object) -> dict[Any, Any]:
    """Return the numbers that an object has as attributes, and some elements of the tensors."""
    found: dict[Any, Any] = {}
    for key, attribute in _vars(value).items():
        part = attribute[0] if type(attribute) in (list, tuple) and attribute else attribute
        if type(part) in (int, float) and part is attribute:
            found[key] = part
        elif type(part) is torch.Tensor and not part.is_meta:
            found[key] = sample_of(part)
    return found


def _elements(module: torch.nn.Module) -> dict[Any, Any]:
    """Return some elements of a module's parameters."""
    whole = [
        p for p in module.parameters() if type(p) is torch.nn.Parameter and not p.is_meta and p.is_floating_point()
    ]
    return dict(enumerate(map(sample_of, whole[:: max(1, len(whole) // _SAMPLED)][:_SAMPLED])))


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the first elements."""
    return tensor.detach().flatten()[:_LONGEST_SAMPLE].clone()


class _Count:
    """A number that the script counts up: a variable outside of the function, or an attribute."""

    def __init__(self, variable: str, read: Callable[[], object]) -> None:
        self.variable, self._read = variable, read
        self.renew()

    def renew(self) -> None:
        self._known = self.value()

    def value(self) -> int | float | None:
        found = self._read()
        return found if type(found) in (int, float) else None  # type: ignore[return-value]

    def has_changed(self) -> bool:
        return self.value() != self._known


def are_equal(one: Any, other: Any) -> bool:
    """Return True for tensors of equal elements, and for equal numbers. NaN is equal to itself."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        both = (tensor.nan_to_num() if tensor.is_floating_point() else tensor for tensor in (one, other))
        return one.device == other.device and torch.equal(*both)
    is_number = not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor)
    return is_number and bool(one == other or (one != one and other != other))


def _counts(train: Callable[..., object], kept: Container[int]) -> Iterator[_Count]:
    """Yield the numbers that functions and methods of the script count up. ``kept``: ids of what the state has."""
    found: dict[str, _Count] = {}
    functions: list[FunctionType] = []
    for name, value in _names_of(train, set()):
        if _is_a(value, FunctionType) and _is_of_the_script(value):
            functions.append(value)
        elif type(value) in (int, float) or id(value) in kept or _is_a(value, *_NO_OWNERS):
            continue
        elif _is_of_the_script(value) and _optimizer_of(value) is None and not _has_state(value):
            for key in _counted_by(cast("Hashable", type(value))):
                if type(_vars(value).get(key)) is int:
                    with suppress(TypeError):
                        read = functools.partial(_attribute, weakref.ref(value), key)
                        found.setdefault(f"{name}.{key}", _Count(f"{name}.{key}", read))
    for function in [*_functions_of(train), *functions]:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name in _counted_by(function.__code__):
            read = functools.partial(_variable, cells.get(name), function.__globals__, name)
            count = _Count(name, read)
            if count.value() is not None:
                found.setdefault(name, count)
    yield from found.values()


_NO_OWNERS = (torch.nn.Module, Optimizer, State, type, ModuleType, MethodType)


def _attribute(owner: weakref.ref[Any], key: str) -> object:
    return _vars(owner()).get(key)


def _variable(cell: CellType | None, values: Mapping[str, object], name: str) -> object:
    """Return the value of a variable of an enclosing function, or of a global one."""
    if cell is None:
        return values.get(name)
    return None if is_empty(cell) else cell.cell_contents


@functools.lru_cache(256)
def _counted_by(owner: type | CodeType) -> frozenset[str]:
    """Return the names that count: those to which the source assigns a value that depends on the one before, as ``+=``.

    Of a function they are declared as ``global`` or ``nonlocal``; of a class they are attributes of its objects.
    ``owner``: the class, or the code of the function, because the cache would keep a function and its variables alive.
    """
    try:
        if isinstance(owner, type):
            source = inspect.getsource(owner)
        elif not _assigns_outside(owner, owner.co_freevars):
            return frozenset()
        else:  # for code, ``inspect.getsource`` asks each imported module where it is
            lines = linecache.getlines(owner.co_filename)
            source = "".join(inspect.getblock(lines[owner.co_firstlineno - 1 :]))
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError, ValueError, IndexError, tokenize.TokenError):  # no source
        return frozenset()
    declared = {name for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    found: set[str] = set()
    for node in ast.walk(tree):
        targets = [node.target] if isinstance(node, ast.AugAssign) else []
        if isinstance(node, ast.Assign):
            used = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
            targets = [target for target in node.targets if isinstance(target, ast.Name) and target.id in used]
        for target in targets:
            if isinstance(target, ast.Name) and target.id in declared and not isinstance(owner, type):
                found.add(target.id)
            elif isinstance(target, ast.Attribute) and isinstance(owner, type) and ast.unparse(target.value) == "self":
                found.add(target.attr)
    return frozenset(found)


def _assigns_outside(code: CodeType, free: tuple[str, ...]) -> bool:
    """Return True if a function, or one inside of it, assigns to a global variable or to one of ``free``, those of the
    enclosing functions. Much quicker than a look at the source."""
    instructions = code.co_code[::2]
    if _STORE_GLOBAL in instructions:
        return True
    if free and _STORE_DEREF in instructions:
        found = dis.get_instructions(code)
        if any(each.opcode == _STORE_DEREF and each.argval in free for each in found):
            return True
    return any(_assigns_outside(inner, free) for inner in code.co_consts if isinstance(inner, CodeType))


def _has_state(value: object) -> bool:
    """Return True for an object with ``state_dict()`` that is no module, optimizer, loader, sampler or State."""
    kind = type(value)
    if issubclass(kind, (*_NO_OWNERS, *_DATA)) or kind.__module__.partition(".")[0] in ("elasticstate", "torchdata"):
        return False
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


_DATA = (DataLoader, Dataset, Sampler)


def _optimizer_of(value: object) -> Optimizer | None:
    """Return the optimizer to which an object of a class refers by an attribute, if it refers to no module."""
    if _is_a(value, torch.nn.Module, Optimizer, State, type, ModuleType, FunctionType, MethodType):
        return None
    parts = list(_vars(value).values())
    if any(_is_a(part, torch.nn.Module, State) for part in parts):
        return None
    return next((part for part in parts if _is_a(part, Optimizer)), None)


def _vars(value: object) -> dict[str, Any]:
    """Return the attributes of an object, without any code of its class."""
    with suppress(AttributeError, TypeError):
        found = object.__getattribute__(value, "__dict__")
        return dict(found) if type(found) is dict else {}
    return {}


def _warn(variable: str, value: object, effect: str) -> None:
    WARNED.add(variable)
    whole = variable.partition("[")[0]  # a list or dict can be a value of the state
    name = whole.rpartition(".")[2]
    logger.warning(
        "%s (%s) %s, but is in no value of the state: a worker that is restarted begins with a new one, and differs "
        "from the others. Give it to the state: TorchState(..., %s=%s)%s.",
        variable,
        type(value).__name__,
        effect,
        name,
        whole,
        f", and use state.{name} instead" if isinstance(value, int | float) else "",
    )


def _is_a(value: object, *classes: type) -> bool:
    """Return True for an instance of a class. ``isinstance`` would also run code of objects that stand for others."""
    return issubclass(type(value), classes)


def _is_used(value: object, optimizer: Optimizer) -> bool:
    if isinstance(value, LRScheduler):
        return value.optimizer is optimizer
    return not isinstance(value, torch.amp.GradScaler) or value.is_enabled()


def _with_parts(objects: Iterable[object]) -> Iterator[object]:
    """Yield the objects, and the schedulers of which one among them consists."""
    pending = list(objects)
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, LRScheduler):
            for part in vars(value).values():
                pending += [
                    s for s in (part if isinstance(part, list | tuple) else [part]) if isinstance(s, LRScheduler)
                ]


def _reachable(train: Callable[..., object]) -> Iterator[tuple[str, Any]]:
    """Yield what the training function can reach, with names: its own variables first."""
    known: set[int] = set()
    names = list(_names_of(train, known))
    yield from names
    for name, value in names:
        if _is_a(value, list, tuple):
            yield from ((f"{name}[{i}]", part) for i, part in enumerate(value[:_LONGEST_LIST]))
        elif type(value) is dict:
            yield from ((f"{name}[{key!r}]", value[key]) for key in list(value)[:_LONGEST_LIST])
        elif _is_a(value, torch.nn.Module, Optimizer, State, type) or not _is_of_the_script(value):
            continue
        elif _is_a(value, FunctionType, MethodType):
            yield from _names_of(value, known)
        else:
            with suppress(AttributeError):
                parts = object.__getattribute__(value, "__dict__")
                yield from ((f"{name}.{key}", part) for key, part in list(parts.items()))


def _names_of(call: Any, known: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call that is a ``partial``, and the variables outside of its function. ``known``: the
    modules whose global variables have been yielded, as ids of their dicts."""
    arguments: list[Any] = []
    while not isinstance(call, FunctionType):
        if isinstance(call, functools.partial):
            arguments = [*call.args, *arguments]
            yield from call.keywords.items()
            call = call.func
        elif isinstance(call, MethodType):
            arguments = [call.__self__, *arguments]
            call = call.__func__
        else:
            return
    function = _innermost(call)
    yield from zip(function.__code__.co_varnames, arguments, strict=False)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if not is_empty(cell))
    if id(function.__globals__) not in known:
        known.add(id(function.__globals__))
        yield from list(function.__globals__.items())


def _innermost(function: FunctionType) -> FunctionType:
    while isinstance(inner := getattr(function, "__wrapped__", None), FunctionType):
        function = inner
    return function


def _functions_of(call: Any) -> Iterator[FunctionType]:
    """Yield the function that a call makes."""
    while isinstance(call, functools.partial | MethodType):
        call = call.func if isinstance(call, functools.partial) else call.__func__
    if isinstance(call, FunctionType):
        yield _innermost(call)


def _is_of_the_script(value: Any) -> bool:
    """Return True for a module of the script, and for an object whose function or class one of them defines."""
    home = value if _is_a(value, FunctionType, MethodType) else type(value)
    module = value if _is_a(value, ModuleType) else sys.modules.get(getattr(home, "__module__", None) or "")
    return module is not None and is_of_the_script(getattr(module, "__file__", None) or "<frozen ")
