"""The page of hand-written events: its content, its safety, and that it needs nothing else."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from elasticstate.history.event_files import read_events
from elasticstate.history.job_history import histories
from elasticstate.history.page import duration, page
from tests.kit.events import EventLines, big_job, killed_and_restarted, with_copies

ALONE = {"meta", "link", "br", "img", "input", "path", "use", "rect", "line", "circle", "stop"}
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 9\nValueError: <b>bold</b> & </pre>'


class ParsedPage(HTMLParser):
    """Elements and text of a page. Each element must be closed where it belongs."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ALONE:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in ALONE:
            assert self._open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def made(*paths: Path) -> str:
    return page([run for path in paths for run in histories(str(path), read_events(str(path)))])


def with_account(path: Path, job: str = "job-1") -> Path:
    """Write a job whose events have accounts of time."""
    lines = EventLines(path, job).start().host(0, "a", 1).worker(1, "started", "a:0#1").worker(2, "ready", "a:0#1")
    first = {"wall_s": 2.0, "goodput_s": 0.0, "badput_s": {"boot": 2.0}, "redone_earlier_s": 0.0}
    second = {"wall_s": 8.0, "goodput_s": 5.0, "badput_s": {"regroup": 2.0, "commit_stall": 1.0}}
    lines.add(2, "generation_finished", **first).world(2, 1, ["a:0#1"]).add(10, "generation_finished", **second)
    badput = {"boot": 2.0, "regroup": 2.0, "commit_stall": 1.0}
    return lines.finished(10, goodput=0.5, wall_s=10.0, goodput_s=5.0, badput_s=badput).path


def test_workers_that_were_asked_to_end_have_not_failed(tmp_path: Path) -> None:
    """Workers without run are all stopped when one of them drains; a drained worker may end by SIGTERM, too."""
    lines = EventLines(tmp_path / "events").start().host(0, "a", 2)
    for slot in (0, 1):
        lines.worker(1, "started", f"a:{slot}#1")
    lines.world(2, 2, ["a:0#1", "a:1#1"]).add(3, "end", cause="a:1#1 drains", at="now", planned=True)
    for slot in (0, 1):
        end = {"exit_code": None, "signal": 15, "pid": 7, "error": "", "time_ns": 0}
        lines.worker(3.1, "exited", f"a:{slot}#1", rank=slot, expected=True, **end)
    lines.worker(4, "started", "a:0#2").world(5, 1, ["a:0#2"], ["a:0#1", "a:1#1"]).finished(9)
    (run,) = histories(str(lines.path), read_events(str(lines.path)))
    assert run.failures == []
    assert run.generations[1].planned
    assert [mark.name for mark in run.marks if mark.kind in ("failure", "interrupt")] == [
        "generation 1 interrupted: a:1#1 drains"
    ]
    text = ParsedPage(made(lines.path)).text
    assert "planned: a:1#1 drains" in text
    assert "0 failures of workers" in text


def test_the_page_has_what_happened(tmp_path: Path) -> None:
    text = ParsedPage(made(killed_and_restarted(tmp_path / "e", error=TRACEBACK).path)).text
    for part in (
        "Job job-1",
        "status succeeded",
        "wall time 20.1 s",
        "goodput 80.0%",
        "failures of workers 1",
        "workers 1 to 2",
        "syncs of state 1 workers, 1 kB, longest 0.100 s",
        "Command: python train.py",
        "2 10.2 s failure: a:1#1 was killed by SIGKILL 1 1 a:1#1 2.40 s 0.500 s 3",
        "3 12.6 s planned: a:1#2 joins 2 1 a:1#2 7.50 s 0.500 s 0",
        "SIGKILL: ValueError: <b>bold</b> & </pre>",
        "a:1 (rank 1, generation 1), 10.0 s after the start",
        'File "train.py", line 9',
    ):
        assert part in text


def test_the_rate_of_ticks_is_that_between_the_first_and_the_last_tick(tmp_path: Path) -> None:
    """Generation 2: 40 ticks after the first one, at 10.5 s, up to READY at 12.5 s."""
    (run,) = histories("e", read_events(str(killed_and_restarted(tmp_path / "e").path)))
    assert [g.ticks_per_s for g in run.generations] == [None, pytest.approx(20.0), None]
    assert "job-1: 20 ticks per s in 1 generation." in made(tmp_path / "e")


@pytest.mark.parametrize("number", [1, 2])
def test_the_page_needs_nothing_else_and_runs_nothing(tmp_path: Path, number: int) -> None:
    paths = [killed_and_restarted(tmp_path / f"e{index}", f"job-{index}").path for index in range(number)]
    text = made(*paths)
    parsed = ParsedPage(text)
    assert not {"script", "link", "img", "iframe", "object", "image", "base"} & {tag for tag, _ in parsed.tags}
    for tag, attributes in parsed.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), tag
            if name in ("src", "href", "xlink:href", "data", "action"):
                assert (value or "").startswith("#"), (tag, value)
    assert not re.search(r"url\((?!#)|@import", text)
    assert any("default-src 'none'" in (m.get("content") or "") for m in parsed.all("meta"))


def test_ids_are_unique_and_references_lead_somewhere(tmp_path: Path) -> None:
    parsed = ParsedPage(made(with_account(tmp_path / "a"), killed_and_restarted(tmp_path / "b").path))
    ids = Counter(value for _, attributes in parsed.tags if (value := attributes.get("id")) is not None)
    assert [name for name, count in ids.items() if count > 1] == []
    used = {v[1:] for _, attributes in parsed.tags if (v := attributes.get("href")) is not None}
    used |= {name for _, a in parsed.tags for v in a.values() for name in re.findall(r"url\(#([^)]+)\)", v or "")}
    used |= {name for _, a in parsed.tags for name in (a.get("aria-labelledby") or "").split()}
    assert used
    assert used <= set(ids)


def test_each_plot_has_a_title_axes_with_units_and_a_text_alternative(tmp_path: Path) -> None:
    text = made(with_account(tmp_path / "a"), killed_and_restarted(tmp_path / "b", "other").path)
    figures = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    labels = {
        "World size over time": ("time since the start of the job (s)", "workers"),
        "Goodput and badput by cause": ("share of the wall time (%)", "other"),
        "Goodput since the start": ("time since the start of the job (s)", "share of the time (%)"),
        "Badput by cause": ("share of the wall time (%)", "commit stall"),
        "Ticks per second, by generation": ("time since the start of the job (s)", "ticks per s"),
        "Downtime of each change": ("time since the start of the job (s)", "seconds"),
    }
    assert len(figures) == len(labels)
    for figure, (title, texts) in zip(figures, labels.items(), strict=True):
        parsed = ParsedPage(figure)
        (svg,) = parsed.all("svg")
        assert svg["role"] == "img"
        assert f">{title}</h3>" in figure
        assert re.search(rf'<title id="[^"]+">{title}</title><desc id="[^"]+">\S.*</desc>', figure)
        assert re.search(r"<figcaption>\S.*</figcaption>", figure)
        for label in texts:
            assert label in parsed.text, title
        assert "#0102" not in figure, "a placeholder of a colour"
        assert "currentColor" in figure


def test_copies_have_their_own_section(tmp_path: Path) -> None:
    text = made(with_copies(tmp_path / "e").path)
    section = text.partition("<h2>Copies</h2>")[2].partition("<section")[0]
    figures = re.findall(r"<figure>.*?</figure>", section, re.DOTALL)
    expected = {
        "Age of the newest replicated commit": ("seconds", "job-1: at most 4 s; 23 replications, 3 failed."),
        "Bandwidth of replication": (
            "MB per s",
            "job-1: 7 MB sent from host to host; up to 40 MB of memory for copies.",
        ),
        "Time to save a durable copy": ("failed attempt", "job-1: 2 saved in 0.25 to 1.5 s; 3 failed."),
        "Size of durable copies": ("MB", "job-1: 180 MB in all, the newest 90 MB."),
    }
    assert len(figures) == len(expected)
    for figure, (title, (label, caption)) in zip(figures, expected.items(), strict=True):
        assert f">{title}</h3>" in figure
        assert label in ParsedPage(figure).text
        assert f"<figcaption>{caption}</figcaption>" in figure
        assert "#0102" not in figure, "a placeholder of a colour"
        assert "var(--c0)" in figure
    table = ParsedPage(section).text
    for part in (
        "replication 3 24.0 s 36.0 s commit (1, 95) has not come",
        "durable copy full 2 15.0 s 17.0 s a durable copy could not be saved: No space left for /run/copy-17 durable",
        "durable copy storage 1 19.0 s 19.0 s a durable copy could not be saved: the process <b>was killed</b>",
    ):
        assert part in table
    summary = ParsedPage(text).text
    assert "replications 23, 3 failed durable copies 2 saved, 3 failed" in summary


def test_copies_of_several_jobs_are_compared(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "other", "other").start().host(0.1, "a", 1)
    lines.world(1, 1, ["a:0#1"]).durable(3, (1, 5), 500, 0.1).finished(9)
    text = made(with_copies(tmp_path / "e").path, lines.path)
    assert "job-1: 2 saved in 0.25 to 1.5 s; 3 failed. other: 1 saved in 0.1 s; 0 failed." in text
    assert "job-1: at most 4 s; 23 replications, 3 failed.<" in text, "the other has none"
    assert "job-1 replication 3 24.0 s" in ParsedPage(text).text


def test_a_job_whose_copies_all_failed_has_their_reasons(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "e").start().not_durable(3, "missing", "No such directory")
    lines.replication(9, None, 0, failed=1, bytes=0, memory_bytes=0, reason="host b was lost").finished(10)
    text = ParsedPage(made(lines.path)).text
    for part in ("job-1: 0 saved; 1 failed.", "host b was lost", "No such directory"):
        assert part in text
    assert "Age of the newest" not in text
    assert "Size of durable" not in text


def test_a_job_without_copies_has_no_such_section(tmp_path: Path) -> None:
    text = made(killed_and_restarted(tmp_path / "e").path)
    for part in ("<h2>Copies</h2>", "replications", "durable"):
        assert part not in text


def test_tables_have_headers_with_a_scope(tmp_path: Path) -> None:
    parsed = ParsedPage(made(killed_and_restarted(tmp_path / "e").path))
    assert parsed.all("table")
    assert {attributes.get("scope") for attributes in parsed.all("th")} == {"row", "col"}


def test_text_of_others_stays_text(tmp_path: Path) -> None:
    """Names, causes and tracebacks with HTML, formulas, control characters and half a surrogate pair."""
    bad = '<script>alert("x")</script>'
    host, job = f"{bad}\u202e", f"{bad}$\\frac{{1}}$\x1b[31m\ud800"
    lines = killed_and_restarted(tmp_path / "e", job, f"{TRACEBACK}{bad}\x00", host)
    lines.add(21, "root_cause", reason=f"{bad} failed", error=bad)
    lines.add(22, "host_cooldown", host=host, seconds=2.0, reason=bad)
    lines.add(23, "stall", call=bad, seconds=2.0, who=bad, waiting=[], missing=[])
    text = made(lines.path, with_account(tmp_path / "other", f"{job}2"))
    text.encode()
    parsed = ParsedPage(text)
    assert "<script" not in text
    assert parsed.all("b") == []
    assert parsed.text.count(bad) > 10
    assert not re.search(r"[\x00-\x08\x0e-\x1f\u202a-\u202e]", text)
    assert r"\x1b[31m\ud800" in parsed.text


def test_accounts_of_time_are_shown_where_the_events_have_them(tmp_path: Path) -> None:
    text = ParsedPage(made(with_account(tmp_path / "a"), killed_and_restarted(tmp_path / "b", "other").path)).text
    for part in (
        "commit stall 1.00 s -",
        "goodput 5.00 s (50.0%) 16.1 s (80.0%)",
        "boot 2.00 s (20.0%) -",
        "downtime - 0.500 s (2.5%)",
        "other - 3.52 s (17.5%)",
        "job-1: 50.0% at the end",
        "job-1: badput 50.0% of 10 s",
    ):
        assert part in text


def test_a_job_that_failed_before_its_first_world(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "e").start().host(0, "a", 1).worker(1, "started", "a:0#1")
    lines.exited(2, "a:0#1", None, code=1, error=TRACEBACK).add(2, "root_cause", reason="a:0#1 exited with 1")
    text = ParsedPage(made(lines.finished(3, "failed", goodput=None, downtime_s=None).path)).text
    for part in ("status failed", "workers no world", "downtime - ", "Root cause a:0#1 exited with 1", "no rank yet"):
        assert part in text


def test_a_job_that_still_runs_has_no_end(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "e").start().add(1, "warning", text="w")
    text = ParsedPage(made(lines.path)).text
    assert "no end in the file" in text
    assert "workers no world" in text
    lines.host(1, "a", 1).worker(2, "started", "a:0#1").worker(3, "ready", "a:0#1").world(4, 1, ["a:0#1"])
    assert "workers 1 drivers 1" in ParsedPage(made(lines.path)).text


def test_jobs_with_one_name_are_told_apart(tmp_path: Path) -> None:
    first = killed_and_restarted(tmp_path / "before.jsonl").path
    second = killed_and_restarted(tmp_path / "after.jsonl").path
    killed_and_restarted(second)
    parsed = ParsedPage(made(first, second))
    assert "Comparison of 3 jobs" in parsed.text
    for label in ("job-1 (before.jsonl)", "job-1 (after.jsonl) 1", "job-1 (after.jsonl) 2"):
        assert f"Job {label}" in parsed.text


def test_drivers_drains_cooldowns_and_stalls_are_listed(tmp_path: Path) -> None:
    lines = EventLines(tmp_path / "e").start().host(0, "a", 1)
    lines.add(5, "host_draining", host="a", reason="SIGTERM to the agent")
    lines.add(8, "host_cooldown", host="a", seconds=600.0, reason="preemption notice: SIGTERM")
    lines.add(9, "agent_lost", host="b", reason="was unreachable")
    lines.add(20, "driver_restarted", epoch=2, back=[], lost=["a"])
    lines.add(30, "stall", call="allreduce loss", seconds=4.0, waiting=[0], missing=[1], who="a:0 (never called)")
    lines.add(31, "stall_ended", call="allreduce loss", seconds=5.0, reason="the call has ended")
    lines.add(36, "no_tick", seconds=3.0, text="rank 0 is at train.py:14")
    lines.add(37, "no_tick_ended", seconds=4.0, reason="ticks go on").finished(38)
    text = ParsedPage(made(lines.path)).text
    for part in (
        "no event until driver 2 reattached: for 11.0 s",
        "a 0 0 1 1 30.0 s preemption notice: SIGTERM",
        "b 0 1 0 0 -",
        "26.0 s 5.00 s allreduce loss a:0 (never called) the call has ended",
        "33.0 s 4.00 s no tick rank 0 is at train.py:14 ticks go on",
    ):
        assert part in text


def test_workers_that_the_driver_stops_are_no_failures(tmp_path: Path) -> None:
    """A spare at the end of the job, a worker that boots, a drained host; but not a spare that is killed."""
    lines = EventLines(tmp_path / "e").start().host(0, "a", 4).host(0, "b", 1)
    workers = ["a:0#1", "a:1#1", "a:2#1", "a:3#1", "b:0#1"]
    for worker in workers:
        lines.worker(1, "started", worker)
    for worker in ("a:0#1", "a:1#1", "a:2#1", "b:0#1"):
        lines.worker(2, "ready", worker)
    lines.world(3, 2, ["a:0#1", "b:0#1"], hosts=2).add(4, "host_draining", host="b", reason="SIGTERM to the agent")
    lines.exited(5, "b:0#1", 1, signal=9).exited(6, "a:1#1", None, code=1, error=TRACEBACK)
    lines.exited(6, "a:3#1", None, signal=15).exited(6.5, "a:2#1", None, signal=9).exited(7, "a:0#1", 0, code=0)
    (run,) = histories("e", read_events(str(lines.path)))
    assert [(failure.host, failure.slot, failure.how) for failure in run.failures] == [("a", 2, "SIGKILL")]


def test_the_page_of_a_large_job_stays_small(tmp_path: Path) -> None:
    lines = big_job(tmp_path / "e", 16, 2000)
    text = made(lines)
    assert len(text) < 1_000_000
    assert "1800 are left out" in text
    assert "2000 generations, 2000 failures of workers" in text


def test_the_same_events_give_the_same_page(tmp_path: Path) -> None:
    path = with_account(tmp_path / "a")
    assert made(path) == made(path)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0941, "0.094 s"),
        (9.999, "10.00 s"),
        (12.34, "12.3 s"),
        (125, "2 min 05 s"),
        (11220, "3 h 07 min"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
