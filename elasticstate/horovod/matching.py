"""Start of a call: all ranks agree on it, or it waits for the ranks that make other calls first.

As in Horovod, a name may be in use by one call of a function at a time. A second call with that name raises an error on
its rank, before the rank tells the others about it. So they are not disturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from elasticstate.extension import world_generation
from elasticstate.horovod import headers
from elasticstate.horovod.calls import Call, CallKind
from elasticstate.horovod.failures import CallUsageError
from elasticstate.horovod.handles import Handle
from elasticstate.horovod.members import Members

T = TypeVar("T")


def start(call: Call, members: Members, launch: Callable[[], Handle[T]], waits: bool) -> Handle[T]:
    """Return the handle of ``launch()``, after all ranks have agreed on ``call``.

    Args:
        launch: starts the collective. All members call it at the same point.
        waits: wait for the other ranks, even if they make other calls first. Otherwise, a call with a key may be
            launched later.

    Raises CallUsageError if the calls differ, and on this rank alone if the name is in use.
    """
    key = call.key if members.size > 1 else None
    if key is None:
        headers.agree(call, members)
        return launch()
    _refuse_used_name(key, call, members)
    if headers.agree(call, members, yields=not waits):
        return _launch(key, members, launch)
    late = LateHandle(key, call, members, launch)
    members.earlier[key] = late
    return late


def complete(members: Members) -> None:
    """Wait until the other ranks have made all calls that this rank has made."""
    for late in list(members.earlier.values()):
        late.wait_for_start()


class LateHandle(Handle[T], Generic[T]):
    """Handle of a call that other ranks make later. It starts in a later call of this rank."""

    def __init__(self, key: str, call: Call, members: Members, launch: Callable[[], Handle[T]]) -> None:
        super().__init__((), lambda: self._started().wait(), members.generation)
        self.call = call
        self._key = key
        self._members = members
        self._launch = launch
        self._handle: Handle[T] | None = None
        self._error = ""

    def start(self) -> None:
        self._handle = _launch(self._key, self._members, self._launch)

    def fail(self, error: str) -> None:
        self._error = error

    def is_done(self) -> bool:
        """Return True if ``wait`` would return at once. Makes one exchange with the other ranks before the start."""
        if world_generation() != self._generation:
            return True  # and ``wait`` raises an error
        if self._is_waiting:
            headers.agree(self._call_of("poll"), self._members, yields=True, is_done=lambda: not self._is_waiting)
        return bool(self._error) or (self._handle is not None and self._handle.is_done())

    def wait_for_start(self) -> None:
        """Wait until all ranks have made the call. An error of it is raised in ``wait``."""
        try:
            while self._is_waiting:
                headers.agree(self._call_of("synchronize"), self._members, is_done=lambda: not self._is_waiting)
        except CallUsageError as error:
            self._members.earlier.pop(self._key, None)
            self.fail(str(error))

    @property
    def _is_waiting(self) -> bool:
        return self._handle is None and not self._error

    def _call_of(self, function: str) -> Call:
        return Call(CallKind.OTHER, (f"{function}() of {self.call.lines[0]}",), is_wait=True)

    def _started(self) -> Handle[T]:
        self.wait_for_start()
        if self._handle is None:
            raise CallUsageError(self._error)
        return self._handle


def _launch(key: str, members: Members, launch: Callable[[], Handle[T]]) -> Handle[T]:
    handle = launch()
    members.running[key] = handle.use_name()
    return handle


def _refuse_used_name(key: str, call: Call, members: Members) -> None:
    running = members.running.get(key)
    if running is not None and running.is_over():
        del members.running[key]
        running = None
    if running is not None or key in members.earlier:
        raise CallUsageError(
            f"{call.lines[0]}: an earlier call with this name is in progress on this rank. Call synchronize() on its "
            "handle first, or choose another name."
        )
