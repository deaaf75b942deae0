"""RepeatCheck: a warning if the training function trains again what is in the commit already.

The check compares the numbers of the function's frames, when the error or interrupt left it, with those of the next
call, as soon as that has made as many ticks as were lost. A counter that is lower then has begun again. The source
decides if it counts the outermost loop around the tick, and if the bounds of that loop do not depend on the state. What
cannot be decided is no reason for a warning. See docs/decisions/checks-of-the-script.md.

It also warns of global variables that have the rank, or the size, of the world before; in a new process of a running
job, those that a script takes when ``RANK`` and ``WORLD_SIZE`` are not set.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from elasticstate.core.ids import CommitId
from elasticstate.log import logger
from elasticstate.state.base import State, committer_of
from elasticstate.state.loader import is_stateful
from elasticstate.tracebacks import is_of_the_script

_MOST_NUMBERS = 1000  # in the state, or in an object
_DEPTH = 4  # of the state's plain values
_OWN_REFERENCES = 3  # to a frame's snapshot of its local variables: by the frame, a variable here, and an argument
_BOUNDS = {"range", "trange", "tqdm", "len", "int", "min", "max", "round"}
_WRAPPERS = {"tqdm", "enumerate"}
_SAMPLERS = (DistributedSampler, RandomSampler, SequentialSampler)
_WITHOUT_POSITION = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
_TWICE = (
    "what lies between is trained twice. run() calls the function again after each failure and each change of the "
    "workers, so continue where the state is: while state.{0} < ...: train, then state.{0} += 1, then commit()."
)
_RANKS = {"rank", "global_rank", "world_rank"}
_SIZES = {"world_size"}


class _Loop(NamedTuple):
    """A loop of the script that a frame is in."""

    frame: FrameType
    function: ast.AST
    node: ast.For | ast.While


class _Call(NamedTuple):
    """A call of the training function that an error or an interrupt has ended."""

    frames: dict[CodeType, _Place]
    generation: int
    ticks: int
    rank: int
    size: int


class _Place(NamedTuple):
    """A frame of the script: its line, and its numbers by the expressions that return them."""

    line: int
    numbers: dict[str, int]


class RepeatCheck:
    """Context of each call of a training function. See above."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._committer = committer_of(state)
        self._has_warned = False
        self._caller: CodeType | None = None
        self._last: _Call | None = None
        self.restored: CommitId | None = None
        """The commit with which the next call begins."""
        self._resumed: CommitId | None = None  # in the first call of this process: another process has made it
        self._wait = 0  # ticks until the judgement
        self._before: dict[str, int] | None = None  # the numbers in the state, at the begin of the call
        self._epoch: list[object] = []  # of a plain DataLoader

    def __enter__(self) -> None:
        session, last = self._committer.session, self._last
        self._epoch = []
        commit, self._resumed = session.view.line or self.restored, None
        if last is not None:
            is_known = commit is not None and commit.generation == last.generation
            if not is_known:
                self._last = None
            self._wait = 1 + (last.ticks - commit.tick if is_known and commit is not None else 0)
        elif session.generation > 1:
            self._wait, self._resumed = 1, commit if commit is not None and commit.tick > 0 else None
        else:
            return
        if not self._has_warned:
            frame = inspect.currentframe()
            self._caller = frame.f_back.f_code if frame is not None and frame.f_back is not None else None
            self._before = None
            with contextlib.suppress(Exception):  # of the script's objects
                self._before = _numbers_in(self._state)
            self._committer.after_tick = self._after_a_tick

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._committer.after_tick = None
        session = self._committer.session
        frames = {}
        while traceback is not None:
            frame = traceback.tb_frame
            if is_of_the_script(frame.f_code.co_filename):
                with contextlib.suppress(Exception):  # of the script's objects
                    frames[frame.f_code] = _Place(traceback.tb_lineno, _numbers(frame))
            traceback = traceback.tb_next
        self._last = _Call(frames, session.generation, session.ticks, session.view.rank, session.view.size)
        self.restored = None

    def _after_a_tick(self) -> None:
        self._wait -= 1
        if self._wait > 0:
            return
        text = ""
        with contextlib.suppress(Exception):  # of the script's objects
            text = self._judge()
        if text or self._wait < 0:
            self._committer.after_tick = None
        if text:
            self._has_warned = True
            logger.warning("%s", text)

    def _judge(self) -> str:
        """Return a warning, or an empty text."""
        session = self._committer.session
        text = self._stale_place()
        if text or session.view.rank != session.view.root:  # the root has the state in any case
            return text
        nest = list(_nest(self._frames()))
        if self._wait == 0:
            text = self._counter(nest) or self._fallen_number()
        return text or self._epoch_again(nest)

    def _frames(self) -> list[FrameType]:
        """Return the frames of the script between the loop of ``run`` and the tick, the outermost first."""
        frame = inspect.currentframe()
        found: list[FrameType] = []
        while frame is not None and frame.f_code is not self._caller:
            if is_of_the_script(frame.f_code.co_filename):
                found.append(frame)
            frame = frame.f_back
        return found[::-1]

    # --------------------------------------------------------------------------------------------------- what repeats

    def _counter(self, nest: list[_Loop]) -> str:
        """Return a warning if the outermost loop has begun again."""
        expression = _bounds_of(nest[0].node) if nest else None
        if expression is None or self._stops_by_the_state(nest[0]):
            return ""
        loop = nest[0]
        now, last = _numbers(loop.frame), self._last.frames.get(loop.frame.f_code) if self._last is not None else None
        old = last.numbers if last is not None else {}
        if isinstance(loop.node, ast.For):
            if self._depends_on_the_state(expression, loop):
                return ""
            name = ast.unparse(loop.node.target)
            if last is None and self._resumed is not None and now.get(name) == 0 and self._before == {}:
                return self._repeats(loop, name, 0, f"commit {self._resumed}")  # of a process that is gone
        names = _counters_of(loop.node)
        changed = [name for name in names if name in old and name in now and old[name] != now[name]]
        if not changed or any(now[name] > old[name] for name in changed):
            return ""
        if not self._is_fixed(expression, loop, {**old, **{name: now[name] for name in changed}}, now):
            return ""
        return self._repeats(loop, changed[0], now[changed[0]], f"{changed[0]} = {old[changed[0]]}")

    def _repeats(self, loop: _Loop, name: str, new: int, trained: str) -> str:
        counter = name.rpartition(".")[2].strip("_") or "step"
        return (
            f"{_where(loop)} has begun again at {name} = {new} in generation {self._committer.session.generation}, "
            f"but the model is that of {trained}: {_TWICE.format(counter)}"
        )

    def _is_fixed(self, expression: ast.AST, loop: _Loop, old: Mapping[str, int], now: Mapping[str, int]) -> bool:
        """Return True if the expression has the value that it had in the last call, whatever the state is."""
        if isinstance(expression, ast.Call):
            arguments = expression.args[:1] if _name(expression.func) in _WRAPPERS else expression.args
            return _name(expression.func) in _BOUNDS and all(self._is_fixed(part, loop, old, now) for part in arguments)
        if isinstance(expression, ast.Name | ast.Attribute):
            text = ast.unparse(expression)
            if text in old or text in now:
                return old.get(text) == now.get(text)
            if self._depends_on_the_state(expression, loop):
                return False
            return isinstance(expression, ast.Name) or text.partition(".")[0] not in _locals_of(loop.frame)
        if isinstance(expression, ast.Constant | ast.operator | ast.unaryop | ast.cmpop | ast.boolop):
            return True
        if isinstance(expression, ast.BinOp | ast.UnaryOp | ast.Compare | ast.BoolOp):
            return all(self._is_fixed(child, loop, old, now) for child in ast.iter_child_nodes(expression))
        return False

    def _stops_by_the_state(self, loop: _Loop) -> bool:
        """Return True if the loop has an end of its own that depends on the state."""
        ends = [
            node.test
            for node in ast.walk(loop.node)
            if isinstance(node, ast.If) and any(isinstance(part, ast.Break | ast.Return) for part in ast.walk(node))
        ]
        return any(self._depends_on_the_state(test, loop) for test in ends)

    def _depends_on_the_state(self, expression: ast.AST, loop: _Loop) -> bool:
        """Return True if a name in the expression is the state, one of its values, or assigned from one of them."""
        assigned: dict[str, list[ast.AST]] = {}
        for node in ast.walk(loop.function):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name in _names(target):
                        assigned.setdefault(name, []).append(node.value)
        seen: set[str] = set()
        pending = [expression]
        while pending:
            part = pending.pop()
            attributes = [node for node in ast.walk(part) if isinstance(node, ast.Attribute)]
            if any(self._is_of_the_state(_value_of(node, loop.frame)) for node in attributes):
                return True
            for name in _names(part) - seen:
                seen.add(name)
                if self._is_of_the_state(_find(name, loop.frame)):
                    return True
                pending += assigned.get(name, [])
        return False

    def _is_of_the_state(self, value: object) -> bool:
        if isinstance(value, State):
            return True
        kept = [found for found in vars(self._state).values() if not isinstance(found, int | str | float | None)]
        return any(value is found for found in kept)

    def _fallen_number(self) -> str:
        """Return a warning if a number of the state has begun again, and none has grown."""
        now = _numbers_in(self._state)
        if self._before is None or now is None:
            return ""
        if any(number > self._before.get(name, number - 1) for name, number in now.items()):
            return ""
        fallen = [name for name, number in now.items() if number < self._before[name] and not name.startswith("len(")]
        if not fallen:
            return ""
        name = fallen[0]
        return (
            f"state.{name} has begun again at {now[name]} in generation {self._committer.session.generation}, but the "
            f"model is that of state.{name} = {self._before[name]}: {_TWICE.format(name)}"
        )

    def _epoch_again(self, nest: list[_Loop]) -> str:
        """Return a warning if commits are made within an epoch of a DataLoader that has begun again.

        That takes two ticks in the same epoch.
        """
        outer: list[object] = []
        for loop in nest:
            last = self._last.frames.get(loop.frame.f_code) if self._last is not None else None
            loader = _loader_of(loop)
            if loader is not None and last is not None and self._begins_again(loop, last):
                is_same, self._epoch = self._epoch == [id(loader), *outer], [id(loader), *outer]
                return is_same * (
                    f"{_where(loop)} has begun an epoch of a DataLoader again in generation "
                    f"{self._committer.session.generation}: the batches of it that were committed before are trained "
                    "twice. Iterate over an elasticstate.ElasticDataLoader in the state, which continues in the middle "
                    "of an epoch, or commit once per epoch."
                )
            numbers = _numbers(loop.frame)
            counters = {name: numbers[name] for name in _counters_of(loop.node) if name in numbers}
            if not counters:
                return ""
            outer.append(counters)
        return ""

    def _begins_again(self, loop: _Loop, last: _Place) -> bool:
        """Return True if the loop over a loader was left in its middle, and now has the data set that it had before."""
        if any(isinstance(node, ast.Continue) for node in ast.walk(loop.node)):  # may skip what is trained
            return False
        assert isinstance(loop.node, ast.For), "it iterates over a loader"
        length = f"len({ast.unparse(_unwrapped(loop.node.iter))}.dataset)"
        was_inside = loop.node.lineno <= last.line <= (loop.node.end_lineno or 0)
        return was_inside and last.numbers.get(length) == _numbers(loop.frame).get(length)

    def _stale_place(self) -> str:
        """Return a warning if a global variable has this worker's rank, or the size, of the world before."""
        last, session = self._last, self._committer.session
        frames = self._frames()
        if not frames:
            return ""
        old_rank, old_size = (last.rank, last.size) if last is not None else (0, 1)  # os.environ.get("RANK", 0)
        for names, old, new, call in (
            (_RANKS, old_rank, session.view.rank, "rank"),
            (_SIZES, old_size, session.view.size, "size"),
        ):
            for name, value in frames[0].f_globals.items():
                if old != new and name.lower() in names and type(value) is int and value == old:
                    return (
                        f"the global variable {name} is {old}, but elasticstate.{call}() of this worker is {new} in "
                        f"generation {session.generation}. Both change with the world. Call elasticstate.{call}() "
                        "where it is needed, inside the training function."
                    )
        return ""


def _numbers(frame: FrameType) -> dict[str, int]:
    """Return the integers among the local variables, those one attribute away, and the lengths of data sets."""
    found: dict[str, int] = {}
    for name, value in _locals_of(frame).items():
        if _is_int(value):
            found[name] = int(value)
        elif type(value) is DataLoader:
            found |= _length(name, value)
        elif not isinstance(value, ModuleType | type | torch.Tensor | torch.nn.Module):
            for key, number in list(getattr(value, "__dict__", {}).items())[:_MOST_NUMBERS]:
                if _is_int(number):
                    found[f"{name}.{key}"] = int(number)
                elif type(number) is DataLoader:
                    found |= _length(f"{name}.{key}", number)
    return found


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables. The frame does not keep them: its snapshot of them would outlive them.

    The script may hold the snapshot, which ``locals()`` returns. Then it stays as it is.
    """
    snapshot = frame.f_locals
    found = dict(snapshot)
    is_a_snapshot = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_a_snapshot and sys.getrefcount(snapshot) == _OWN_REFERENCES:
        snapshot.clear()
    return found


def _length(name: str, loader: DataLoader[Any]) -> dict[str, int]:
    try:
        return {f"len({name}.dataset)": len(loader.dataset)}  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a data set without a length
        return {}


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _numbers_in(state: State) -> dict[str, int] | None:
    """Return the integers, and the lengths of lists, in the plain values of a state. None: its position is unknown."""
    found: dict[str, int] = {}
    pending: list[tuple[str, object, int]] = [(name, value, 0) for name, value in (state._step_sources() or {}).items()]
    if state._step_sources() is None:
        return None
    while pending:
        name, value, depth = pending.pop()
        if len(found) + len(pending) > _MOST_NUMBERS:
            return None
        if _is_int(value):
            found[name] = int(value)  # type: ignore[call-overload]
        elif isinstance(value, torch.Tensor | np.ndarray):
            if "int" in str(value.dtype):
                return None
        elif isinstance(value, _WITHOUT_POSITION):
            continue
        elif is_stateful(value):
            return None
        elif isinstance(value, list | tuple | set | dict):
            found[f"len({name})"] = len(value)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(f"{name}[{key!r}]", item, depth + 1) for key, item in items if depth < _DEPTH]
        elif not isinstance(value, type) and depth < _DEPTH:
            pending += [(f"{name}.{key}", item, depth + 1) for key, item in getattr(value, "__dict__", {}).items()]
    return found


def _nest(frames: list[FrameType]) -> Iterator[_Loop]:
    """Yield the loops that the frames are in, the outermost first."""
    trees: dict[str, ast.AST | None] = {}  # by file
    for frame in frames:
        file = frame.f_code.co_filename
        if file not in trees:
            trees[file] = _parsed(file, frame.f_globals)
        node = function = _function_in(trees[file], frame.f_code)
        while function is not None and node is not None:
            inner = None
            for child in ast.iter_child_nodes(node):
                first, last = getattr(child, "lineno", 0), getattr(child, "end_lineno", 0)
                is_here = first <= frame.f_lineno <= last
                if is_here and not isinstance(child, ast.expr | ast.ClassDef | ast.FunctionDef):
                    inner = child
            if isinstance(inner, ast.For | ast.While) and frame.f_lineno >= inner.body[0].lineno:
                yield _Loop(frame, function, inner)
            node = inner


def _parsed(file: str, module: dict[str, Any]) -> ast.AST | None:
    try:
        return ast.parse("".join(linecache.getlines(file, module)))
    except (SyntaxError, ValueError):
        return None


def _function_in(tree: ast.AST | None, code: CodeType) -> ast.AST | None:
    """Return the definition of a function. Looks only at what contains its first line: a file may have thousands."""
    pending = [tree] if tree is not None else []
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", sys.maxsize)
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
                begin = min([first, *(decorator.lineno for decorator in node.decorator_list)])
                if begin == code.co_firstlineno:
                    return node
            if first <= code.co_firstlineno <= last and not isinstance(node, ast.expr):
                pending.append(node)
    return None


def _bounds_of(loop: ast.For | ast.While) -> ast.expr | None:
    """Return the expression that decides how often the loop runs; None: it is no counter's loop."""
    if isinstance(loop, ast.While):
        return loop.test
    call = _unwrapped(loop.iter)
    return loop.iter if isinstance(call, ast.Call) and _name(call.func) in ("range", "trange") else None


def _counters_of(loop: ast.For | ast.While) -> list[str]:
    """Return the expressions that may count the iterations."""
    if isinstance(loop, ast.For):
        return [ast.unparse(loop.target)]
    return [ast.unparse(node) for node in ast.walk(loop.test) if isinstance(node, ast.Name | ast.Attribute)]


def _unwrapped(expression: ast.expr) -> ast.expr:
    """Return what ``enumerate`` and ``tqdm`` iterate over."""
    while isinstance(expression, ast.Call) and _name(expression.func) in _WRAPPERS and expression.args:
        expression = expression.args[0]
    return expression


def _loader_of(loop: _Loop) -> DataLoader[Any] | None:
    """Return torch's own DataLoader if the loop iterates over one without a position."""
    loader = _value_of(_unwrapped(loop.node.iter), loop.frame) if isinstance(loop.node, ast.For) else None
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    return loader if type(loader.sampler) in _SAMPLERS else None


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _name(function: ast.expr) -> str:
    """Return the last name of a function: ``trange`` of ``tqdm.trange``."""
    return ast.unparse(function).rpartition(".")[2]


def _find(name: str, frame: FrameType) -> object:
    return _locals_of(frame).get(name, frame.f_globals.get(name))


def _value_of(expression: ast.expr, frame: FrameType) -> object:
    """Return the value of a name, or of an attribute that is in the object's ``__dict__``; otherwise None."""
    if isinstance(expression, ast.Name):
        return _find(expression.id, frame)
    if isinstance(expression, ast.Attribute):
        return getattr(_value_of(expression.value, frame), "__dict__", {}).get(expression.attr)
    return None


def _where(loop: _Loop) -> str:
    file = loop.frame.f_code.co_filename
    return f"{file}:{loop.node.lineno}: {linecache.getline(file, loop.node.lineno).strip()}"
