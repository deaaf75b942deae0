"""Warnings about what changes while a script trains and no commit contains: its objects, and gradients that add up.

A worker that is restarted begins with new ones: with a forgotten scheduler it would train at another learning rate than
the other ranks, with a forgotten GradScaler it would add gradients of another scale to theirs, and a forgotten average
of the weights, or target network, begins anew.

The search covers what the training function can reach by a name: its arguments, global variables and those of enclosing
functions, and from these one step into lists, dicts, and the script's own objects, functions and modules. An object
that the function makes itself begins anew on all ranks, so local variables do not count.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elasticstate.log import logger
from elasticstate.state.base import State
from elasticstate.tracebacks import is_of_the_script

_KEYS = {LRScheduler: "last_epoch", torch.amp.GradScaler: "_growth_tracker", AveragedModel: "n_averaged"}
"""Classes of such objects, and a key by which the result of their ``state_dict()`` can be told."""

_EFFECTS = {
    LRScheduler: "changes the learning rates of state.{optimizer}",
    torch.amp.GradScaler: "scales gradients",
    AveragedModel: "averages weights",
}

_SAMPLED, _LONGEST_SAMPLE = 3, 16  # parameters of a module, and elements of each

_LONGEST_LIST = 100  # items of a list or dict that are looked at

_warned: set[str] = set()


class Forgotten:
    """The script's schedulers, scalers and modules. Create it when the training function has been called.

    Schedulers and scalers are named at the first step of their optimizer. Modules are named when their parameters have
    changed. A pretrained network that stays as it is may stay outside of the state.
    """

    def __init__(self, train: Callable[..., object]) -> None:
        found: dict[int, tuple[str, Any]] = {}
        for name, value in _reachable(train):
            if _is_of_interest(value):
                found.setdefault(id(value), (name, value))
        self._found = [(name, weakref.ref(value)) for name, value in found.values()]
        self._modules: list[_Sample] | None = None  # those that the state lacks
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
        found = [(variable, value) for variable, reference in self._found if (value := reference()) is not None]
        kept = {id(part) for part in _with_parts(all_of)} if found else set()
        modules = []
        for variable, value in found:
            if id(value) in kept or variable in _warned:
                continue
            kind = next((kind for kind in _KEYS if isinstance(value, kind)), None)
            if kind is None:
                modules.append((variable, value))
            elif _is_used(value, optimizer):
                saved = any(isinstance(part, dict) and (not part or _KEYS[kind] in part) for part in values.values())
                if not saved:
                    _warn(variable, value, _EFFECTS[kind].format(optimizer=name))
        if self._modules is None:
            outside = [(v, m) for v, m in modules if not any(id(p) in tensors for p in m.parameters())]
            self._modules = [_Sample(variable, module) for variable, module in outside]

    def begin_commit(self) -> None:
        """Look for modules that have changed, at fewer and fewer commits: a look waits for the device."""
        self._commits += 1
        if self._modules and self._commits == self._next_look:
            self._next_look *= 2
            changed = [sample for sample in self._modules if sample.has_changed()]
            self._modules = [sample for sample in self._modules if sample not in changed]
            for sample in changed:
                if (module := sample.module()) is not None and sample.variable not in _warned:
                    _warn(sample.variable, module, "changes while the script trains")


class _Sample:
    """Some elements of a module's parameters."""

    def __init__(self, variable: str, module: torch.nn.Module) -> None:
        self.variable, self.module = variable, weakref.ref(module)
        self._elements = _elements(module)

    def has_changed(self) -> bool:
        module = self.module()
        now = _elements(module) if module is not None else []
        pairs = zip(self._elements, now, strict=False)
        return any(a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _elements(module: torch.nn.Module) -> list[torch.Tensor]:
    whole = [
        p for p in module.parameters() if type(p) is torch.nn.Parameter and not p.is_meta and p.is_floating_point()
    ]
    chosen = whole[:: max(1, len(whole) // _SAMPLED)][:_SAMPLED]
    return [p.detach().flatten()[:_LONGEST_SAMPLE].clone() for p in chosen]


def _warn(variable: str, value: object, effect: str) -> None:
    _warned.add(variable)
    whole = variable.partition("[")[0]  # a list or dict can be a value of the state
    logger.warning(
        "%s (%s) %s, but is in no value of the state: a worker that is restarted begins with a new one, and differs "
        "from the others. Give it to the state: TorchState(..., %s=%s).",
        variable,
        type(value).__name__,
        effect,
        whole.rpartition(".")[2],
        whole,
    )


def _is_a(value: object, *classes: type) -> bool:
    """Return True for an instance of a class. ``isinstance`` would also run code of objects that stand for others."""
    return issubclass(type(value), classes)


def _is_of_interest(value: object) -> bool:
    return _is_a(value, torch.nn.Module, *_KEYS)


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
    names = list(_names_of(train))
    yield from names
    for name, value in names:
        if _is_a(value, list, tuple):
            yield from ((f"{name}[{i}]", part) for i, part in enumerate(value[:_LONGEST_LIST]))
        elif type(value) is dict:
            yield from ((f"{name}[{key!r}]", value[key]) for key in list(value)[:_LONGEST_LIST])
        elif _is_a(value, torch.nn.Module, Optimizer, State, type) or not _is_of_the_script(value):
            continue
        elif _is_a(value, FunctionType, MethodType):
            yield from _names_of(value)
        else:
            with suppress(AttributeError):
                parts = object.__getattribute__(value, "__dict__")
                yield from ((f"{name}.{key}", part) for key, part in list(parts.items()))


def _names_of(call: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call that is a ``partial``, and the variables outside of its function."""
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
    function = call
    while isinstance(inner := getattr(function, "__wrapped__", None), FunctionType):
        function = inner
    yield from zip(function.__code__.co_varnames, arguments, strict=False)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that is not assigned yet
            yield name, cell.cell_contents
    yield from list(function.__globals__.items())


def _is_of_the_script(value: Any) -> bool:
    """Return True for a module of the script, and for an object whose function or class one of them defines."""
    home = value if _is_a(value, FunctionType, MethodType) else type(value)
    module = value if _is_a(value, ModuleType) else sys.modules.get(getattr(home, "__module__", None) or "")
    return module is not None and is_of_the_script(getattr(module, "__file__", None) or "<frozen ")


# --------------------------------------------------------------------------------------------------------- accumulation
# A warning about gradients that accumulate over a tick: no commit contains them, and a new world has none.
#
# So after a failure, or a planned change at that tick, a step would lack the gradients of some batches, without any
# notice. The gradient of one parameter is followed: it was begun before a tick if the step uses the tensor that the
# tick met, and something has been added to it since.


_Mark = tuple["weakref.ref[torch.Tensor]", int]
"""A gradient, and its version."""

_MOST_ZEROS = 20  # at ticks, before no more is looked at: a look waits for the device
_has_warned = False


class Accumulation:
    """Follows the gradients of one optimizer. Create it when the optimizer is about to step."""

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        least = min(parameters, key=torch.Tensor.numel, default=None)
        self._parameter = weakref.ref(least) if least is not None else None
        self._at_step = self._mark()
        self._at_tick: _Mark | None = None
        self._is_suspected = False
        self._zeros = 0  # ticks at which the gradient was zero

    def begin_step(self) -> None:
        """Note that the optimizer is about to use the gradients."""
        before, self._at_tick, self._at_step = self._at_tick, None, self._mark()
        if before is None or self._at_step is None or self._at_step[0]() is not before[0]():
            return
        if self._at_step[1] > before[1]:
            if self._is_suspected:
                _warn_of_gradients()
            self._is_suspected = True

    def end_tick(self) -> None:
        """Note a gradient that no step has used yet."""
        mark = self._mark()
        self._at_tick = None if mark is None or self._is(mark, self._at_step) else mark
        if self._at_tick is not None and self._is_suspected and self._is_zero():  # set to zero in place
            self._at_tick = None
            self._zeros += 1
            if self._zeros == _MOST_ZEROS:
                self._parameter = None

    def _mark(self) -> _Mark | None:
        parameter = self._parameter() if self._parameter is not None else None
        grad = parameter.grad if parameter is not None else None
        return (weakref.ref(grad), grad._version) if grad is not None else None

    def _is_zero(self) -> bool:
        grad = self._at_tick[0]() if self._at_tick is not None else None
        return grad is None or not bool(grad.any() if not grad.is_sparse else grad._values().any())

    @staticmethod
    def _is(mark: _Mark, other: _Mark | None) -> bool:
        return other is not None and mark[0]() is other[0]() and mark[1] == other[1]


def _warn_of_gradients() -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        logger.warning(
            "a step uses gradients from before the last commit() or check_host_updates(). No commit contains them, "
            "so after a failure or a change of the workers the step would be made without them. Call both only after "
            "a step."
        )
