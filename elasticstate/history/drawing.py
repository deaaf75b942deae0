"""Drawing of the report's plots: matplotlib draws them, and the page's style sheet gives them their colours."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from elasticstate.history.job_history import JobHistory
from elasticstate.terminal import printable

COLOURS = 8  # colours of the style sheet
MOST_JOBS = 16  # jobs in one plot
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


def drawn(figure: Figure, axes: Axes, texts: Sequence[str], always: bool = False) -> Plot:
    """Return the plot as SVG without fixed size or colours. ``texts``: one sentence for each job."""
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
    value = count
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


# ------------------------------------------------------------------------------------------------------------- points


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


def thinned_list(values: list[Any], most: int) -> list[Any]:
    return values[:: -(-len(values) // most)] if values else values


def columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
