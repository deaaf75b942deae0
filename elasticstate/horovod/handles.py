"""Handles of running collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from elasticstate.errors import CollectiveError
from elasticstate.extension import world_generation
from elasticstate.horovod import headers, timeline
from elasticstate.horovod.failures import failures_named

T = TypeVar("T")


class NameUse:
    """Use of a name by a call that has just started, also after its handle is dropped."""

    def __init__(self) -> None:
        self._waits = headers.waits()
        self._is_over = False

    def end(self) -> None:
        """The script has learnt that the call has ended."""
        self._is_over = True

    def is_over(self) -> bool:
        """Return True if the name may be used again: after any later call that waits for the other ranks."""
        return self._is_over or headers.waits() > self._waits


class Handle(Generic[T]):
    """A started collective, for ``synchronize()`` and ``poll()``.

    Args:
        works: torch's handles.
        finish: makes the output, after all works have ended.
        generation: generation of the world in which it runs.
        span: its bar in the timeline.
        parts: handles for which ``finish`` waits.
    """

    def __init__(
        self,
        works: Sequence[Any],
        finish: Callable[[], T],
        generation: int,
        span: timeline.Span | None = None,
        parts: Sequence[Handle[Any]] = (),
    ) -> None:
        self.works = works
        self._finish = finish
        self._generation = generation
        self._span = span
        self._parts = parts
        self.name_use: NameUse | None = None
        self._output: T | None = None

    def use_name(self) -> NameUse:
        """Return the use of its name."""
        self.name_use = NameUse()
        return self.name_use

    def is_done(self) -> bool:
        is_done = all(work.is_completed() for work in self.works) and all(part.is_done() for part in self._parts)
        if is_done and self.name_use is not None:
            self.name_use.end()
        return is_done

    def wait(self) -> T:
        """Return the output. Raises the collective's error; CollectiveError if its world is over."""
        if self._output is None:
            if world_generation() != self._generation:
                self.works = ()
                raise CollectiveError(
                    f"this collective was started in generation {self._generation}, which has ended. Start it again in "
                    f"the present world."
                )
            works, self.works = self.works, ()
            headers.count_wait()
            if self.name_use is not None:
                self.name_use.end()
            with failures_named():
                for work in works:
                    work.wait()
            with torch.no_grad():
                self._output = self._finish()
            timeline.end(self._span)
        return self._output


def together(handles: Sequence[Handle[T]], generation: int) -> Handle[list[T]]:
    """Return one handle for several collectives. Its output is the list of their outputs."""
    return Handle((), lambda: [handle.wait() for handle in handles], generation, parts=handles)


def synchronize(handle: Handle[T]) -> T:
    """Wait for a collective, and return its output. Later calls return the same object.

    Raises CollectiveError if a peer has failed, and for a handle of a world that is over.
    """
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Return True if ``synchronize(handle)`` would return immediately."""
    return handle.is_done()
