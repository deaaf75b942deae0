"""Running operations: started by the thread that calls a collective, completed by one progress thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticstate.mpi.worker.library import MPI

GONE = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
"""Classes of MPI's errors after the loss of a member."""
_ABANDON_AFTER_S = 0.05
_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 200e-6


class Operation(dist.Work):
    """The requests of one collective. ``finish`` is called after all are complete: it copies staged results back.

    ``kept``: the buffers that MPI reads and writes during the operation.
    """

    def __init__(
        self,
        requests: list[MPI.Request],
        finish: Callable[[], None] | None,
        results: list[torch.Tensor],
        kept: tuple[object, ...],
        timeout: timedelta,
    ) -> None:
        super().__init__()
        self.requests = requests
        self.kept = kept
        self.deadline = time.monotonic() + timeout.total_seconds()
        self._finish = finish
        self._results = results
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._end: torch.futures.Future[Any] = torch.futures.Future()
        self._future = self._end.then(_value_of)

    def complete(self, error: BaseException | None) -> None:
        """End the operation. Call it once."""
        if error is None and self._finish is not None:
            try:
                self._finish()
            except RuntimeError as failure:
                error = failure
        self._error = error
        self._done.set()
        self._end.set_result(self._results if error is None else _Failure(str(error)))

    # ----------------------------------------------------------------------------------------- methods that torch calls

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises the operation's error; RuntimeError after ``timeout`` (zero: the group's one)."""
        if not self._done.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"the operation was not complete after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> Any:
        return self._future

    def source_rank(self) -> int:
        return -1


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


def _value_of(end: torch.futures.Future[Any]) -> list[torch.Tensor]:
    """Return or raise the result of a torch future.

    ``set_exception`` works in Python only: C++ would take the exception for the value (a segmentation fault in DDP). An
    exception that a callback raises is an error in C++ too. But C++ keeps the exception with its frames, outside the
    reach of the garbage collector. So the exception is a new one, and this is a function, not a method.
    """
    value = end.value()
    if isinstance(value, _Failure):
        raise RuntimeError(value.text)
    results: list[torch.Tensor] = value
    return results


class Progress:
    """Thread that tests the requests of a generation, because MPI moves data only inside MPI calls.

    Requests that do not end shortly after the sever are abandoned: Open MPI 5.0 leaves a rendezvous send to a peer that
    has revoked the communicator pending forever. Their buffers are kept until two more worlds are complete: data still
    in transit to them arrives before the messages by which the members agree on those worlds.
    """

    _abandoned: list[Operation] = []  # noqa: RUF012 (by the last two generations)
    _abandoned_before: list[Operation] = []  # noqa: RUF012

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: list[Operation] = []
        self._severed_at: float | None = None
        self._stopping = False
        self.has_failed = False  # a member died, or revoked the communicator
        self.collective_has_failed = False  # so has an operation that was late, or was cut
        Progress._abandoned_before, Progress._abandoned = Progress._abandoned, []
        self._thread = threading.Thread(target=self._run, name="elasticstate-mpi", daemon=True)
        self._thread.start()

    def add(self, operation: Operation) -> None:
        with self._changed:
            self._running.append(operation)
            self._changed.notify()

    def sever(self) -> None:
        """Make running operations fail now. Any thread may call it, repeatedly."""
        with self._changed:
            if self._severed_at is None:
                self._severed_at = time.monotonic()

    def stop(self) -> None:
        """Wait until no operation is running, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        pause_s = _SHORTEST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._stopping)
                running = list(self._running)
            if not running:
                return
            ended = [operation for operation in running if self._has_ended(operation)]
            if ended:
                with self._changed:
                    self._running = [operation for operation in self._running if operation not in ended]
                pause_s = _SHORTEST_PAUSE_S
            else:
                time.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 1.1 * pause_s)

    def _has_ended(self, operation: Operation) -> bool:
        try:
            while operation.requests:
                if not operation.requests[-1].Test():
                    return self._is_given_up(operation)
                operation.requests.pop()
        except MPI.Exception as error:
            self.has_failed = self.collective_has_failed = True
            if len(operation.requests) > 1:
                self._abandoned.append(operation)
            operation.complete(error)
            return True
        operation.complete(None)
        return True

    def _is_given_up(self, operation: Operation) -> bool:
        now = time.monotonic()
        if self._severed_at is not None and now - self._severed_at > _ABANDON_AFTER_S:
            reason = "the generation has ended"
        elif now > operation.deadline:
            reason = "the operation has taken longer than --collective-timeout"
        else:
            return False
        self._abandoned.append(operation)
        self.collective_has_failed = True
        operation.complete(RuntimeError(reason))
        return True
