"""Plots of the report about training: world sizes, goodput, rates of ticks, downtimes."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from matplotlib.ticker import MaxNLocator

from elasticstate.core.texts import number_of
from elasticstate.history.drawing import (
    COLOURS,
    TEXT,
    Clock,
    Plot,
    Points,
    Shown,
    axes_of,
    columns,
    drawn,
    line_style,
    made,
    short,
    span_of,
    thinned,
    thinned_list,
)
from elasticstate.history.job_history import JobHistory, Shares
from elasticstate.history.shares import parts_of, share_names
from elasticstate.terminal import printable

_MOST_POINTS = 1500  # of one line
_MOST_CAUSES = 12  # of badput
_MOST_MARKS = 200  # failures of one line
_PART_COLOURS = (2, 1, 0, 3, 4, 5, 6, 7)  # goodput is green


def plots(runs: Sequence[JobHistory], labels: Sequence[str]) -> list[Plot]:
    """Return the plots for which the events have data."""
    return made(runs, labels, (_sizes, _parts, _goodput, _badput, _rates, _downtimes))


def _sizes(shown: Shown, clock: Clock) -> Plot | None:
    figure, axes = clock.axes("World size over time", "workers")
    texts, largest, has_failures = [], 0, False
    for index, (run, label) in enumerate(shown):
        points = thinned(clock.since_start(run, run.sizes), _MOST_POINTS)
        if points:
            sizes = [size for _, size in run.sizes[:-1]]
            largest = max(largest, *sizes)
            axes.step(*columns(points), where="post", label=label, **line_style(index))
            texts.append(f"{label}: {span_of(sizes, 'd')} workers, {sizes[-1]} at the end")
        failures = thinned(clock.since_start(run, _failures_on_line(run)), _MOST_MARKS)
        if failures:
            has_failures = True
            axes.plot(*columns(failures), "x", color=TEXT, markersize=6, markeredgewidth=1.5, zorder=3)
    if not texts:
        return None
    if has_failures:
        axes.plot([], [], "x", color=TEXT, label="failure of a worker", markersize=6, markeredgewidth=1.5)
    axes.set_ylim(0, largest * 1.12)
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    return drawn(figure, axes, texts, always=has_failures)


def _parts(shown: Shown, clock: Clock) -> Plot | None:
    accounts = [(label, shares) for run, label in shown if (shares := parts_of(run)) is not None]
    if not accounts:
        return None
    names = share_names([shares for _, shares in accounts])
    figure, axes = axes_of("Goodput and badput by cause", "share of the wall time (%)", "", 1.8 + 0.4 * len(accounts))
    axes.grid(visible=False, axis="y")
    left = [0.0] * len(accounts)
    for index, name in enumerate(names):
        widths = [_percent(shares, name) for _, shares in accounts]
        hatch = ("", "///", "...")[index // COLOURS % 3]
        colour = line_style(_PART_COLOURS[index % COLOURS])["color"]
        axes.barh(range(len(accounts)), widths, left=left, height=0.6, label=_spaced(name), color=colour, hatch=hatch)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(accounts)), [short(label) for label, _ in accounts])
    axes.set_ylim(len(accounts) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    texts = []
    for label, shares in accounts:
        parts = sorted(shares.parts.items(), key=lambda part: -part[1])
        shown_parts = [f"{_spaced(name)} {_percent(shares, name):.1f}%" for name, _ in parts[:6]]
        texts.append(f"{label}: {', '.join(shown_parts)}")
    return drawn(figure, axes, texts, always=True)


def _goodput(shown: Shown, clock: Clock) -> Plot | None:
    if not any(len(run.goodput) > 1 for run, _ in shown):
        return None
    figure, axes = clock.axes("Goodput since the start", "share of the time (%)")
    texts = []
    for index, (run, label) in enumerate(shown):
        points = [(x, 100 * y) for x, y in thinned(clock.since_start(run, run.goodput), _MOST_POINTS)]
        if points:
            axes.plot(*columns(points), label=label, marker=".", **line_style(index))
            texts.append(f"{label}: {points[-1][1]:.1f}% at the end")
    axes.set_ylim(0, 100)
    return drawn(figure, axes, texts)


def _badput(shown: Shown, clock: Clock) -> Plot | None:
    """One group of bars for each cause: next to the goodput they would be too small."""
    accounts = [(index, label, found) for index, (run, label) in enumerate(shown) if (found := parts_of(run))]
    names = [name for name in share_names([found for _, _, found in accounts]) if name != "goodput"][:_MOST_CAUSES]
    if not names:
        return None
    height = 0.8 / len(accounts)
    figure, axes = axes_of("Badput by cause", "share of the wall time (%)", "", 1.5 + 0.22 * len(names) * len(accounts))
    axes.grid(visible=False, axis="y")
    texts = []
    for row, (index, label, found) in enumerate(accounts):
        shares = [_percent(found, name) for name in names]
        places = [place - 0.4 + (row + 0.5) * height for place in range(len(names))]
        axes.barh(places, shares, height=height * 0.9, label=label, color=line_style(index)["color"])
        texts.append(f"{label}: badput {100 - _percent(found, 'goodput'):.1f}% of {found.wall_s:.0f} s")
    axes.set_yticks(range(len(names)), [short(_spaced(name)) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    return drawn(figure, axes, texts)


def _rates(shown: Shown, clock: Clock) -> Plot | None:
    figure, axes = clock.axes("Ticks per second, by generation", "ticks per s")
    texts, largest = [], 0.0
    for index, (run, label) in enumerate(shown):
        points: Points = []
        known = [(g, rate) for g in run.generations if (rate := g.ticks_per_s) is not None]
        for g, rate in thinned_list(known, _MOST_MARKS):
            begin, end = g.resumed or g.formed, g.last_tick or g.formed
            points += [*clock.since_start(run, [(begin, rate), (end, rate)]), (nan, nan)]
        if points:
            axes.plot(*columns(points), label=label, marker="|", **{**line_style(index), "linewidth": 2.6})
            rates = [rate for _, rate in known]
            largest = max(largest, *rates)
            texts.append(f"{label}: {span_of(rates, '.3g')} ticks per s in {number_of(len(known), 'generation')}")
    if not texts:
        return None
    axes.set_ylim(0, largest * 1.15)
    return drawn(figure, axes, texts)


def _downtimes(shown: Shown, clock: Clock) -> Plot | None:
    figure, axes = clock.axes("Downtime of each change", "seconds")
    texts, values = [], []
    for index, (run, label) in enumerate(shown):
        for planned, marker, kind in ((True, "o", "planned change"), (False, "x", "failure")):
            found = [(g.formed, g.downtime_s) for g in run.generations if g.downtime_s and g.planned == planned]
            if not found:
                continue
            points = thinned(clock.since_start(run, found), _MOST_POINTS)
            name = kind if len(shown) == 1 else f"{label}: {kind}"
            axes.plot(*columns(points), marker, label=name, color=line_style(index)["color"], markeredgewidth=1.8)
            costs = [cost for _, cost in found]
            values += costs
            texts.append(f"{label}: {number_of(len(costs), kind)}, {span_of(costs, '.2g')} s")
    if not values:
        return None
    if max(values) > 30 * min(values):
        axes.set_yscale("log")
        axes.set_ylabel("seconds (logarithmic)")
    else:
        axes.set_ylim(0, max(values) * 1.15)
    return drawn(figure, axes, texts, always=True)


def _percent(shares: Shares, name: str) -> float:
    return 100 * shares.parts.get(name, 0.0) / max(shares.wall_s, 1e-9)


def _spaced(name: str) -> str:
    return printable(name.replace("_", " "))


def _failures_on_line(run: JobHistory) -> Points:
    """Return the failures as points on the line of the world size."""
    found, index, sizes = [], 0, run.sizes
    for failure in run.failures:
        while index + 1 < len(sizes) and sizes[index + 1][0] <= failure.time:
            index += 1
        if sizes and sizes[0][0] <= failure.time:
            found.append((failure.time, float(sizes[index][1])))
    return found
