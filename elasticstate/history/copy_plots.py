"""Plots of the report about copies of commits: replication from host to host, and durable copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from elasticstate.core.texts import number_of
from elasticstate.history.drawing import (
    TEXT,
    Clock,
    Plot,
    Points,
    Shown,
    columns,
    drawn,
    line_style,
    made,
    size_text,
    span_of,
    thinned,
)
from elasticstate.history.job_history import JobHistory

_MOST_POINTS = 1500  # of one line
_MOST_MARKS = 200  # failures of one job
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_CROSS: dict[str, Any] = {"color": TEXT, "markersize": 6, "markeredgewidth": 1.5, "linestyle": "none", "marker": "x"}


def copy_plots(runs: Sequence[JobHistory], labels: Sequence[str]) -> list[Plot]:
    """Return the plots for which the events have data: none for jobs without copies."""
    return made(runs, labels, (_ages, _bandwidths, _durations, _sizes))


def _ages(shown: Shown, clock: Clock) -> Plot | None:
    figure, axes = clock.axes("Age of the newest replicated commit", "seconds")
    texts, values, failures = [], list[float](), Points()
    for index, (run, label) in enumerate(shown):
        points = [(found.time, found.age_s) for found in run.copies.replications if found.age_s is not None]
        if points:
            ages = [age for _, age in points]
            values += ages
            axes.plot(*columns(_since(clock, run, points)), label=label, marker=".", **line_style(index))
            counts = f"{number_of(run.copies.replicated, 'replication')}, {run.copies.failed} failed"
            texts.append(f"{label}: at most {max(ages):.3g} s; {counts}")
        failed = [(found.time, found.age_s or 0.0) for found in run.copies.replications if found.failed]
        failures += thinned(clock.since_start(run, failed), _MOST_MARKS)
    if not texts:
        return None
    _cross(axes, failures, "with failed replications")
    axes.set_ylim(0, max(values) * 1.15 or 1.0)
    return drawn(figure, axes, texts, always=bool(failures))


def _bandwidths(shown: Shown, clock: Clock) -> Plot | None:
    sent = [found.bytes_per_s for run, _ in shown for found in run.copies.replications]
    if not sent:
        return None
    scale, unit = _unit(max(sent))
    figure, axes = clock.axes("Bandwidth of replication", f"{unit} per s")
    texts = []
    for index, (run, label) in enumerate(shown):
        found = run.copies.replications
        if found:
            points = [(each.time, each.bytes_per_s / scale) for each in found]
            axes.plot(*columns(_since(clock, run, points)), label=label, marker=".", **line_style(index))
            memory = size_text(max(each.memory_bytes for each in found))
            sent_text = size_text(run.copies.sent_bytes)
            texts.append(f"{label}: {sent_text} sent from host to host; up to {memory} of memory for copies")
    axes.set_ylim(0, max(sent) / scale * 1.15 or 1.0)
    return drawn(figure, axes, texts)


def _durations(shown: Shown, clock: Clock) -> Plot | None:
    figure, axes = clock.axes("Time to save a durable copy", "seconds")
    texts, values, failures = [], list[float](), Points()
    for index, (run, label) in enumerate(shown):
        saved, failed = run.copies.saved, run.copies.not_saved
        if saved:
            points = _since(clock, run, [(copy.time, copy.seconds) for copy in saved])
            axes.plot(*columns(points), "o", label=label, color=line_style(index)["color"], markersize=5)
            values += [copy.seconds for copy in saved]
        if saved or failed:
            took = f" in {span_of([copy.seconds for copy in saved], '.2g')} s" if saved else ""
            texts.append(f"{label}: {len(saved)} saved{took}; {len(failed)} failed")
        failures += thinned(clock.since_start(run, [(time, 0.0) for time in failed]), _MOST_MARKS)
    if not texts:
        return None
    _cross(axes, failures, "failed attempt")
    axes.set_ylim(0, max(values, default=0.0) * 1.15 or 1.0)
    return drawn(figure, axes, texts, always=bool(failures))


def _sizes(shown: Shown, clock: Clock) -> Plot | None:
    sizes = [copy.bytes for run, _ in shown for copy in run.copies.saved]
    if not sizes:
        return None
    scale, unit = _unit(max(sizes))
    figure, axes = clock.axes("Size of durable copies", unit)
    texts = []
    for index, (run, label) in enumerate(shown):
        saved = run.copies.saved
        if saved:
            points = _since(clock, run, [(copy.time, copy.bytes / scale) for copy in saved])
            axes.plot(*columns(points), "o", label=label, color=line_style(index)["color"], markersize=5)
            total = size_text(sum(copy.bytes for copy in saved))
            texts.append(f"{label}: {total} in all, the newest {size_text(saved[-1].bytes)}")
    axes.set_ylim(0, max(sizes) / scale * 1.15 or 1.0)
    return drawn(figure, axes, texts)


def _since(clock: Clock, run: JobHistory, points: Points) -> Points:
    return thinned(clock.since_start(run, points), _MOST_POINTS)


def _cross(axes: Axes, points: Points, label: str) -> None:
    """Mark failures, also those on the x axis, and name the mark in the legend."""
    if points:
        axes.plot(*columns(points), label=label, zorder=3, clip_on=False, **_CROSS)


def _unit(largest: float) -> tuple[float, str]:
    return next(((scale, unit) for scale, unit in _UNITS if largest >= scale), _UNITS[-1])
