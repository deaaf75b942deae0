"""Tick record: makes the live state after a failure a commit of the last tick, so that no tick is repeated.

A tick without a commit copies what changes outside of a step. After a failure, the copies and the live large tensors
together are the state of the tick, if it is proven that nothing wrote these since. docs/decisions/tick-records.md has
the three kinds of tensors (copied, summed, owned), and the proof; ``TickRecords._refusal`` is that proof. Otherwise the
last commit counts. All this is for tensors on the CPU.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elasticstate._native import Identities, sample
from elasticstate.compat import modules, torch_tensors
from elasticstate.compat.modules import state_of
from elasticstate.compat.torch_tensors import copy_all, exact_versions, quick_versions, requires_grad_of
from elasticstate.core.ids import CommitId
from elasticstate.log import logger
from elasticstate.state import rng
from elasticstate.state.module_state import Walk, flag_of, is_usual, parts_of, requires_grad
from elasticstate.state.optimizer_state import is_plain_optimizer, plain_groups
from elasticstate.state.values import Captured, Moved, Tree, checksum_of, dumps, flatten, is_array, split_by_kind

if TYPE_CHECKING:
    from elasticstate.state.base import State


_IMMUTABLE = frozenset({int, float, str, bool, type(None)})
_training = itemgetter("training")  # of a module's attributes


class QuickCapture:
    """Capture of the values of one state without a walk through modules and optimizers, which takes some microseconds
    for each tensor. As long as their registries and states contain the same objects, only the plain values and the
    modes of modules and parameters are read anew.
    """

    def __init__(self, live: Mapping[str, Any], captured: Captured) -> None:
        self._live, self._captured = live, captured
        self._same: list[tuple[str, Any]] = []  # values that must stay the same objects
        self._optimizers: list[tuple[str, torch.optim.Optimizer, Any, list[Any]]] = []
        self._stateful: list[tuple[str, Any]] = []
        self._plain: list[str] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._modules: list[_Modes] = []
        self._containers: list[Any] = []
        self._identities = Identities([])
        self._moved: dict[str, Moved] = live["_places"].moved(live)

    @classmethod
    def make(cls, live: Mapping[str, Any], names: tuple[str, ...], captured: Captured) -> QuickCapture | None:
        """Return a quick capture; None if a value needs a full capture each time.

        ``live``: the attributes of the state; read again at each capture. ``captured``: a full capture of them.
        """
        self = cls(live, captured)
        if not all(self._add(name, live[name]) for name in names):
            return None
        self._identities = Identities(self._containers)
        return self

    def _add(self, name: str, value: Any) -> bool:
        if is_array(value):
            self._same.append((name, value))
            if isinstance(value, torch.Tensor) and flag_of(name) in self._captured:
                self._tensors.append((flag_of(name), value))
        elif isinstance(value, torch.nn.Module):
            return self._add_module(name, value)
        elif isinstance(self._captured[name], Tree):
            self._same.append((name, value))
            if is_plain_optimizer(value):
                return self._add_optimizer(name, value)
            self._stateful.append((name, value))
            if isinstance(value, torch.optim.Optimizer):
                return False  # its groups may change
            return not self._has_tensors(f"{name}.")
        else:
            self._plain.append(name)
        return True

    def _add_module(self, name: str, value: torch.nn.Module) -> bool:
        parts = list(value.modules())
        if self._captured[name].tree["extra"] or not all(map(is_usual, parts)):
            return False
        if not all("training" in vars(part) for part in parts if not modules.compiles_another(type(part))):
            return False
        self._same.append((name, value))
        self._modules.append(_Modes(name, value))
        for part in parts:
            self._containers += [modules.parameters_of(part), modules.buffers_of(part), modules.children_of(part)]
        return True

    def _add_optimizer(self, name: str, value: torch.optim.Optimizer) -> bool:
        entries = list(value.state.values())
        tensors = (item for entry in entries if type(entry) is dict for item in entry.values())
        lists = [group["params"] for group in value.param_groups]
        if not all(type(found) is kind for kind, group in ((dict, entries), (list, lists)) for found in group):
            return False
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return False
        self._containers += [value.state, *entries, value.param_groups, *lists]
        self._optimizers.append((name, value, value.state, value.param_groups))
        return not self._has_tensors(f"{name}.param_groups.")

    def _has_tensors(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._captured)

    def objects(self) -> dict[str, Any] | None:
        """Return the objects that may have changed, for ``expand``; None if a full capture is necessary.

        The tensors and arrays are those of the full capture. Any other tensors are part of the objects: pickle them.
        """
        live = self._live
        for name, value in self._same:
            if live[name] is not value:
                return None
        for _, optimizer, state, groups in self._optimizers:
            if optimizer.state is not state or optimizer.param_groups is not groups:
                return None
        if not self._identities.unchanged() or live["_places"].moved(live) != self._moved:
            return None
        found: dict[str, Any] = {}
        for name, optimizer, _, _ in self._optimizers:
            found[name] = plain_groups(optimizer)
        for name, value in self._stateful:
            found[name] = state_of(value)
        for modes in self._modules:
            found[modes.name] = modes.read()
        for name, tensor in self._tensors:
            found[name] = requires_grad(tensor)
        for name in self._plain:
            value = found[name] = live[name]
            if type(value) not in _IMMUTABLE and (is_array(value) or hasattr(value, "state_dict")):
                return None
        return found

    def expand(self, objects: dict[str, Any]) -> dict[str, Any]:
        """Return what ``capture`` would return except its tensors, from a copy of what ``objects`` returned."""
        found: dict[str, Any] = {name: value for name, value in self._captured.items() if isinstance(value, Tree)}
        found |= {name: objects[name] for name in self._plain}
        found |= {name: objects[name] for name, _ in self._tensors}
        found |= self._moved
        for name, _ in self._stateful:
            found[name] = Tree(flatten(objects[name], name, found))
        for modes in self._modules:
            found[modes.name] = Tree({**self._captured[modes.name].tree, **modes.expand(objects[modes.name])})
        for name, _, _, _ in self._optimizers:
            groups = flatten(objects[name], f"{name}.param_groups", found)
            found[name] = Tree({**self._captured[name].tree, "param_groups": groups})
        return found


class _Modes:
    """The modes of all parts, parameters and buffers of a module."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        parts = [(path, part) for path, part in parts_of(module) if not modules.compiles_another(type(part))]
        self._paths = [path for path, _ in parts]
        self._attributes = [vars(part) for _, part in parts]
        walk = Walk(module, "", "")
        self._names, self._parameters = list(walk.parameters), list(walk.parameters.values())
        self._buffer_names, self._buffers = list(walk.buffers), list(walk.buffers.values())

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return ``training`` of all parts, and ``requires_grad`` of all parameters and of all buffers: much at a time,
        for each tick."""
        return (
            bytes(map(_training, self._attributes)),
            requires_grad_of(self._parameters).tobytes(),
            bytes(map(requires_grad, self._buffers)),
        )

    def expand(self, read: tuple[bytes, bytes, bytes]) -> dict[str, list[str]]:
        """Return the modes as in ``module_state.rest_of``."""
        training, trained = read[0], np.frombuffer(read[1], np.int64)
        return {
            "evaluating": [path for path, flag in zip(self._paths, training, strict=True) if not flag],
            "frozen": [name for name, flag in zip(self._names, trained, strict=True) if not flag],
            "trained": [name for name, flag in zip(self._buffer_names, read[2], strict=True) if flag],
        }


LARGE_BYTES = 1 << 18
"""A larger tensor that cannot be watched is not copied before it was seen to change."""
MAX_BYTES = 8 << 20
"""Limit of what a record copies: beyond it, the commits alone count."""
_SAMPLED = 64  # owned tensors of which samples are taken at a tick
_WORDS = 4  # of eight bytes, of each of them


class Unsuitable(Exception):
    """The state has no tick record for now. The message gives the reason, as a clause."""


class NotSupported(Exception):
    """The state never has a tick record. The message gives the reason, as a clause."""


@dataclass(slots=True)
class Copies:
    """One of the two sets of copies, which are written in turn."""

    tensors: list[torch.Tensor]
    arrays: dict[str, np.ndarray[Any, Any]]


class TickPlan:
    """The kinds of a state's tensors (see above). Valid as long as ``fits`` returns True. Watches the owned ones.

    ``owned``: ids of the tensors that only an optimizer's ``step`` writes. ``changing``: names of other tensors that
    were seen to change. Raises Unsuitable or NotSupported.
    """

    def __init__(self, captured: Captured, owned: Container[int], changing: Container[str]) -> None:
        tensors, arrays, _ = split_by_kind(captured)
        self.tensors, self.arrays = tensors, arrays
        self.quick: QuickCapture | None = None
        self.owned: dict[str, torch.Tensor] = {}
        self.summed: dict[str, torch.Tensor] = {}
        self.copied: list[str] = []
        self._may_be_copied: list[str] = []  # of the summed ones
        size = sum(array.nbytes for array in arrays.values())
        for name, tensor in tensors.items():
            _check_kind(name, tensor)
            is_owned = id(tensor) in owned and tensor.numel() > 0 and not tensor.is_inference()
            can_be_watched = is_owned and torch_tensors.is_own_memory(tensor)
            if can_be_watched and torch_tensors.is_only_owner(tensor):
                self.owned[name] = tensor
            elif tensor.nbytes <= LARGE_BYTES or (name in changing and not is_owned):
                self.copied.append(name)
                size += tensor.nbytes
            elif can_be_watched:
                raise Unsuitable(f"state.{name} shares its memory with another tensor or an array")
            else:
                self.summed[name] = tensor
                if not is_owned:
                    self._may_be_copied.append(name)
        if size > MAX_BYTES:
            raise Unsuitable(f"{size / 1e6:.0f} MB would have to be copied at each tick")
        self._owned_now, self._summed_now = list(self.owned.values()), list(self.summed.values())
        self._features = _features([*self._owned_now, *self._summed_now])
        dense = [tensor for tensor in self._owned_now if _is_dense(tensor)]
        self._dense_count = len(dense)
        self._sampled = dense + dense[:_SAMPLED]  # so that any _SAMPLED in a row, over the end, are one slice
        self._is_quick = quick_versions(self._owned_now) == exact_versions(self._owned_now)
        self._spare = [Copies([], {}), Copies([], {})]
        self.watch = torch_tensors.watch(self._owned_now)

    def fits(self, tensors: dict[str, torch.Tensor], arrays: dict[str, np.ndarray[Any, Any]]) -> bool:
        """Return True if these are the values that the plan was made for."""
        return list(tensors) == list(self.tensors) and list(arrays) == list(self.arrays) and self.has_same(tensors)

    def has_same(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Return True if the owned and the summed tensors are still at their names and addresses."""
        found = [tensors.get(name) for name in (*self.owned, *self.summed)]
        expected = [*self._owned_now, *self._summed_now]
        return all(map(is_, found, expected)) and _features(expected) == self._features

    def versions(self) -> bytes:
        """Return the versions of the owned tensors, for a comparison with ``exact_versions``."""
        return quick_versions(self._owned_now) if self._is_quick else self.exact_versions()

    def exact_versions(self) -> bytes:
        """Return the versions of the owned tensors as torch gives them."""
        return exact_versions(self._owned_now)

    def samples(self, tick: int) -> int:
        """Return a checksum of words of some owned tensors; ``tick`` decides which."""
        first = tick * _SAMPLED % max(1, self._dense_count)
        some = self._sampled[first : first + min(_SAMPLED, self._dense_count)]
        return sample(some, torch.Tensor.data_ptr, torch.Tensor.nbytes, tick, _WORDS)

    def checksums(self) -> dict[str, int]:
        """Return the checksums of the summed tensors, of their whole content."""
        return {name: checksum_of(tensor) for name, tensor in self.summed.items()}

    def to_copy(self, before: dict[str, int], now: dict[str, int]) -> list[str]:
        """Return the names of the tensors that changed between two ``checksums``, and that a plan may copy instead."""
        return [name for name in self._may_be_copied if name in before and now[name] != before[name]]

    def has_all_owners(self) -> bool:
        """Return True if no handle exists. Forgets those that no longer exist."""
        return torch_tensors.forget_handles(self.watch, self._owned_now)

    def copy(self) -> Copies:
        """Copy the values of the first kind, into the set of copies that the last record does not use."""
        copies, last = self._spare
        self._spare = [last, copies]
        live = [self.tensors[name] for name in self.copied]
        if live:
            with torch.no_grad():
                if all(list(map(feature, live)) == list(map(feature, copies.tensors)) for feature in _COPIED_FEATURES):
                    copy_all(copies.tensors, live)
                else:
                    copies.tensors = [tensor.clone() for tensor in live]
        copies.arrays = {name: array.copy() for name, array in self.arrays.items()}
        return copies


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    is_usual = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # not a subclass with functions of its own
    if not is_usual or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotSupported(f"state.{name} is not a dense tensor on the CPU")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill the memory from the tensor's address on."""
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


_COPIED_FEATURES: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.Tensor.size,
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
)


def _features(tensors: list[torch.Tensor]) -> list[object]:
    return [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()) for t in tensors]


MAX_SHARE = 0.05
"""Limit of the share of the training time that slow records take."""
_SLOW_S = 1e-3  # a faster record is not slow, whatever its share
_SLOW_RECORDS = 16  # number over which the share is measured
_RETRIES = (1, 2, 4, 8, 16, 32, 64, 128)  # ticks until the next attempt to make a plan, after each failed attempt
_TRIED = 3  # failed attempts before the reason is logged


@dataclass(frozen=True, slots=True)
class _Record:
    """Content of one tick's record. An object exists only when all of it is recorded."""

    commit: CommitId
    plan: TickPlan
    versions: bytes
    samples: int
    checksums: dict[str, int]
    copies: Copies
    objects: bytes
    quick: QuickCapture | None  # that made ``objects``
    random: rng.Copied
    steps_begun: int
    unseen_writes: int


class TickRecords:
    """The tick record of one state. ``record`` at each tick without a commit, ``take`` after a failure."""

    def __init__(self, live: State) -> None:
        self._live = live
        self._plan: TickPlan | None = None
        self._record: _Record | None = None
        self._changing: set[str] = set()  # large tensors that no optimizer owns and that were seen to change
        self._checksums: dict[str, int] = {}  # of the last record
        self._attempts = 0
        self._wait = 0  # ticks until the next attempt to make a plan
        self._is_off = False
        self._is_logged = False
        self._slow: list[tuple[float, float]] = []  # begin and length of the last slow records

    def drop(self) -> None:
        """Discard the record: it is not that of the last tick any more."""
        self._record = None

    def reset(self) -> None:
        """Discard all that is known of the tensors' content: a commit is about to be copied into them."""
        self._record = self._plan = None
        self._checksums = {}

    def record(self, commit: CommitId) -> None:
        """Record the present tick as ``commit``. If that is impossible, there is no record. Raises nothing."""
        self._record = None
        if self._is_off or not self._is_due():
            return
        started = time.monotonic()
        try:
            self._record = self._made(commit)
            self._attempts = 0
        except Unsuitable as reason:
            self._postpone(str(reason))
        except NotSupported as reason:
            self._is_off = True
            logger.debug("ticks are not recorded: %s", reason)
        except Exception as error:  # a value that cannot be captured or pickled: the next commit raises it
            self._postpone(f"the state cannot be recorded ({type(error).__name__}: {error})")
        seconds = time.monotonic() - started
        if seconds > _SLOW_S:
            self._limit_time(started, seconds)

    def _limit_time(self, started: float, seconds: float) -> None:
        """Stop recording for a while if the last slow records took too much of the training time."""
        self._slow.append((started, seconds))
        if len(self._slow) < _SLOW_RECORDS:
            return
        share = sum(length for _, length in self._slow) / (started + seconds - self._slow[0][0])
        self._slow.clear()
        if share > MAX_SHARE:
            self._record = None
            self._attempts = max(self._attempts, len(_RETRIES) - 1)
            self._postpone(f"it would take {share:.0%} of the training time to record each tick")

    def _made(self, commit: CommitId) -> _Record:
        plan = self._plan
        objects = plan.quick.objects() if plan is not None and plan.quick is not None else None
        if plan is None or objects is None or not plan.has_all_owners():
            plan, objects = self._full_capture()
        blob = dumps(objects)
        if len(blob) > MAX_BYTES:
            raise Unsuitable(f"{len(blob) / 1e6:.0f} MB of objects would have to be copied at each tick")
        checksums = plan.checksums()
        if changed := plan.to_copy(self._checksums, checksums):
            self._changing.update(changed)
            self._plan = None
            return self._made(commit)  # the next plan copies them, so it has fewer checksums
        self._checksums = checksums
        return _Record(
            commit,
            plan,
            plan.versions(),
            plan.samples(commit.tick),
            checksums,
            plan.copy(),
            blob,
            plan.quick,
            rng.copy(),
            _steps_begun,
            torch_tensors.unseen_writes(),
        )

    def _full_capture(self) -> tuple[TickPlan, dict[str, Any]]:
        """Return a plan for the live state, and the objects to record."""
        captured = self._live.capture()
        tensors, arrays, objects = split_by_kind(captured)
        plan = self._plan
        if plan is None or not plan.fits(tensors, arrays) or not plan.has_all_owners():
            plan = self._plan = self._new_plan(captured)
        plan.tensors, plan.arrays = tensors, arrays
        plan.quick = self._live._quick_capture(captured)
        quick = plan.quick.objects() if plan.quick is not None else None
        if quick is None:
            plan.quick = None
            return plan, objects
        return plan, quick

    def _new_plan(self, captured: Captured) -> TickPlan:
        self._plan = None
        if not torch_tensors.can_watch():
            raise NotSupported("tick records do not work with the installed torch")
        watch_steps()
        return TickPlan(captured, self._live._owned(), self._changing)

    def _is_due(self) -> bool:
        """Return False in the ticks between two attempts to make a plan."""
        if self._plan is not None or self._wait <= 0:
            return True
        self._wait -= 1
        return False

    def _postpone(self, reason: str) -> None:
        self._plan = None
        self._wait = _RETRIES[min(self._attempts, len(_RETRIES) - 1)]
        self._attempts += 1
        if self._attempts >= _TRIED and not self._is_logged:
            self._is_logged = True
            logger.warning("a failure will repeat the steps since the last commit, because %s", reason)

    def take(self, newest: CommitId | None, generation: int) -> tuple[CommitId, dict[str, Any], bytes] | None:
        """Return the id, values and random state of the last tick, if they are proven; else None. Drop the record.

        The owned and summed tensors are the live ones: copy them before anything writes them.
        """
        record, self._record = self._record, None
        if record is None or record.commit.generation != generation:
            return None
        if newest is not None and record.commit <= newest:
            return None
        reason = self._refusal(record)
        if reason:
            self._plan = None
            logger.info("the live state is not that of tick %d: %s", record.commit.tick, reason)
            return None
        values: dict[str, Any] = dict(zip(record.plan.copied, record.copies.tensors, strict=True))
        values |= record.copies.arrays
        values |= {**record.plan.owned, **record.plan.summed}
        objects = pickle.loads(record.objects)
        if record.quick is not None:
            objects = record.quick.expand(objects)
        return record.commit, values | objects, rng.pack(record.random)

    def _refusal(self, record: _Record) -> str:
        """Return why the live tensors may differ from those of the tick; "" if they are proven equal."""
        plan = record.plan
        if record.steps_begun != _steps_begun:
            return "an optimizer's step has begun"
        if record.unseen_writes != torch_tensors.unseen_writes():
            return "a function wrote tensors without torch's count of writes"
        if torch_tensors.has_handles(plan.watch):
            return "memory of the state was used without torch's count of writes"
        try:
            tensors, _, _ = split_by_kind(self._live.capture())
        except Exception as error:
            return f"the state cannot be captured ({type(error).__name__}: {error})"
        if not plan.has_same(tensors):
            return "a tensor was replaced"
        if plan.exact_versions() != record.versions:
            return "a tensor was written"
        if plan.samples(record.commit.tick) != record.samples:
            return "a tensor was written without torch's count of writes"
        now = plan.checksums()
        if changed := [name for name, found in now.items() if found != record.checksums[name]]:
            self._changing.update(plan.to_copy(record.checksums, now))
            return f"state.{changed[0]} has changed"
        return ""


_steps_begun = 0


@functools.cache
def watch_steps() -> None:
    """Count the steps of all optimizers from now on, also of those outside the state."""
    register_optimizer_step_pre_hook(_before_a_step)


def _before_a_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    global _steps_begun
    if not _counts_writes(optimizer):
        _steps_begun += 1


def _counts_writes(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if each write of the optimizer's step changes a version: torch's own optimizers, if not fused.

    The first evaluation of a closure then leaves the state provably whole.
    """
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    return type(optimizer).__module__.startswith("torch.optim.") and not is_fused
