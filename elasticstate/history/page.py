"""The page of ``elasticrun report``: tables and plots of one or several jobs, in one HTML file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from elasticstate.core.types import listed, number_of
from elasticstate.history.event_files import number
from elasticstate.history.job_history import GenerationHistory, JobHistory, Span, WorkerFailed, parts_of, share_names
from elasticstate.history.plots import COPY_PLOTS, MOST_JOBS, PLOTS, made, size_text, span_of
from elasticstate.terminal import printable

_MOST_ROWS = 200  # of one table
_MOST_ERRORS = 30  # different failures with their tracebacks, of one job
_MOST_TEXT = 6000  # characters of one traceback
_SHOWN = 4  # workers in one cell


def page(runs: Sequence[JobHistory]) -> str:
    """Return the page as HTML."""
    labels = _labels(runs)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # host names, commands and tracebacks are text of others
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cut": _cut, "duration": duration, "listed": listed, "number_of": number_of}
    return environment.get_template("report.html.jinja").render(
        title=f"Job {labels[0]}" if len(runs) == 1 else f"Comparison of {len(runs)} jobs",
        jobs=[_Job(run, label) for run, label in zip(runs, labels, strict=True)],
        figures=_figures(runs),
        plots=made(runs, labels, PLOTS),
        copy_plots=made(runs, labels, COPY_PLOTS),
        copy_failures=[
            (label, run, failure)
            for run, label in zip(runs, labels, strict=True)
            for failure in run.copies.failures[:_MOST_ERRORS]
        ],
        parts=_parts(runs, labels),
        most_jobs=MOST_JOBS,
        most_rows=_MOST_ROWS,
        most_workers=_SHOWN,
    )


def _printable(value: object) -> object:
    """Escape control characters and bidirectional marks. Jinja escapes HTML after this function."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _labels(runs: Sequence[JobHistory]) -> list[str]:
    """Return a name for each run, different from the others: the job, with its file or its start if necessary."""
    names = [run.job for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.job} ({Path(run.path).name})" for run in runs]
    seen: Counter[str] = Counter()
    total = Counter(names)
    labels = []
    for name in names:
        seen[name] += 1
        labels.append(f"{name} {seen[name]}" if total[name] > 1 else name)
    return labels


def duration(seconds: float | None) -> str:
    """Return ``0.094 s``, ``12.3 s``, ``2 min 05 s`` or ``3 h 07 min``."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _bounded(e: Mapping[str, Any], name: str, text: str) -> str:
    return f"at least {text}" if name in e["lower_bounds"] else text


Rows = list[tuple[str, list[str]]]
"""Rows of a table: a name, and a value for each job."""


def _figures(runs: Sequence[JobHistory]) -> Rows:
    """Return the rows of the table of all jobs, without those that are empty for each job."""
    columns = [_figures_of(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [(name, [column.get(name, "-") for column in columns]) for name in names]


def _figures_of(run: JobHistory) -> dict[str, str]:
    e: Mapping[str, Any] = run.finished or {}
    status = e.get("status") or "no end in the file: the job runs, or its driver was killed"
    sizes = [size for _, size in run.sizes[:-1]]
    share, shares = number(e, "goodput"), parts_of(run)
    stall_s = shares.parts.get("commit_stall") if shares is not None else None
    sync_bytes, longest_s = sum(e["bytes"] for e in run.syncs), max((e["seconds"] for e in run.syncs), default=0.0)
    syncs = f"{len(run.syncs)} workers, {size_text(sync_bytes)}, longest {duration(longest_s)}"
    copies, durable = run.copies, f"{len(run.copies.saved)} saved, {len(run.copies.not_saved)} failed"
    found = {
        "status": str(status),
        "began": _clock(run.began),
        "wall time": duration(shares.wall_s if shares is not None else run.last - run.began),
        "goodput": "" if share is None else f"{share:.1%}",
        "generations": str(len(run.generations)),
        "failures of generations": str(e["failures"]) if e else "",
        "failures of workers": str(len(run.failures)),
        "downtime": _bounded(e, "downtime_s", duration(e["downtime_s"])) if e else "",
        "ticks redone": _bounded(e, "ticks_lost", str(e.get("ticks_lost", "-"))) if e else "",
        "commits lost": _bounded(e, "commits_lost", str(e.get("commits_lost", "-"))) if e else "",
        "workers": span_of(sizes, "d") if sizes else "no world",
        "commit stall": duration(stall_s) if stall_s is not None else "",
        "syncs of state": syncs if run.syncs else "",
        "replications": f"{copies.replicated}, {copies.failed} failed" if copies.replications else "",
        "durable copies": durable if copies.saved or copies.not_saved else "",
        "drivers": str(run.drivers),
        "event file": run.path,
    }
    return {name: value for name, value in found.items() if value}


def _parts(runs: Sequence[JobHistory], labels: Sequence[str]) -> Rows:
    """Return the rows of the table of goodput and badput; the first row names the jobs."""
    accounts = [(label, shares) for run, label in zip(runs, labels, strict=True) if (shares := parts_of(run))]
    if not accounts:
        return []
    rows = [("", [label for label, _ in accounts])]
    for name in share_names([shares for _, shares in accounts]):
        found = [(shares.parts.get(name), max(shares.wall_s, 1e-9)) for _, shares in accounts]
        cells = ["-" if s is None else f"{duration(s)} ({s / wall:.1%})" for s, wall in found]
        rows.append((name.replace("_", " "), cells))
    return rows


@dataclass(slots=True)
class _Job:
    """Values of the template for one job."""

    run: JobHistory
    label: str

    @property
    def generations(self) -> list[GenerationHistory]:
        """The first and the last generations, as many as a table shows."""
        found, half = self.run.generations, _MOST_ROWS // 2
        return found if len(found) <= _MOST_ROWS else [*found[:half], *found[-half:]]

    @property
    def failure_groups(self) -> list[tuple[str, str, list[str], list[WorkerFailed]]]:
        """Failures by cause: how they ended, the last line of their errors, their slots, the failures themselves."""
        groups: defaultdict[tuple[str, str], list[WorkerFailed]] = defaultdict(list)
        for failure in self.run.failures:
            groups[failure.how, failure.error.strip().rpartition("\n")[2][:300]].append(failure)
        ordered = sorted(groups.items(), key=lambda group: -len(group[1]))[:_MOST_ERRORS]
        return [
            (*key, list(dict.fromkeys(f"{f.host}:{f.slot}" for f in failures)), failures) for key, failures in ordered
        ]

    @property
    def hosts(self) -> list[tuple[str, Counter[str], list[Span], int]]:
        """The hosts with failures, drains, cooldowns or lost agents, those with the most failures first."""
        failures: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for failure in self.run.failures:
            failures[failure.host][failure.how] += 1
        spans: defaultdict[str, list[Span]] = defaultdict(list)
        for span in self.run.spans:
            if span.host is not None:
                spans[span.host].append(span)
        lost = Counter(m.host for m in self.run.marks if m.kind == "agent" and "reason" in m.details)
        names = sorted({*failures, *spans, *filter(None, lost)}, key=lambda host: -failures[host].total())
        return [(name, failures[name], spans[name], lost[name]) for name in names]

    def spans(self, kind: str) -> list[Span]:
        return [span for span in self.run.spans if span.kind == kind][:_MOST_ROWS]


def _cut(text: str) -> str:
    """Return the end of a text: a traceback ends with the exception."""
    return text if len(text) <= _MOST_TEXT else f"…{text[-_MOST_TEXT:]}"
