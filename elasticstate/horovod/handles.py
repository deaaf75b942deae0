"""Handles of running collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elasticstate.errors import CollectiveError
from elasticstate.extension import world_generation


class Handle:
    """A started collective, for ``synchronize()`` and ``poll()``.

    Args:
        works: torch's handles.
        finish: makes the output, after all works have ended.
        generation: generation of the world in which it runs.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], torch.Tensor], generation: int) -> None:
        self._works = works
        self._finish = finish
        self._generation = generation
        self._output: torch.Tensor | None = None

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> torch.Tensor:
        """Return the output. Raises the collective's error; CollectiveError if its world is over."""
        if self._output is None:
            if world_generation() != self._generation:
                self._works = ()
                raise CollectiveError(
                    f"this collective was started in generation {self._generation}, which has ended. Start it again in "
                    f"the present world."
                )
            works, self._works = self._works, ()
            for work in works:
                work.wait()
            with torch.no_grad():
                self._output = self._finish()
        return self._output


def synchronize(handle: Handle) -> torch.Tensor:
    """Wait for a collective, and return its output. Later calls return the same tensor.

    Raises torch's error if a peer died; CollectiveError for a handle of a world that is over.
    """
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Return True if ``synchronize(handle)`` would return immediately."""
    return handle.is_done()
