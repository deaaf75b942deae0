"""A warning about objects of the script that change while it trains, and that no commit contains.

A worker that is restarted begins with new ones: with a forgotten scheduler it would train at another learning rate than
the other ranks, with a forgotten GradScaler it would add gradients of another scale to theirs, and a forgotten average
of the weights, or target network, begins anew.

Found are the variables of the script that exist before the training function is called: global ones, those of the
callers, arguments, and attributes of ``self``. One that the function makes itself begins anew on all ranks.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from types import FrameType

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elasticstate.log import logger

_KEYS = {LRScheduler: "last_epoch", torch.amp.GradScaler: "_growth_tracker", AveragedModel: "n_averaged"}
"""Classes of such objects, and a key by which the result of their ``state_dict()`` can be told."""

_EFFECTS = {
    LRScheduler: "changes the learning rates of state.{optimizer}",
    torch.amp.GradScaler: "scales gradients",
    AveragedModel: "averages weights",
}

_SAMPLED, _LONGEST_SAMPLE = 3, 16  # parameters of a module, and elements of each

_warned: set[str] = set()


class Forgotten:
    """Variables of the script that the state lacks. Create it when an optimizer of the state is about to step.

    Schedulers and the like are named at once. Modules are named when their parameters have changed: an average of the
    weights that the script makes by itself, a target network. A pretrained network that stays as it is may stay
    outside of the state.

    Args:
        optimizer: value of the state that is about to step; ``name``: its name.
        values: all values of the state.
        all_of: the objects that these refer to.
        tensors: ids of the state's parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name: str,
        values: Mapping[str, object],
        all_of: Iterable[object],
        tensors: Container[int],
    ) -> None:
        self._modules: list[_Sample] = []
        self._commits, self._next_look = 0, 1
        found = [(variable, value) for variable, value in _variables(inspect.currentframe()) if _is_of_interest(value)]
        kept = {id(part) for part in _with_parts(all_of)} if found else set()
        for variable, value in found:
            if id(value) in kept or variable in _warned:
                continue
            kind = next((kind for kind in _KEYS if isinstance(value, kind)), None)
            if kind is None:
                assert isinstance(value, torch.nn.Module)
                if not any(id(p) in tensors for p in value.parameters()):
                    self._modules.append(_Sample(variable, value))
            elif _is_used(value, optimizer):
                saved = any(isinstance(part, dict) and (not part or _KEYS[kind] in part) for part in values.values())
                if not saved:
                    _warn(variable, value, _EFFECTS[kind].format(optimizer=name))

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
    logger.warning(
        "%s (%s) %s, but is in no value of the state: a worker that is restarted begins with a new one, and differs "
        "from the others. Give it to the state: TorchState(..., %s=%s).",
        variable,
        type(value).__name__,
        effect,
        variable.rpartition(".")[2],
        variable,
    )


def _is_of_interest(value: object) -> bool:
    return isinstance(value, (torch.nn.Module, *_KEYS))


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


def _variables(frame: FrameType | None) -> Iterator[tuple[str, object]]:
    """Yield the variables of the script that exist before the training function is called, with their names."""
    is_outside = False
    script: FrameType | None = None  # the innermost of the frames of the script that are not seen yet
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == "elasticstate":
            if script is not None and not is_outside:  # the training function
                is_outside = True
                code = script.f_code
                given = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_freevars}
                yield from _of(script, given)
            script = None
        elif package != "torch":
            script = frame
            yield from _of(frame, frame.f_locals if is_outside else ())
        frame = frame.f_back


def _of(frame: FrameType, names: Iterable[str]) -> Iterator[tuple[str, object]]:
    """Yield these local variables and the global ones of a frame, and the attributes of its ``self``."""
    given = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
    yield from given.items()
    if hasattr(owner := given.get("self"), "__dict__"):
        yield from ((f"self.{name}", value) for name, value in list(vars(owner).items()))
    if frame.f_locals is not frame.f_globals:
        yield from list(frame.f_globals.items())
