"""The page of ``elasticrun report``: tables and plots of one or several jobs, in one HTML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from elasticstate.core.types import listed, number_of
from elasticstate.history.event_files import number
from elasticstate.history.job_history import GenerationHistory, JobHistory, JobSpan, WorkerFailed, parts_of, share_names
from elasticstate.history.plots import MOST_JOBS, copy_plots, plots, size_text, span_of
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
    return environment.get_template("report.html.jinja").render(
        title=f"Job {labels[0]}" if len(runs) == 1 else f"Comparison of {len(runs)} jobs",
        jobs=[_Job(run, label, f"job-{index}") for index, (run, label) in enumerate(zip(runs, labels, strict=True))],
        figures=_figures(runs),
        plots=plots(runs, labels),
        copy_plots=copy_plots(runs, labels),
        copy_failures=_copy_failures(runs, labels),
        parts=_parts(runs, labels),
        most_jobs=MOST_JOBS,
        most_rows=_MOST_ROWS,
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


class TableRow(NamedTuple):
    """Row of the table of all jobs."""

    name: str
    values: list[str]


def _figures(runs: Sequence[JobHistory]) -> list[TableRow]:
    """Return the rows of the table of all jobs, without those that are empty for each job."""
    columns = [_figures_of(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [TableRow(name, [column.get(name, "-") for column in columns]) for name in names]


def _figures_of(run: JobHistory) -> dict[str, str]:
    e: Mapping[str, Any] = run.finished or {}
    status = e.get("status") or "no end in the file: the job runs, or its driver was killed"
    sizes = [size for _, size in run.sizes[:-1]]
    share, shares = number(e, "goodput"), parts_of(run)
    stall_s = shares.parts.get("commit_stall") if shares is not None else None
    syncs = f"{run.syncs} workers, {size_text(run.sync_bytes)}, longest {duration(run.sync_seconds)}"
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
        **dict(run.copies.texts()),
        "drivers": str(run.drivers),
        "event file": run.path,
    }
    return {name: value for name, value in found.items() if value}


def _copy_failures(runs: Sequence[JobHistory], labels: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of the table of copies that failed, by job and reason."""
    return [
        {
            "job": label,
            "what": failure.what,
            "kind": failure.kind,
            "times": str(failure.times),
            "first": duration(failure.first - run.began),
            "last": duration(failure.last - run.began),
            "reason": _cut(failure.reason),
        }
        for run, label in zip(runs, labels, strict=True)
        for failure in run.copies.failures[:_MOST_ERRORS]
    ]


def _parts(runs: Sequence[JobHistory], labels: Sequence[str]) -> list[TableRow]:
    """Return the rows of the table of goodput and badput; the first row names the jobs."""
    accounts = [(label, shares) for run, label in zip(runs, labels, strict=True) if (shares := parts_of(run))]
    if not accounts:
        return []
    rows = [TableRow("", [label for label, _ in accounts])]
    for name in share_names([shares for _, shares in accounts]):
        found = [(shares.parts.get(name), max(shares.wall_s, 1e-9)) for _, shares in accounts]
        cells = ["-" if s is None else f"{duration(s)} ({s / wall:.1%})" for s, wall in found]
        rows.append(TableRow(name.replace("_", " "), cells))
    return rows


class _FailureGroup(NamedTuple):
    """Failures with the same cause and the same last line of the error."""

    how: str
    last_line: str
    number: int
    where: str
    first: str
    error: str


@dataclass(slots=True)
class _Job:
    """Values of the template for one job."""

    run: JobHistory
    label: str
    anchor: str

    @property
    def command(self) -> str:
        return "" if self.run.started is None else " ".join(self.run.started.get("command", ()))

    @property
    def root_cause(self) -> dict[str, str] | None:
        e = self.run.root_cause
        return None if e is None else {"reason": e["reason"], "error": _cut(str(e.get("error") or ""))}

    @property
    def generations(self) -> list[dict[str, object]]:
        return [self._generation(g) for g in _ends_of(self.run.generations)]

    @property
    def omitted(self) -> int:
        return max(0, len(self.run.generations) - _MOST_ROWS)

    def _generation(self, g: GenerationHistory) -> dict[str, object]:
        cause = g.cause or ("start of the job" if g is self.run.generations[0] else "not in the file")
        rate = g.ticks_per_s
        return {
            "number": g.number,
            "formed": duration(g.formed - self.run.began),
            "cause": cause,
            "kind": "" if not g.cause else "planned" if g.planned else "failure",
            "size": g.size,
            "hosts": g.hosts,
            "joined": listed(g.joined, shown=_SHOWN),
            "left": listed(g.left, shown=_SHOWN),
            "lasted": duration((self.run.last if g.ended is None else g.ended) - g.formed),
            "downtime": duration(g.downtime_s),
            "ticks_lost": ("≥ " if "ticks_lost" in g.lower_bounds else "") + str(g.ticks_lost),
            "rate": "-" if rate is None else f"{rate:.3g}",
        }

    @property
    def failure_groups(self) -> list[_FailureGroup]:
        groups: dict[tuple[str, str], list[WorkerFailed]] = {}
        for failure in self.run.failures:
            last_line = failure.error.strip().rpartition("\n")[2][:300]
            groups.setdefault((failure.how, last_line), []).append(failure)
        ordered = sorted(groups.items(), key=lambda group: -len(group[1]))[:_MOST_ERRORS]
        return [self._group(how, last_line, failures) for (how, last_line), failures in ordered]

    def _group(self, how: str, last_line: str, failures: list[WorkerFailed]) -> _FailureGroup:
        first = failures[0]
        rank = "no rank yet" if first.rank is None else f"rank {first.rank}"
        slots = list(dict.fromkeys(f"{failure.host}:{failure.slot}" for failure in failures))
        where = f"{first.host}:{first.slot} ({rank}, generation {first.generation})"
        at = f"{where}, {duration(first.time - self.run.began)} after the start"
        return _FailureGroup(how, last_line, len(failures), listed(slots, shown=_SHOWN), at, _cut(first.error))

    @property
    def hosts(self) -> list[dict[str, object]]:
        """Return the hosts with failures, drains or cooldowns, those with the most failures first."""
        failures: dict[str, Counter[str]] = {}
        for failure in self.run.failures:
            failures.setdefault(failure.host, Counter())[failure.how] += 1
        spans: dict[str, list[JobSpan]] = {}
        for span in self.run.spans:
            if span.host is not None:
                spans.setdefault(span.host, []).append(span)
        lost = Counter(m.host for m in self.run.marks if m.kind == "agent" and "reason" in m.details)
        names = sorted({*failures, *spans, *filter(None, lost)}, key=lambda host: -sum(failures.get(host, {}).values()))
        return [self._host(name, failures.get(name, Counter()), spans.get(name, []), lost[name]) for name in names]

    def _host(self, name: str, failures: Counter[str], spans: list[JobSpan], lost: int) -> dict[str, object]:
        drains = [span for span in spans if span.kind == "drain"]
        cooldowns = [span for span in spans if span.kind == "cooldown"]
        return {
            "name": name,
            "failures": sum(failures.values()),
            "causes": ", ".join(f"{how} ({count})" for how, count in failures.most_common(5)),
            "lost": lost,
            "drains": len(drains),
            "cooldowns": len(cooldowns),
            "cooldown_time": duration(sum(span.end - span.begin for span in cooldowns)) if cooldowns else "-",
            "reason": spans[-1].details.get("reason", "") if spans else "",
        }

    @property
    def stalls(self) -> list[dict[str, str]]:
        return [
            {
                "at": duration(span.begin - self.run.began),
                "lasted": duration(span.end - span.begin),
                "call": span.name.removeprefix("stall: "),
                "missing": str(span.details["missing"]),
                "end": str(span.details["end"]),
            }
            for span in self.run.spans
            if span.kind == "stall"
        ][:_MOST_ROWS]

    @property
    def drivers(self) -> list[str]:
        gaps = [span for span in self.run.spans if span.kind == "driver"]
        return [f"{span.name}: for {duration(span.end - span.begin)}" for span in gaps[:_MOST_ROWS]]

    @property
    def counts(self) -> str:
        failures = number_of(len(self.run.failures), "failure")
        return f"{number_of(len(self.run.generations), 'generation')}, {failures} of workers"


def _ends_of(generations: list[GenerationHistory]) -> list[GenerationHistory]:
    """Return the first and the last generations, as many as a table shows."""
    half = _MOST_ROWS // 2
    return generations if len(generations) <= _MOST_ROWS else [*generations[:half], *generations[-half:]]


def _cut(text: str) -> str:
    """Return the end of a text: a traceback ends with the exception."""
    return text if len(text) <= _MOST_TEXT else f"…{text[-_MOST_TEXT:]}"
