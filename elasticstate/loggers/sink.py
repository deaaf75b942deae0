"""Sink: a place that rank 0 writes the points of a log to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from elasticstate.errors import UsageError
from elasticstate.extension import job_id


class Point(NamedTuple):
    """The values of one step. ``time``: when this worker logged them, in Unix seconds."""

    step: int
    values: dict[str, float]
    time: float


class Sink:
    """Base class of sinks. Derive one of your own from it, with the methods that it needs.

    Only rank 0 calls the methods. After a change of rank 0, the sink of another process is opened. It gets the points
    again that were not durable, and must skip those that it finds already written.
    """

    def open(self, first: int) -> None:
        """Prepare to write. ``first``: no step before this one will be written."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points, in the order of their steps. They are committed: no later call replaces them."""

    def durable(self, written: int) -> int:
        """Return a step up to which the written points outlive this process. ``written``: the last step written."""
        return written

    def show(self, point: Point) -> None:
        """Show a point as soon as it is logged. It may be shown again after a failure."""

    def close(self) -> None:
        """Finish, so that all written points outlive this process. ``open`` may follow."""

    def abandon(self) -> None:
        """Stop writing, because another worker has become rank 0. ``open`` may follow."""
        self.close()


def job_name() -> str:
    """Return a name of this job for files: unique among all jobs, and the same in all its workers."""
    return re.sub(r"[^A-Za-z0-9]+", "-", job_id())


def required(module: str, package: str, user: str) -> Any:
    """Import a module. Raises UsageError if its package is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise UsageError(f"{user} needs the package {package}. Run: pip install {package}") from None
