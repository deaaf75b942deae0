"""Functions by which a committer reads and writes the live state."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from elasticstate.state import value_names
from elasticstate.state.quick_capture import QuickCapture
from elasticstate.state.values import Captured


@dataclass(frozen=True, slots=True)
class LiveState:
    """Functions by which a committer reads and writes the live state."""

    name: str
    """Name of the state's class, for errors."""
    capture: Callable[[], Captured]
    apply: Callable[[Captured], None]
    restore: Callable[[], None]
    """The state's own method, because a subclass may extend it."""
    before_load: Callable[[Callable[[], Mapping[str, Any] | None]], None]
    """Call the user's functions that make the live objects fit a commit, given what returns the commit's objects."""
    has_pre_hooks: Callable[[], bool]
    """Return True if there are such functions."""
    load_targets: Callable[[], Captured | None]
    """Return the captured values that ``Snapshot.load_into`` may overwrite before ``apply``; None if ``apply`` does."""
    optimizer_owned: Callable[[], Container[int]]
    """Return the ids of the captured tensors that only an optimizer's ``step`` writes. See async_commit.py."""
    quick_capture: Callable[[Captured], QuickCapture | None]
    """Return a quicker way to repeat a capture, or None. See quick_capture.py."""
    owned: Callable[[], Container[int]]
    """Return the ids of the captured tensors that a tick record need not copy. See tick_record.py."""
    drop_gradients: Callable[[], None]
    value_kinds: Callable[[], value_names.Kinds]
    bytes_to_come: Callable[[], int | None]
    """Return the bytes that the first steps of optimizers will add to a commit; None: not known."""
    continue_iterators: Callable[[Mapping[str, Any], bool], None]
    """Make the next iterators begin at the position of the state. See ``State._continue_iterators``."""
