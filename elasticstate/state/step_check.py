"""StepCheck: an error if an optimizer trains what the commits have and is not in them itself, or the reverse.

An optimizer is judged at its first step in each world, and again if its groups or the values of the state are replaced.
In most scripts identity decides: the optimizer is a value of the state, or none. But a value may also hold the
optimizer, or receive a copy of it before each commit: an object with ``state_dict()``, another optimizer, a plain dict.
Then the first commit after the step decides, by its content.

A script that catches the error gets it again at each step and commit, and at its end. ``Forgotten``,
``PlainAttributes`` and ``Accumulation`` warn of what else changes while a script trains and no commit contains.

Not judged: states with a ``capture`` of their own, and steps in compiled code, where torch calls no hooks.
See docs/decisions/checks-of-the-script.md.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elasticstate.compat import dtensors
from elasticstate.errors import UsageError
from elasticstate.log import logger
from elasticstate.state.base import State, committer_of, search
from elasticstate.state.forgotten import WARNED, Forgotten, are_equal, sample_of
from elasticstate.state.loader import is_stateful
from elasticstate.state.optimizer_state import is_plain_optimizer
from elasticstate.state.values import Captured, Tree, checksum_of, is_array

_has_warned = False


class StepCheck:
    """Context of a training function: judges the optimizers that step in it. See above."""

    def __init__(self, state: State, train: Callable[..., object]) -> None:
        """``train``: the call of the training function."""
        self._state, self._train = state, train
        self._hook: Any = None
        self._judged: dict[int, _Judged] = {}
        self._forgotten: Forgotten | None = None
        self._attributes: PlainAttributes | None = None
        self._undecided: list[weakref.ref[Optimizer]] = []  # the next commit decides
        self._refusal = ""  # the error of the first optimizer that was refused: the script may have caught it

    def __enter__(self) -> None:
        if self._state._step_sources() is not None:
            with suppress(Exception):  # of the script's objects
                self._attributes = PlainAttributes(self._state, self._sources())
            self._hook = register_optimizer_step_pre_hook(self._before_a_step)
            committer_of(self._state).before_commit = self._before_a_commit

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
            committer_of(self._state).before_commit = committer_of(self._state).before_tick = None
        if error is None:
            self._raise_refusal()

    def _raise_refusal(self) -> None:
        if self._refusal:
            raise UsageError(self._refusal)

    @contextmanager
    def _noting_refusal(self) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            self._refusal = str(error)
            raise

    def _before_a_step(self, optimizer: Optimizer, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        self._raise_refusal()
        judged = self._judged.get(id(optimizer))
        if judged is not None and judged.is_current(optimizer, self._state):
            judged.accumulation.begin_step()
            return
        found = _Sources(self._sources())
        self._judged[id(optimizer)] = _Judged(optimizer, self._state, found)
        committer_of(self._state).before_tick = self._before_a_tick
        if (name := found.name_of(optimizer)) is not None:
            with suppress(Exception):  # of the script's objects
                self._forgotten = self._forgotten or Forgotten(self._train)
                self._forgotten.judge(optimizer, name, found.values, found.objects(), found.tensors)
        if found.has_all_of(optimizer):  # nearly always
            return
        with self._noting_refusal():
            self._require_not_replaced(optimizer)
        content = self._content()
        with self._noting_refusal():
            if content is not None and not found.judge(optimizer, content, is_commit=False):
                self._undecided.append(weakref.ref(optimizer))

    def _require_not_replaced(self, optimizer: Optimizer) -> None:
        if owner := self._state._replaced(optimizer):
            kind = type(getattr(self._state, owner)).__name__
            raise UsageError(
                f"{_kind(optimizer)} steps on what state.{owner} was before this worker received or restored it. This "
                f"value, a {kind}, is pickled in each commit and replaced by a copy, so the script trains an object "
                "that the state does not have any more. Give each module and optimizer in it to the state as a value "
                f"of its own, in a TorchState, or use state.{owner} inside the training function."
            )

    def _before_a_commit(self) -> None:
        self._raise_refusal()
        if self._forgotten is not None:
            with suppress(Exception):  # of the script's objects
                sources = self._sources()
                self._forgotten.begin_commit(sources, lambda: _Sources(sources).objects())
        if self._attributes is not None:
            with suppress(Exception):
                self._attributes.begin_commit(self._sources())
        optimizers, self._undecided = [reference() for reference in self._undecided], []
        content = self._content() if optimizers else None
        for optimizer in optimizers:
            if optimizer is not None and content is not None:
                with self._noting_refusal():
                    _Sources(self._sources()).judge(optimizer, content, is_commit=True)

    def _before_a_tick(self) -> None:
        for judged in self._judged.values():
            judged.accumulation.end_tick()

    def _sources(self) -> Mapping[str, object]:
        return self._state._step_sources() or {}

    def _content(self) -> _Content | None:
        """Return what a commit would contain now; None if the state cannot be captured, which the commit reports."""
        attached = committer_of(self._state).attached
        try:
            tensors = attached.capture()[0] if attached is not None else {}
            return _Content({**self._state.capture(), **tensors})
        except Exception:
            return None


class _Judged:
    """A judgement of an optimizer, and the objects on which it is based."""

    def __init__(self, optimizer: Optimizer, state: State, sources: _Sources) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.accumulation = Accumulation(optimizer)
        self._attached = committer_of(state).attached
        self._values = [(name, value) for name, value in sources.values.items() if _is_kept(value)]
        self._sizes = _sizes(optimizer)
        is_inside = sources.name_of(optimizer) is not None
        self._unwritten = [
            p for p in _parameters(optimizer) if p.grad is None and not (is_inside and id(p) in sources.tensors)
        ]

    def is_current(self, optimizer: Optimizer, state: State) -> bool:
        live = state.__dict__
        return (
            self._optimizer() is optimizer
            and committer_of(state).attached is self._attached
            and _sizes(optimizer) == self._sizes
            and all(live.get(name, value) is value for name, value in self._values)
            and all(p.grad is None for p in self._unwritten)
        )


class _Sources:
    """The values of a state, and those attached to it. ``tensors``: names of parameters and buffers, by id."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values
        self.tensors: dict[int, str] = {}
        self._optimizers: list[tuple[str, Optimizer]] = []
        for name, value in values.items():
            if not _is_kept(value) or isinstance(value, torch.nn.Module | Optimizer):
                self._add(name, value)

    def _add(self, name: str, value: object) -> None:
        """Add a module, an optimizer, or those in a value that is pickled."""
        found, _ = search(value, stops=(torch.nn.Module, Optimizer))
        for part in found:
            if isinstance(part, torch.nn.Module):
                for key, tensor in [*part.named_parameters(), *part.named_buffers()]:
                    path = key.removeprefix("_orig_mod.").removeprefix("module.")  # of a compiled module, of DDP
                    self.tensors.setdefault(id(tensor), f"state.{name}.{path}" if part is value else f"state.{name}")
            elif isinstance(part, torch.Tensor):
                self.tensors.setdefault(id(part), f"state.{name}")
            elif isinstance(part, Optimizer):
                self._optimizers.append((name, part))

    def name_of(self, optimizer: Optimizer) -> str | None:
        """Return the name of the value that the optimizer is, or that shares its state; None: there is none."""
        for name, found in self._optimizers:
            if found is optimizer or getattr(found, "state", None) is optimizer.state:
                return name
        return None

    def objects(self) -> Iterator[object]:
        """Yield all objects that the values refer to, without the parts of modules and optimizers."""
        for value in self.values.values():
            yield from search(value, stops=(torch.nn.Module, Optimizer))[0]

    def has_all_of(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer and the parameters that it writes are in the values."""
        return self.name_of(optimizer) is not None and all(id(p) in self.tensors for p in _written(optimizer))

    def judge(self, optimizer: Optimizer, content: _Content, is_commit: bool) -> bool:
        """Raise UsageError, or warn, if the commits lack something. Return False if the next commit decides.

        ``is_commit``: this is the next commit.
        """
        name = self.name_of(optimizer)
        written = _written(optimizer)
        inside = [p for p in written if id(p) in self.tensors or content.is_alias(p)]
        known = set(map(id, inside))
        outside = [p for p in written if id(p) not in known]
        if name is None:
            may_have = self._may_have(optimizer, content)
            if may_have and not is_commit:
                return False
            ours = [*inside, *(p for p in outside if is_commit and content.has_copy_of(p))]
            if not ours or not may_have or not content.has_state_of(optimizer):
                self._report(optimizer, ours)
                return True
        missing = [p for p in outside if not (content.has_copy_of(p) if is_commit else content.may_have(p))]
        if missing:
            value = f"state.{name} ({_kind(optimizer)})" if name else _kind(optimizer)
            raise UsageError(
                f"{value} steps on a parameter of shape {tuple(missing[0].shape)} that is in no value of the state: a "
                "worker that is restarted would continue with other weights, and the ranks would differ without any "
                "notice. Give its module to the state, and create the optimizer from the parameters of that same "
                "module."
            )
        return is_commit or not outside

    def _may_have(self, optimizer: Optimizer, content: _Content) -> bool:
        """Return True if a value holds the optimizer, or may hold a copy of its state."""
        if content.is_open or any(_sizes(other) == _sizes(optimizer) for _, other in self._optimizers):
            return True
        holders = [value for value in self.values.values() if _is_kept(value) and not isinstance(value, LRScheduler)]
        for holder in holders:
            found, is_whole = search(holder)
            if not is_whole or any(part is optimizer for part in found):
                return True
        return False

    def _report(self, optimizer: Optimizer, inside: list[torch.Tensor]) -> None:
        """Report an optimizer that is in no value. ``inside``: parameters of the state that it writes."""
        global _has_warned
        if inside:
            parameter = self.tensors.get(id(inside[0]), "a parameter of the state")
            other = "".join(f"state.{name} is another object. " for name, _ in self._optimizers[:1])
            raise UsageError(
                f"{_kind(optimizer)} steps on {parameter}, but is in no value of the state: a worker that is restarted "
                "would continue with a new optimizer, and the ranks would differ without any notice. "
                f"{other}Give it to the state: TorchState(..., optimizer=optimizer). If a value keeps its state_dict() "
                "instead, renew that value before each commit."
            )
        if not _has_warned:
            _has_warned = True
            logger.warning(
                "%s trains parameters that are in no value of the state, and is in none itself: a worker that is "
                "restarted begins with new ones. Give module and optimizer to the state.",
                _kind(optimizer),
            )


class _Content:
    """Content of a commit: tensors and arrays by their sizes, and objects."""

    def __init__(self, captured: Captured) -> None:
        self._tensors: dict[int, dict[torch.dtype, list[torch.Tensor]]] = {}
        self._checksums: dict[tuple[int, torch.dtype], set[int]] = {}
        self._addresses: set[tuple[int, int]] = set()
        self._groups: list[Any] = []
        self.is_open = False
        """True if a plain value may have, or get before the commit, the state of an optimizer in any form."""
        self._is_opaque = False
        for value in captured.values():
            self._add(value.tree if isinstance(value, Tree) else value, is_plain=not isinstance(value, Tree))

    def _add(self, value: object, is_plain: bool) -> None:
        if is_array(value):
            self._add_tensor(value)
            return
        found, is_whole = search(value)
        self._is_opaque |= not is_whole
        self.is_open |= not is_whole
        for part in found:
            is_empty = part is None or (isinstance(part, dict | list | tuple | bytes | bytearray) and not part)
            if is_array(part):
                self._add_tensor(part)
            elif isinstance(part, bytes | bytearray) and not is_empty:
                self._is_opaque |= is_plain
            elif isinstance(part, dict) and "param_groups" in part:
                self._groups.append(part["param_groups"])
            else:
                self.is_open |= is_plain and is_empty
                continue
            self.is_open |= is_plain

    def _add_tensor(self, value: Any) -> None:
        try:
            tensor = _local(value)
            tensor.data_ptr()
        except (TypeError, ValueError, RuntimeError, NotImplementedError):  # torch lacks the dtype; no memory
            return
        self._tensors.setdefault(tensor.numel(), {}).setdefault(tensor.dtype, []).append(tensor)
        self._addresses.add((tensor.data_ptr(), tensor.numel()))

    def is_alias(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor itself is in the commit."""
        local = _local(tensor)
        return (local.data_ptr(), local.numel()) in self._addresses and local.data_ptr() != 0

    def may_have(self, tensor: torch.Tensor) -> bool:
        return self.is_open or _local(tensor).numel() in self._tensors

    def has_copy_of(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor of the commit has the same content, perhaps in another precision."""
        if self._is_opaque or self.is_alias(tensor):
            return True
        local = _local(tensor)
        for dtype, others in self._tensors.get(local.numel(), {}).items():
            key = local.numel(), dtype
            if key not in self._checksums:
                self._checksums[key] = set(map(checksum_of, others))
            if checksum_of(local.to(dtype)) in self._checksums[key]:
                return True
        return False

    def has_state_of(self, optimizer: Optimizer) -> bool:
        """Return True if the commit has all tensors of the optimizer's state; if there are none, its groups."""
        found, is_whole = search(list(optimizer.state.values()))
        tensors = [part for part in found if isinstance(part, torch.Tensor) and part.numel() > 0]
        if self._is_opaque or not is_whole:
            return True
        if tensors:
            return all(map(self.has_copy_of, tensors))
        return any(_has_rates_of(groups, optimizer) for groups in self._groups)


def _kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _is_kept(value: object) -> bool:
    """Return True for a value that a state captures with its own methods, instead of pickling it."""
    return isinstance(value, torch.nn.Module | Optimizer) or is_stateful(value)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _written(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters with a gradient. If there is none yet, return all that may get one.

    A closure may compute the gradients only later. Or the optimizer belongs to another module than the one that trains.
    """
    with_gradient = [p for p in _parameters(optimizer) if p.grad is not None]
    return with_gradient or [p for p in _parameters(optimizer) if p.requires_grad]


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _has_rates_of(groups: Any, optimizer: Optimizer) -> bool:
    """Return True if these are the parameter groups of ``optimizer.state_dict()``, as far as numbers show."""
    try:
        return [group.get("lr") for group in groups] == [group.get("lr") for group in optimizer.param_groups]
    except (AttributeError, TypeError, RuntimeError):  # another form; a learning rate that is a tensor
        return True


def _local(value: Any) -> torch.Tensor:
    """Return an array, or this rank's part of a tensor, as a plain tensor."""
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.require(value, requirements="W"))
    return (dtensors.local_of(tensor) if dtensors.is_dtensor(tensor) else tensor).detach()


_at_begin: weakref.WeakKeyDictionary[State, frozenset[str]] = weakref.WeakKeyDictionary()
"""Places of the plain attributes that modules of a state had when it was first trained."""


class PlainAttributes:
    """Numbers and tensors that modules and optimizers of the state have as plain attributes, which no commit contains.

    A restore leaves them as they are, and a worker that is restarted begins with the script's: an average that is no
    buffer would be updated twice with one batch on one rank, and begin anew on another. Named are those that are there
    before the first training, and change from one look to the next. A tensor that was computed from parameters, as by a
    weight norm, is a result of its step.
    """

    def __init__(self, state: State, values: Mapping[str, object]) -> None:
        if state not in _at_begin:
            _at_begin[state] = frozenset(place for place, _, _ in _attributes(values))
        self._places = _at_begin[state]
        self._known: dict[str, Any] = {}
        self._commits, self._next_look = 0, 1

    def begin_commit(self, values: Mapping[str, object]) -> None:
        """Look at fewer and fewer commits, as :class:`Forgotten` does."""
        self._commits += 1
        if not self._places or self._commits != self._next_look:
            return
        self._next_look *= 2
        found = [(place, value, kept) for place, value, kept in _attributes(values) if place in self._places]
        changed = [name for name, _, kept in found if name in self._known and not are_equal(kept, self._known[name])]
        if changed:
            committed = [value for value in values.values() if isinstance(value, int | float | torch.Tensor)]
            live = {place: value for place, value, _ in found}
            self._warn([name for name in changed if not any(are_equal(live[name], other) for other in committed)])
        self._known = {place: kept for place, _, kept in found}

    def _warn(self, changed: list[str]) -> None:
        if new := [place for place in changed if place not in WARNED]:
            WARNED.update(new)
            logger.warning(
                "state.%s%s: plain attributes of modules or optimizers change while the script trains, and no commit "
                "contains them. A restore leaves them as they are, and a worker that is restarted begins with the "
                "script's. Make a tensor of a module a buffer (register_buffer), keep a number of an optimizer in its "
                "param_groups, and give any other number to the state.",
                ", state.".join(new[:_NAMED]),
                ", …" if len(new) > _NAMED else "",
            )


_NAMED = 3  # attributes in a warning
_NO_EXTRA_STATE = torch.nn.Module.get_extra_state


def _attributes(values: Mapping[str, object]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place of each attribute, its value, and what is compared of it."""
    for name, root in values.items():
        parts: Iterable[tuple[str, object]] = ()
        if isinstance(root, torch.nn.Module):
            parts = root.named_modules(prefix=name)
        elif is_plain_optimizer(root):
            parts = [(name, root)]
        for path, part in parts:
            if isinstance(part, torch.nn.Module) and type(part).get_extra_state is not _NO_EXTRA_STATE:
                continue
            for key, value in list(vars(part).items()):
                if type(value) in (int, float):
                    yield f"{path}.{key}", value, value
                elif type(value) is torch.Tensor and value.grad_fn is None and not value.is_meta and value.numel():
                    yield f"{path}.{key}", value, sample_of(value)


_Mark = tuple["weakref.ref[torch.Tensor]", int]
"""A gradient, and its version."""

_MOST_ZEROS = 20  # at ticks, before no more is looked at: a look waits for the device


class Accumulation:
    """Warns of gradients that accumulate over a tick: no commit contains them, and a new world has none.

    So after a failure, or a planned change at that tick, a step would lack the gradients of some batches, without any
    notice. The gradient of one parameter is followed: it was begun before a tick if the step uses the tensor that the
    tick met, and something has been added to it since. Create the object when the optimizer is about to step.
    """

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


@functools.cache
def _warn_of_gradients() -> None:
    logger.warning(
        "a step uses gradients from before the last commit() or check_host_updates(). No commit contains them, so "
        "after a failure or a change of the workers the step would be made without them. Call both only after a step."
    )
