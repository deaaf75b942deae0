"""ProgressBar: a sink that shows the step and the values of rank 0 in a bar of tqdm."""

from __future__ import annotations

from typing import Any

from elasticstate.loggers.sink import Point, Sink, required


class ProgressBar(Sink):
    """A bar of tqdm on stderr, which rank 0 alone shows. Needs the package tqdm.

    A new rank 0 continues the bar at its step.

    Args:
        total: the number of steps.
        options: those of ``tqdm.tqdm``, except ``total`` and ``initial``: desc, unit, mininterval, ….
    """

    def __init__(self, total: int, **options: Any) -> None:
        self._total = total
        self._options = options
        self._tqdm = required("tqdm", "tqdm", "ProgressBar").tqdm
        self._bar: Any = None

    def show(self, point: Point) -> None:
        if self._bar is None:
            self._bar = self._tqdm(total=self._total, initial=max(0, point.step - 1), **self._options)
        self._bar.set_postfix(point.values, refresh=False)
        self._bar.update(point.step - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
