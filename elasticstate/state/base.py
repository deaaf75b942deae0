"""State: values that a job commits, restores and syncs. Independent of their types and of the session in use.

``ObjectState`` is the state of plain values, and ``search`` finds the objects to which a value refers.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence, Set
from contextlib import suppress
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from elasticstate.compat.modules import is_loader, load_state, state_of
from elasticstate.core.ids import CommitId
from elasticstate.errors import StateError, UnknownValueError, UsageError
from elasticstate.state.committer import Committer, StateJoinHook
from elasticstate.state.divergence import Exclusions, Kinds
from elasticstate.state.in_place import InPlace, Places
from elasticstate.state.loader import has_exact_state, has_iterators, require_no_loader_inside, require_own_position
from elasticstate.state.module_state import flag_of, load_bare, requires_grad
from elasticstate.state.tick_record import QuickCapture
from elasticstate.state.values import (
    CANNOT_BE_PICKLED,
    Captured,
    Parts,
    Tree,
    copy_with_same_tensors,
    dumps,
    is_array,
    require_no_world,
)

_MAX_OBJECTS = 200_000  # that a search looks at
_ATOMS = (str, int, float, complex, type, ModuleType, BuiltinFunctionType)
_LEAVES = (torch.Tensor, np.ndarray, bytes, bytearray, DataLoader, Dataset, Sampler, LRScheduler)


def search(root: object, stops: tuple[type, ...] = ()) -> tuple[list[object], bool]:
    """Return all objects that ``root`` refers to, itself included, and False if there are too many.

    The search goes through containers, attributes and variables of functions. ``stops``: classes of objects whose
    references are not followed.
    """
    found: list[object] = []
    seen = {id(root)}
    pending = deque([root])
    while pending and len(found) < _MAX_OBJECTS:
        value = pending.popleft()
        found.append(value)
        for child in _children(value) if not isinstance(value, stops) else ():
            if id(child) not in seen and _answers(child) and not isinstance(child, _ATOMS):
                seen.add(id(child))
                pending.append(child)
    return found, not pending


def _answers(value: object) -> bool:
    """Return False for a proxy that raises whatever it is asked, as Werkzeug's do outside of a request."""
    try:
        return value.__class__ is not None
    except Exception:
        return False


def _children(value: Any) -> list[Any]:
    if value is None or isinstance(value, _LEAVES) or hasattr(type(value), "_is_not_searched"):
        return []
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if not is_empty(cell)]
    slots = [getattr(value, name, 0) for name in getattr(type(value), "__slots__", ()) if name != "__dict__"]
    return [*vars(value).values(), *slots, *_globals_of(value)] if hasattr(value, "__dict__") else slots


def is_empty(cell: CellType) -> bool:
    """Return True for a variable of an enclosing function that is not assigned yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _globals_of(value: object) -> list[Any]:
    """Return the global variables, and those of enclosing functions, that the object's ``state_dict`` reads."""
    function = getattr(type(value), "state_dict", None)
    if not isinstance(function, FunctionType) or isinstance(value, torch.nn.Module | Optimizer):
        return []
    names = function.__code__.co_names
    return [function, *(function.__globals__[name] for name in names if name in function.__globals__)]


Contained = list[tuple[str, "weakref.ref[torch.nn.Module | Optimizer]"]]
"""Modules and optimizers in values, each with the name of the value."""


def contained_in(values: Mapping[str, object]) -> Contained:
    """Return the modules and optimizers to which these values refer."""
    kinds = torch.nn.Module, Optimizer
    found: Contained = []
    for name, value in values.items():
        if not isinstance(value, _ATOMS):
            with suppress(Exception):  # of the script's objects
                found += [(name, weakref.ref(part)) for part in search(value, kinds)[0] if isinstance(part, kinds)]
    return found


_CALL_S = 1e-6  # time of a call of commit() that does not save


class State(Joinable):
    """Values that are committed, restored and synced together.

    The keyword arguments become attributes that may be reassigned freely. A name that was not given to the constructor
    raises AttributeError. To define a state of your own, implement ``capture`` and ``apply``. All other methods use
    these two. Each rank's commit also contains the random state of python, numpy and torch.

    When ranks have different numbers of batches, pass the state to torch's join context, after the model. Each batch
    must end one tick. A rank without inputs ends its ticks together with the others, and receives the last state::

        with Join([ddp_model, state]):
            for batch in batches:
                ...
                state.commit()

    Without ``run``, commits stay in this process as (0, 1), (0, 2), ...; under ``elasticrun`` that raises UsageError.
    """

    _is_not_searched = True  # see _children

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name.startswith("_") or not name.isidentifier() or self._is_taken(name):
                raise UsageError(
                    f"{name!r} cannot be the name of a value of {type(self).__name__}. Choose a name that is an "
                    f"identifier, does not begin with '_', and is no attribute of the class."
                )
        super().__init__()
        self._names = tuple(values)
        self._exclusions = Exclusions()
        self._reset_callbacks: list[Callable[[], object]] = []
        self._restore_pre_hooks: list[Callable[[dict[str, Any]], object]] = []
        self._committer = Committer(self)
        self._places: Places | None = None  # the objects that a restore writes into, from the first capture on
        self._has_joined = False  # this state was passed to a Join: only then ticks ask torch
        for name, value in values.items():
            setattr(self, name, value)
            require_no_loader_inside(name, value)
        self._contained = contained_in(self._pickled())
        for name, value in self._parts().items():
            if callable(attach := getattr(type(value), "attach_to_state", None)):
                attach(value, self, name)

    def __getattr__(self, name: str) -> Any:
        raise UnknownValueError(self._unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self._names:
            raise UnknownValueError(self._unknown(name))
        if not name.startswith("_"):
            self._check_value(name, value)
        object.__setattr__(self, name, value)

    # ------------------------------------------------------------------------------- methods that a subclass implements

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """Return the live state as a flat dict of names and values: tensors, numpy arrays, objects that can be pickled.

        This method copies nothing. The caller copies the values immediately afterwards.
        """

    @abstractmethod
    def apply(self, values: Captured) -> None:
        """Make ``values``, with the names that ``capture`` returned, the live state. ``restore`` and ``sync`` call it.

        The bytes are verified before the call. Tensors and arrays are views of the commit: copy them *into* your own
        (``mine.copy_(value)``). Keeping a view is an error, because the next step would write into the commit. Objects
        are new, so you may keep them.

        In a subclass of ``ObjectState`` or ``TorchState``, the tensors and arrays that ``capture`` returns contain the
        commit's bytes already, where shape and dtype are the same: the pass that verifies the bytes copies them, too.
        """

    def _load_targets(self) -> Captured | None:
        """Return the captured values that a restore may overwrite before it calls ``apply``; None: it copies all."""
        return None

    def _optimizer_owned(self) -> Set[int]:
        """Return the ids of the captured tensors that only an optimizer's ``step`` writes. See async_commit.py."""
        return frozenset()

    def _bytes_to_come(self) -> int | None:
        """Return the bytes that the first steps of optimizers will add to a commit; None: not known."""
        return None

    def _quick_capture(self, captured: Captured) -> QuickCapture | None:
        """Return a quicker way to repeat the capture ``captured``; None if there is none. See tick_record.py."""
        return None

    def _owned(self) -> Container[int]:
        """Return the ids of the captured tensors that a tick record need not copy. See tick_record.py."""
        return ()

    def _step_sources(self) -> Mapping[str, object] | None:
        """Return the values in which StepCheck looks for optimizers; None: they may be elsewhere."""
        return None

    def _require_picklable(self) -> None:
        """Raise StateError if a plain value can never be committed, before this worker enters a world: in the first
        one only the root commits, and the others would try again."""
        try:
            dumps(self._pickled())
        except StateError as error:
            if isinstance(error.__context__, CANNOT_BE_PICKLED):  # others may depend on the world
                raise

    def _drop_gradients(self) -> None:
        """Set gradients to None. A failure inside ``backward`` leaves partial gradients, different on each rank."""

    def _parts(self) -> dict[str, Any]:
        """Return the values by name. A subclass may take a value apart."""
        return {name: getattr(self, name) for name in self._names}

    def _add_values(self, values: Mapping[str, Any]) -> None:
        """See ``extension.add_values``."""
        if self._committer.session.generation > 0 or self.commits != (None, None):
            raise UsageError(
                f"{', '.join(values)} cannot be added to a state that is in use. Do so before the first commit, and "
                "outside the function decorated with run."
            )
        if taken := [name for name in values if name in self._names or self._is_taken(name)]:
            raise UsageError(f"{taken[0]!r} is a value or an attribute of the state already. Choose another name.")
        self._names += tuple(values)
        for name, value in values.items():
            setattr(self, name, value)

    def _leave_world(self) -> None:
        """Drop what belongs to the world that this worker is about to leave."""

    def _replicates(self) -> Callable[[str], bool]:
        """Return a predicate for the names of a commit's tensors that training keeps equal on all ranks."""
        return lambda name: False

    def _pickled(self) -> dict[str, Any]:
        """Return the values that are pickled, so that a restore replaces them by copies."""
        return {}

    def _restore_pickled(self, values: Captured) -> None:
        """Restore the values that are pickled, in place where possible. All others have been restored."""
        parts = self._parts()
        pickled = {name for name in parts if not (isinstance(values[name], Tree) or is_array(values[name]))}
        own = (value for name, value in parts.items() if name not in pickled)
        moved = (values[each].paths for name in pickled if (each := f"{name}.moved") in values)
        in_place = InPlace(own, frozenset(itertools.chain(*moved)))
        places = self._recorded({name: value for name, value in parts.items() if name in pickled})
        for name in sorted(pickled):
            in_place.assign(values[name], places.get(name))
        for name in sorted(pickled):
            setattr(self, name, in_place.restore(parts[name], values[name]))

    def _recorded(self, pickled: Mapping[str, Any]) -> Places:
        """Return the objects of the pickled values, as they were when this was first called."""
        if self._places is None:
            self._places = Places(pickled)
        return self._places

    def _replaced(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the name of the value that has contained the optimizer, or a module whose parameters it writes, and
        that a restore or sync has replaced since; "" if there is none. For StepCheck."""
        written = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, reference in self._contained:
            part = reference()
            is_used = part is optimizer or (
                isinstance(part, torch.nn.Module) and not written.isdisjoint(map(id, part.parameters()))
            )
            if is_used and all(found is not part for found in search(getattr(self, name), (type(part),))[0]):
                return name
        return ""

    def _value_kinds(self) -> Kinds:
        """Return the names given to the constructor, with the kind of each value. A sync compares them."""
        return dict.fromkeys(self._names, False)

    def _continue_iterators(self, loaded: Mapping[str, Any], has_trained: bool) -> None:
        """Load the position of each object that the training iterates over into that object: only an iterator that
        follows ``load_state_dict()`` begins there.

        Also end worker processes that were forked in the last world, or before the first one, for another rank and
        size.

        Args:
            loaded: copies of the states that were loaded since the last call of ``train``. They count more than
                ``state_dict()``, which may return the position of an older iterator.
            has_trained: False at the first call of ``train`` in this process.
        """
        for name, value in self._parts().items():
            if name in loaded and callable(getattr(value, "load_state_dict", None)):  # else replaced since
                load_state(value, loaded[name])
            elif has_iterators(value) and (has_trained or is_loader(value)):
                load_state(value, copy_with_same_tensors(state_of(value)))

    # ---------------------------------------------------------------------------------------- methods that a user calls

    def commit(self, every: int = 1) -> None:
        """Make the present state the restore point, and end the tick.

        Tensors on a GPU are copied while training continues. The commit is complete, and can be restored, when the copy
        is complete. If the world ends by a failure before that, the job restores the previous commit.

        Args:
            every: save only at each ``every``-th tick of the generation: a count, because ticks are equal on all ranks.

        Raises:
            UsageError: ``every`` is less than 1; or, under ``elasticrun``, the call is outside a ``run`` function.
            StateError, CommitStorageError: a value cannot be committed (the message names it); too little storage.
            HostsUpdatedInterrupt, CollectiveError: the generation ends with this tick, or a collective of it has failed
                before, whatever caught its error. ``run`` handles both.
        """
        if every < 1:
            raise UsageError(f"commit(every={every}): must be at least 1 (1 saves at each tick)")
        if (self._committer.session.ticks + 1) % every == 0:
            began_at = time.monotonic()
            self._committer.begin()
            self._committer.session.record_commit_time(time.monotonic() - began_at)
            self._committer.compare_once(self._exclusions)
        elif self._committer.session.ticks == 0:  # the job learns that commits will come
            self._committer.session.record_commit_time(_CALL_S)
        self.check_host_updates()

    def save(self) -> None:
        """Do the same as ``commit()``. A save that did not end the tick would give one commit id two contents."""
        self.commit()

    def check_host_updates(self) -> None:
        """End the tick without saving. Raises like ``commit``, and UsageError for the first joinable of a Join."""
        if self._has_joined and Join.notify_join_context(self) is not None:  # only the first joinable starts work there
            raise UsageError("The state is the first object of a Join. Pass the model first: Join([ddp_model, state]).")
        self._committer.tick()

    def restore(self) -> None:
        """Restore this worker's own last commit, with its random state. All gradients become None.

        If the commit is damaged, a warning is logged and the previous commit is used. In a world with other ranks, all
        must call it after the same tick, and restore the same commit: it waits for all of them.

        Raises StateError if there is no intact commit; StateMisfitError if the commit does not fit the live objects;
        CollectiveError if the other ranks restore another commit than this one can. ``run`` handles the last one: the
        world forms again.
        """
        self._committer.restore()

    def sync(self) -> None:
        """Send the root's state to the ranks that lack it, and seal (generation, 0) on all ranks.

        ``run`` calls it once in each world; later calls do nothing. If no rank lacks the state, no collective runs,
        else only the root and the lacking ranks take part. Outside a world it saves. With ``--verify-sync``, ``check``
        follows.

        Raises:
            StateError: the names of the values differ between the ranks, before anything is sent. In the job's first
                world all ranks raise it, later only the ranks that differ from the root. Also what ``commit`` and
                ``restore`` raise.
            StateDivergedError: see ``check``.
        """
        if self._committer.sync():
            type(self).check(self)  # of the class: a subclass may allow a value of this name

    def check(self) -> None:
        """Compare the newest commits of all ranks with one small collective. All ranks must call it.

        After a sync, with ``--verify-sync``, it compares the live values of all ranks.

        The comparison leaves out objects that are pickled by value (lambdas, local classes), running statistics of
        batch and instance norms, and the names given to ``exclude_from_check``. The log names the last two once.
        Outside a world, and in a world of one, ``check`` verifies the checksum of this worker's commit.

        Raises:
            StateDivergedError: the commits, or the live values, differ. The message names the tensors and objects, and
                the ranks.
            StateError: there is no commit to compare, or this worker's commit is damaged.
        """
        self._committer.check(self._exclusions)

    def exclude_from_check(self, *names: str) -> None:
        """Leave values that differ by rank by design out of ``check()``. Pass the same names on all ranks.

        A name is one that ``check()`` reports, or its beginning up to a dot: "model.buffers.codebook", "loader".
        """
        self._exclusions.add(names)

    def progress(self) -> None:
        """Report progress to the agent, during work that takes longer than ``--hang-timeout`` without a tick."""
        self._committer.session.progress()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Add functions to call, in order, in each new world before ``sync``, except in the job's first world.

        Each worker that holds a commit calls them, including a restarted worker that resumes from a commit. A worker
        without a commit receives the state of the others, which contains the changes of their callbacks. So the
        functions must depend on the committed state and on the world alone.
        """
        self._reset_callbacks.extend(callbacks)

    def register_restore_pre_hook(self, hook: Callable[[dict[str, Any]], object]) -> None:
        """Add a function to call before a commit is loaded into the objects of the state, by a restore or a sync.

        It gets the plain values of the commit by name: those that are no tensors, no arrays and no objects with
        ``state_dict()``. There it can make the live objects fit, when the training changes their structure::

            def grow(values):
                while len(net.layers) < values["depth"]:
                    net.layers.append(Block())

            state.register_restore_pre_hook(grow)

        Parameter groups that the optimizer lacks are added afterwards, without a hook. The function may be called
        repeatedly for one commit, and for a commit that is older than the live state.
        """
        self._restore_pre_hooks.append(hook)

    def _before_load(self, objects: Callable[[], Mapping[str, Any] | None]) -> None:
        """Call the hooks. ``objects``: returns the objects of the commit; None if it cannot be loaded."""
        found = objects() if self._restore_pre_hooks else None
        if found is not None:
            plain = {
                name: value for name, value in found.items() if not isinstance(value, Tree | Parts) and "." not in name
            }
            for hook in self._restore_pre_hooks:
                hook(plain)

    def on_reset(self) -> None:
        """Call the reset callbacks. ``run`` does so in each world that this worker enters with a commit."""
        for callback in self._reset_callbacks:
            self._committer.must_seal = True
            callback()
        loaded = self._committer.loaded or {}
        for name in list(loaded) if self._reset_callbacks else ():
            if has_exact_state(getattr(self, name)):  # a callback may have changed it
                del loaded[name]

    @property
    def commits(self) -> tuple[CommitId | None, CommitId | None]:
        """The ids of the newest commit and of the previous commit; None where there is none."""
        return self._committer.commits

    @property
    def commit_bytes(self) -> int:
        """Size of the newest commit, in bytes."""
        return self._committer.snapshot.size_bytes

    # ---------------------------------------------------------------------------------- methods that torch's Join calls

    def join_hook(self, **kwargs: Any) -> StateJoinHook:
        if self._committer.attached is not None:
            raise UsageError("A state with attached values cannot be in a Join. Give all ranks equally many batches.")
        if self._committer.session.view.keepers:
            raise UsageError(
                "A state cannot be in a Join with --one-copy-per-host. Give all ranks equally many batches, or leave "
                "the option out."
            )
        self._has_joined = True
        return StateJoinHook(self._committer)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    @classmethod
    def _is_taken(cls, name: str) -> bool:
        """Return True if no value may have this name, because it is an attribute of the class."""
        return hasattr(cls, name)

    def _check_value(self, name: str, value: object) -> None:
        """Raise UsageError if a commit of this class would pickle an object that must not be pickled."""

    def _check_names(self, values: Captured, capture: Callable[..., Any]) -> None:
        """Raise StateError if the values of a commit have other names than those given to the constructor.

        ``capture``: that of the calling class. If a subclass has another one, its commits may have more names.
        """
        if missing := [name for name in self._names if name not in values]:
            raise StateError(
                f"The commit has no value {', '.join(missing)}, but this {type(self).__name__} has. Construct the "
                f"state with the same names on every rank."
            )
        surplus = sorted(name for name in values if "." not in name and name not in self._names)
        if surplus and type(self).capture is capture:
            raise StateError(
                f"The commit also has {', '.join(surplus)}, which this {type(self).__name__} lacks. Construct the "
                f"state with the same names on every rank."
            )

    def _unknown(self, name: str) -> str:
        names = self.__dict__.get("_names", ())
        problem = f"{type(self).__name__} has no value {name!r}."
        if owner := next((each for each in names if hasattr(type(self.__dict__.get(each)), name)), None):
            problem += f" {owner!r} has it: use state.{owner}.{name}."
        if meant := difflib.get_close_matches(name, names, 1):
            problem += f" Did you mean state.{meant[0]}?"
        if owner or meant:
            return f"{problem} To add a value, give it to the constructor."
        known = ", ".join(names) or "none"
        return f"{problem} Use a name that was given to the constructor ({known}), or give it {name!r}, too."


def committer_of(state: State) -> Committer:
    """Return the committer of a state. ``run`` calls it; scripts call the methods of the state."""
    return state._committer


class ObjectState(State):
    """A state of plain values: numbers, lists, dicts and other objects that can be pickled; also tensors and arrays.

    ``restore`` writes into tensors, arrays, lists, dicts, random generators and objects of the script's classes, if the
    state has had them from the first capture on. Other values are new objects: read ``state.x`` again afterwards.
    """

    def _check_value(self, name: str, value: object) -> None:
        if type(self).capture is ObjectState.capture:
            require_own_position(name, value)
            require_no_world(name, value)

    def capture(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._names}
        flags = {flag_of(name): requires_grad(v) for name, v in values.items() if isinstance(v, torch.Tensor)}
        pickled = {name: value for name, value in values.items() if not is_array(value)}
        return {**values, **flags, **self._recorded(pickled).moved(pickled)}

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
            if is_array(values[name]):
                setattr(self, name, load_bare(name, getattr(self, name), values))
        self._restore_pickled(values)
