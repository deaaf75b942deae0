"""Handles of running collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from elasticstate.errors import CollectiveError
from elasticstate.extension import world_generation
from elasticstate.horovod import timeline
from elasticstate.horovod.failures import failures_named

T = TypeVar("T")


class Handle(Generic[T]):
    """A started collective, for ``synchronize()`` and ``poll()``.

    Args:
        works: torch's handles.
        finish: makes the output, after all works have ended.
        generation: generation of the world in which it runs.
        span: its bar in the timeline.
    """

    def __init__(
        self, works: Sequence[Any], finish: Callable[[], T], generation: int, span: timeline.Span | None = None
    ) -> None:
        self.works = works
        self._finish = finish
        self._generation = generation
        self._span = span
        self._output: T | None = None

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)

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
            with failures_named():
                for work in works:
                    work.wait()
            with torch.no_grad():
                self._output = self._finish()
            timeline.end(self._span)
        return self._output


def together(handles: Sequence[Handle[T]], generation: int) -> Handle[list[T]]:
    """Return one handle for several collectives. Its output is the list of their outputs."""
    works = [work for handle in handles for work in handle.works]
    return Handle(works, lambda: [handle.wait() for handle in handles], generation)


def synchronize(handle: Handle[T]) -> T:
    """Wait for a collective, and return its output. Later calls return the same object.

    Raises CollectiveError if a peer has failed, and for a handle of a world that is over.
    """
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Return True if ``synchronize(handle)`` would return immediately."""
    return handle.is_done()
