"""Summary, event file, status and log lines show the same figures: those of the core."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from elasticstate.core import types as t
from elasticstate.core.accounting import figures_of
from elasticstate.core.state import Membership
from elasticstate.driver.job import Outcome
from elasticstate.driver.report import Report
from elasticstate.driver.status import status_text
from tests.kit.core import WHOLE_JOB, drive


def test_summary_event_and_status_show_the_same_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = Report("j", str(tmp_path / "events"), verbose=False)
    m: Membership | None = None
    for line in WHOLE_JOB.strip().splitlines():
        m, effects = drive(line, m, np=2, min_np=1, max_np=2)
        for effect in effects:
            if isinstance(effect, t.Note):
                extra = {"error": "", "time_ns": 0} if effect.event == "worker_exited" else {}
                report.event(effect.event, {**dict(effect.fields), **extra})
    assert m is not None
    figures = figures_of(m, 20.0)
    report.summary(figures, Outcome(0, "succeeded"))
    asyncio.run(report.close(60))

    text = "3 generations, 2 failures, downtime 2.90 s, 1 commit lost, 6 ticks redone, goodput "
    text_of_status = status_text("j", m, figures, "", 20.0)
    log = capfd.readouterr().err.splitlines()
    assert f"job j succeeded after 20.0 s: {text}{figures.goodput:.1%}" in log[-1]
    assert f"since the start of the job 20.0 s ago: {text}{figures.goodput:.1%}" in text_of_status

    assert f"time: 20.00 s = goodput {figures.times.goodput:.2f} s ({figures.goodput:.1%}) + boot " in text_of_status
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    last = events[-1]
    assert (last["event"], last["generations"], last["failures"]) == ("job_finished", 3, 2)
    assert (last["commits_lost"], last["ticks_lost"], last["lower_bounds"]) == (1, 6, [])
    assert last["wall_s"] == pytest.approx(last["goodput_s"] + sum(last["badput_s"].values()), abs=1e-4) == 20.0
    assert last["badput_s"] == {cause: round(s, 6) for cause, s in figures.times.badput().items()}
    assert (last["downtime_s"], last["goodput"]) == (2.9, round(figures.goodput or 0.0, 4))
    changes = [event for event in events if event["event"] == "training_resumed"]
    assert [(e["downtime_s"], e["commits_lost"], e["ticks_lost"]) for e in changes] == [(2.5, 1, 4), (0.4, 0, 2)]
    resumed = [line.rpartition("; ")[2] for line in log if "training resumed" in line]
    assert resumed == [
        "training resumed after 2.50 s, 1 commit lost, 4 ticks redone",
        "training resumed after 0.40 s, 0 commits lost, 2 ticks redone",
    ]
