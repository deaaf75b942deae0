"""Plots of the report: world sizes, goodput, rates of ticks, downtimes, copies of commits."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from math import nan
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from elasticstate.core.event_file import Replication
from elasticstate.core.types import number_of
from elasticstate.history.job_history import JobHistory, Shares, parts_of, share_names
from elasticstate.terminal import printable

# -------------------------------------------------------------------------------------------------------------- drawing
# Drawing of the report's plots: matplotlib draws them, and the page's style sheet gives them their colours.


COLOURS = 8  # colours of the style sheet
MOST_JOBS = 16  # jobs in one plot
_MOST_POINTS = 1500  # of one line
_SVG = "http://www.w3.org/2000/svg"
TEXT, _GRID = "#010200", "#010201"  # placeholders, each replaced by a colour of the style sheet
_DASHES: tuple[Any, ...] = ("solid", (0, (4, 2)), (0, (1, 1.5)))
_SETTINGS = {
    "axes.axisbelow": True,
    "axes.edgecolor": TEXT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": TEXT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": TEXT,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "figure.facecolor": "none",
    "font.size": 11.5,
    "grid.color": _GRID,
    "legend.facecolor": "none",
    "legend.frameon": False,
    "legend.labelcolor": TEXT,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",  # text stays text: it can be read, searched and scaled
    "svg.hashsalt": "elasticstate",  # the same events give the same page
    "text.color": TEXT,
    "text.parse_math": False,  # names may contain $
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}

Points = list[tuple[float, float]]
Shown = list[tuple[JobHistory, str]]


class Clock(NamedTuple):
    """X axis of the plots over time: from the start of the job to the end of the longest one."""

    unit: str
    seconds: float  # of one unit
    longest: float  # in units

    def since_start(self, run: JobHistory, points: Iterable[tuple[float, float]]) -> Points:
        return [((time - run.began) / self.seconds, value) for time, value in points]

    def points(self, run: JobHistory, points: Iterable[tuple[float, float]], most: int = _MOST_POINTS) -> Points:
        return thinned(self.since_start(run, points), most)

    def axes(self, title: str, y: str) -> tuple[Figure, Axes]:
        figure, axes = axes_of(title, f"time since the start of the job ({self.unit})", y)
        axes.set_xlim(0, max(self.longest * 1.02, 1e-6))
        return figure, axes


class Plot(NamedTuple):
    """Plot with its text alternative."""

    title: str
    text: str
    svg: Markup


Maker = Callable[[Shown, Clock], Plot | None]


def made(runs: Sequence[JobHistory], labels: Sequence[str], makers: Iterable[Maker]) -> list[Plot]:
    """Return the plots for which the events have data."""
    shown = list(zip(runs[:MOST_JOBS], map(printable, labels), strict=False))
    clock = _clock(max(run.last - run.began for run, _ in shown))
    settings: Any = dict(matplotlib.rcParamsDefault.items())
    del settings["backend"]
    settings |= _SETTINGS
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # not: it makes its font cache
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name with glyphs that matplotlib's font lacks: the browser has them
        found = [make(shown, clock) for make in makers]
    return [plot for plot in found if plot is not None]


def axes_of(title: str, x: str, y: str, height: float = 3.1) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.0, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def drawn(figure: Figure, axes: Axes, texts: Sequence[str], always: bool = False) -> Plot | None:
    """Return the plot as SVG without fixed size or colours. ``texts``: one sentence for each job with data."""
    if not texts:
        return None
    handles, labels = axes.get_legend_handles_labels()
    if always or len(labels) > 1:
        ncols = 1 if max(map(len, labels)) > 28 else 2 if max(map(len, labels)) > 14 else 3
        figure.legend(handles, [short(text) for text in labels], loc="outside lower center", ncols=ncols)
    title, text = axes.get_title(loc="left"), ". ".join(texts) + "."
    axes.set_title("")  # the page has it
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    return Plot(title, text, _inline(buffer.getvalue(), title, text))


def _inline(svg: str, title: str, text: str) -> Markup:
    """Return an SVG as part of an HTML page: unique ids, colours of the page, and a title and a description."""
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(svg)
    prefix = re.sub(r"\W+", "-", title.lower())
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id":
                element.set(name, f"{prefix}-{value}")
            elif name.endswith("}href"):
                del element.attrib[name]
                element.set("href", f"#{prefix}-{value[1:]}")
            elif "url(#" in value:
                element.set(name, value.replace("url(#", f"url(#{prefix}-"))
    for name in ("width", "height"):
        del root.attrib[name]
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata") or child.tag.startswith("{http://www.w3.org/1999"):
                parent.remove(child)
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}-t {prefix}-d")
    for index, (tag, content) in enumerate((("title", title), ("desc", text))):
        element = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{prefix}-{tag[0]}"})
        element.text = content
        root.insert(index, element)
    return Markup(re.sub(r"#0102([0-9a-f]{2})", _colour, ElementTree.tostring(root, "unicode")))


def _colour(match: re.Match[str]) -> str:
    number = int(match[1], 16)
    return {0: "currentColor", 1: "var(--grid)"}.get(number, f"var(--c{number - 16})")


def line_style(index: int) -> dict[str, Any]:
    return {"color": f"#0102{16 + index % COLOURS:02x}", "linestyle": _DASHES[index // COLOURS % len(_DASHES)]}


def span_of(values: Sequence[float], form: str) -> str:
    """Return ``2 to 4``, or ``2`` if all values are equal."""
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def size_text(count: float) -> str:
    scale, unit = _unit(count)
    return f"{count / scale:.3g} {unit}"


def short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def _clock(longest_s: float) -> Clock:
    unit, seconds = ("h", 3600.0) if longest_s > 3 * 3600 else ("min", 60.0) if longest_s > 180 else ("s", 1.0)
    return Clock(unit, seconds, longest_s / seconds)


def thinned(points: Points, most: int) -> Points:
    """Return at most about ``most`` points: the last one of each part of the x axis, and the first of all."""
    if len(points) <= most:
        return points
    first, width = points[0][0], (points[-1][0] - points[0][0]) / most or 1.0
    kept = {int((x - first) / width): (x, y) for x, y in points}
    return [points[0], *kept.values()]


def columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


_MOST_CAUSES = 12  # of badput
_MOST_MARKS = 200  # failures of one line
_PART_COLOURS = (2, 1, 0, 3, 4, 5, 6, 7)  # goodput is green


def _sizes(shown: Shown, clock: Clock) -> Plot | None:
    figure, axes = clock.axes("World size over time", "workers")
    texts, largest, failures = [], 0, Points()
    for index, (run, label) in enumerate(shown):
        points = clock.points(run, run.sizes)
        if points:
            sizes = [size for _, size in run.sizes[:-1]]
            largest = max(largest, *sizes)
            axes.step(*columns(points), where="post", label=label, **line_style(index))
            texts.append(f"{label}: {span_of(sizes, 'd')} workers, {sizes[-1]} at the end")
        failures += clock.points(run, _failures_on_line(run), _MOST_MARKS)
    _cross(axes, failures, "failure of a worker")
    axes.set_ylim(0, largest * 1.12)
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    return drawn(figure, axes, texts, always=bool(failures))


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
        points = [(x, 100 * y) for x, y in clock.points(run, run.goodput)]
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
        for g, rate in known[:: max(1, -(-len(known) // _MOST_MARKS))]:
            begin, end = g.resumed or g.formed, g.last_tick or g.formed
            points += [*clock.since_start(run, [(begin, rate), (end, rate)]), (nan, nan)]
        if points:
            axes.plot(*columns(points), label=label, marker="|", **{**line_style(index), "linewidth": 2.6})
            rates = [rate for _, rate in known]
            largest = max(largest, *rates)
            texts.append(f"{label}: {span_of(rates, '.3g')} ticks per s in {number_of(len(known), 'generation')}")
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
            points = clock.points(run, found)
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


# ----------------------------------------------------------------------------------------------------------- copy plots
# Plots of the report about copies of commits: replication from host to host, and durable copies.


_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def _ages(shown: Shown, clock: Clock) -> Plot | None:
    figure, axes = clock.axes("Age of the newest replicated commit", "seconds")
    texts, values, failures = [], list[float](), Points()
    for index, (run, label) in enumerate(shown):
        points = [(e["time"], age) for e in run.copies.replications if (age := e["age_s"]) is not None]
        if points:
            ages = [age for _, age in points]
            values += ages
            axes.plot(*columns(clock.points(run, points)), label=label, marker=".", **line_style(index))
            counts = f"{number_of(run.copies.replicated, 'replication')}, {run.copies.failed} failed"
            texts.append(f"{label}: at most {max(ages):.3g} s; {counts}")
        failed = [(e["time"], e["age_s"] or 0.0) for e in run.copies.replications if e["failed"]]
        failures += clock.points(run, failed, _MOST_MARKS)
    _cross(axes, failures, "with failed replications")
    axes.set_ylim(0, max(values, default=0.0) * 1.15 or 1.0)
    return drawn(figure, axes, texts, always=bool(failures))


def _bandwidths(shown: Shown, clock: Clock) -> Plot | None:
    sent = [_bytes_per_s(found) for run, _ in shown for found in run.copies.replications]
    if not sent:
        return None
    scale, unit = _unit(max(sent))
    figure, axes = clock.axes("Bandwidth of replication", f"{unit} per s")
    texts = []
    for index, (run, label) in enumerate(shown):
        found = run.copies.replications
        if found:
            points = [(each["time"], _bytes_per_s(each) / scale) for each in found]
            axes.plot(*columns(clock.points(run, points)), label=label, marker=".", **line_style(index))
            memory = size_text(max(each["memory_bytes"] for each in found))
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
            points = clock.points(run, [(copy["time"], copy["seconds"]) for copy in saved])
            axes.plot(*columns(points), "o", label=label, color=line_style(index)["color"], markersize=5)
            values += [copy["seconds"] for copy in saved]
        if saved or failed:
            took = f" in {span_of([copy['seconds'] for copy in saved], '.2g')} s" if saved else ""
            texts.append(f"{label}: {len(saved)} saved{took}; {len(failed)} failed")
        failures += clock.points(run, [(time, 0.0) for time in failed], _MOST_MARKS)
    _cross(axes, failures, "failed attempt")
    axes.set_ylim(0, max(values, default=0.0) * 1.15 or 1.0)
    return drawn(figure, axes, texts, always=bool(failures))


def _sizes_of_copies(shown: Shown, clock: Clock) -> Plot | None:
    sizes = [copy["bytes"] for run, _ in shown for copy in run.copies.saved]
    if not sizes:
        return None
    scale, unit = _unit(max(sizes))
    figure, axes = clock.axes("Size of durable copies", unit)
    texts = []
    for index, (run, label) in enumerate(shown):
        saved = run.copies.saved
        if saved:
            points = clock.points(run, [(copy["time"], copy["bytes"] / scale) for copy in saved])
            axes.plot(*columns(points), "o", label=label, color=line_style(index)["color"], markersize=5)
            total = size_text(sum(copy["bytes"] for copy in saved))
            texts.append(f"{label}: {total} in all, the newest {size_text(saved[-1]['bytes'])}")
    axes.set_ylim(0, max(sizes) / scale * 1.15 or 1.0)
    return drawn(figure, axes, texts)


def _bytes_per_s(e: Replication) -> float:
    return e["bytes"] / e["seconds"] if e["seconds"] > 0 else 0.0


def _cross(axes: Axes, points: Points, label: str) -> None:
    """Mark failures, also those on the x axis, and name the mark in the legend."""
    if points:
        style: dict[str, Any] = {"color": TEXT, "markersize": 6, "markeredgewidth": 1.5, "zorder": 3, "clip_on": False}
        axes.plot(*columns(points), "x", label=label, **style)


def _unit(largest: float) -> tuple[float, str]:
    return next(((scale, unit) for scale, unit in _UNITS if largest >= scale), _UNITS[-1])


PLOTS: tuple[Maker, ...] = (_sizes, _parts, _goodput, _badput, _rates, _downtimes)
COPY_PLOTS: tuple[Maker, ...] = (_ages, _bandwidths, _durations, _sizes_of_copies)
